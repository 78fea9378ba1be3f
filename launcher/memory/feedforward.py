"""Feed-forward blocks as autograd keeps them: plain, gated, and mixtures of experts (transformers 5.23)."""

from __future__ import annotations

from launcher.memory.flow import Block
from launcher.memory.products import add, cast, dropout, matrix, product
from launcher.memory.tape import Storage, Tape, Value


def feed_forward(tape: Tape, block: Block, x: Value) -> Value:
    layout = block.layout
    if layout.experts:
        return _experts(tape, block, x)
    first = [linear for linear in layout.linears if linear.reads == "norm2"]
    last = next(linear for linear in layout.linears if linear.reads == "act" and "{}" in linear.path)
    if len(first) == 2 and block.liger:
        inner = _fused_gate(tape, *(product(tape, block, x, one) for one in first))
    elif len(first) == 2:
        gate = activate(tape, block, product(tape, block, x, first[0]))
        inner = _times(tape, gate, product(tape, block, x, first[1]))
    elif layout.gated:  # both in one product, taken apart by a view
        inner = _gated(tape, block, product(tape, block, x, first[0]))
    else:
        inner = activate(tape, block, product(tape, block, x, first[0]))
    inner = dropout(tape, inner, layout.inner_dropout > 0, block.dtypes.on_cpu)
    return product(tape, block, inner, last)


def _times(tape: Tape, first: Value, second: Value) -> Value:
    """A product of two activations, each of which the other's gradient reads."""
    saves = [x.storage for x, other in ((first, second), (second, first)) if other.node is not None]
    return tape.step([first, second], first.elements, max(first.width, second.width), saves=saves)


def _fused_gate(tape: Tape, gate: Value, up: Value) -> Value:
    """Liger's kernel keeps both inputs and writes their gradients over them."""
    saves = [gate.storage, up.storage]
    return tape.step([gate, up], gate.elements, gate.width, saves=saves, temporary=-gate.size - up.size)


def _gated(tape: Tape, block: Block, both: Value) -> Value:
    whole = tape.step([both], both.elements, both.width, view=both.storage)
    if whole.node is not None:
        whole.node.joined = True
    half = both.elements // 2
    gate, up = (tape.step([whole], half, both.width, view=both.storage, passes=True) for _ in range(2))
    return _times(tape, activate(tape, block, gate), up)


def activate(tape: Tape, block: Block, x: Value) -> Value:
    """The activation; most are one operation that keeps its input, a ReLU keeps its output."""
    n, w = x.elements, x.width
    name = block.layout.activation
    if name == "relu":
        return tape.step([x], n, w, save_out=True)
    if name != "gelu_new":
        return tape.step([x], n, w, saves=[x.storage])
    # 0.5 * x * (1 + tanh(c * (x + 0.044715 * x ** 3))), operation by operation.
    half = tape.step([x], n, w)
    base = cast(tape, x, 4) if block.float_operations else x
    w = base.width
    cube = tape.step([base], n, w, saves=[base.storage], temporary=2 * n * w)
    total = add(tape, x, tape.step([cube], n, w))
    tanh = tape.step([tape.step([total], n, w)], n, w, save_out=True)
    return _times(tape, half, tape.step([tanh], n, w, passes=True))


def _experts(tape: Tape, block: Block, x: Value) -> Value:
    """The way `grouped_mm`, transformers' default: chosen rows sorted by expert, two fused products."""
    layout, d = block.layout, block.dtypes
    count, hidden = layout.num_experts, block.hidden
    width = layout.experts // (3 * count * hidden)
    chosen = block.tokens * (layout.active_inner // width)
    weight = _route(tape, block, x, count, chosen)
    # Sorting keeps two numbers of 8 bytes for each chosen row.
    rows = tape.step([x], chosen * hidden, x.width, saves=[Storage(16 * chosen)])
    # peft gives the two matrices that are stored as one twice the rank.
    adapter = 2 * block.rank * count * (2 * width + hidden)
    both = _grouped(
        tape, block, cast(tape, rows, d.weight), 2 * width * chosen, layout.experts * 2 // 3, adapter
    )
    adapter = block.rank * count * (width + hidden)
    out = _grouped(tape, block, _gated(tape, block, both), hidden * chosen, layout.experts // 3, adapter)
    saves = [weight.storage] if weight.node is None else [weight.storage, out.storage]
    scaled_width = max(out.width, weight.width)
    temporary = scaled_width * out.elements if weight.node is not None else 0
    scaled = tape.step([out, weight], out.elements, scaled_width, saves=saves, temporary=temporary)
    back = tape.step([scaled], out.elements, scaled_width, saves=[Storage(8 * chosen)])
    return cast(tape, tape.step([back], x.elements, scaled_width), x.width)


def _grouped(tape: Tape, block: Block, x: Value, elements: int, entries: int, adapter: int) -> Value:
    """Each expert's product with its rows; `adapter`: parameters of what `all-linear` adds to the weights.

    peft adds an adapter's product to a copy of all experts' weights, through which gradients pass.
    """
    width = block.dtypes.weight
    stored = block.dtypes.adapter
    if stored is None:
        fresh = width * entries
        return tape.step([x], elements, width, saves=[x.storage], params=entries, fresh=fresh)
    if block.adapted is not None:
        return tape.step([x], elements, width)
    copy = Storage(width * entries, weight=True)
    # Each of the adapter's matrices is kept for the other's gradient, in the dtype of the experts.
    factors = [Storage(width * adapter, weight=True)] if width != stored else []
    folded = tape.step([], entries, width, view=copy, saves=factors, params=adapter, fresh=stored * adapter)
    return tape.step([x, folded], elements, width, saves=[x.storage, copy])


def _route(tape: Tape, block: Block, x: Value, count: int, chosen: int) -> Value:
    """The router: a small product, a softmax in float32, and the weights of the chosen experts."""
    entries = count * block.hidden
    adapter = block.rank * (count + block.hidden) if block.adapted is None else 0
    scores = matrix(tape, block, x, count, entries, params=entries if block.full else adapter)
    narrow = scores.width
    scores = cast(tape, scores, 4)
    shares = tape.step([scores], scores.elements, 4, save_out=True)
    top = tape.step([shares], chosen, 4, saves=[Storage(8 * chosen)])
    total = tape.step([top], block.tokens, 4)
    scaled = tape.step([top, total], chosen, 4, saves=[top.storage, total.storage])
    return cast(tape, scaled, narrow) if block.model_type == "qwen3_moe" else scaled
