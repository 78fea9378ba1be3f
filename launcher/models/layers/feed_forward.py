"""Feed-forward blocks as a tape records them, and mixtures of experts.

As read in transformers 5.23 (the families' modeling files, integrations/moe.py).
"""

from __future__ import annotations

from collections.abc import Callable

from launcher.models.layers.layout import Block, LayerTape
from launcher.models.layers.tape import Storage, Tape, Value

FOUR_BITS = ("nf4", "fp4")
"""Kinds of quantisation that reach experts."""


def feed_forward(tape: LayerTape, x: Value, *, drops: bool = False) -> Value:
    """A block that all tokens pass through. drops: a part of what its last product reads is dropped."""
    block = tape.block
    first = block.layout.reading("norm2")
    last = next(linear for linear in block.layout.reading("act") if "{}" in linear.path)
    if len(first) == 2 and block.liger:
        inner = _fused_gate(tape, *(tape.product(x, one) for one in first))
    elif len(first) == 2:
        gate = tape.activate(tape.product(x, first[0]))
        inner = tape.times(gate, tape.product(x, first[1]))
    elif first[0].out_features > last.in_features:  # both in one product, taken apart by a view
        inner = gated(tape, tape.product(x, first[0]))
    else:
        inner = tape.activate(tape.product(x, first[0]))
    inner = tape.dropout(inner, drops)
    made = tape.product(inner, last)
    tape.reads(x)
    return made


def _fused_gate(tape: Tape, gate: Value, up: Value) -> Value:
    """Liger's kernel keeps both inputs and writes their gradients over them."""
    saves = [gate.storage, up.storage]
    return tape.step([gate, up], gate.elements, gate.width, saves=saves, temporary=-gate.size - up.size)


def gated(tape: LayerTape, both: Value) -> Value:
    """An activated gate times a second product, as halves of one value."""
    gate, up = tape.views(both, *[both.elements // 2] * 2)
    return tape.times(tape.activate(gate), up)


def with_shared_block(tape: LayerTape, x: Value) -> Value:
    """Experts and the block beside them: Qwen's, which has a gate, is computed before them, others after."""
    block = tape.block
    gates = block.layout.reading("shared_gate")
    if not gates:
        routed = run_experts(tape, x, block.layout.route(tape, x))
        if not block.layout.reading("shared"):
            return routed
        return tape.add(routed, shared_block(tape, x))
    shared = shared_block(tape, x)
    routed = run_experts(tape, x, block.layout.route(tape, x))
    share = tape.product(x, gates[0])
    share = tape.step([share], share.elements, share.width, save_out=True)
    return tape.add(routed, tape.broadcast(shared, share))


def shared_block(tape: LayerTape, x: Value) -> Value:
    """What all tokens pass through beside their experts."""
    both = [tape.product(x, one) for one in tape.block.layout.reading("shared")]
    inner = tape.times(tape.activate(both[0]), both[1]) if both[1:] else gated(tape, both[0])
    return tape.product(inner, tape.block.layout.reading("shared_act")[0])


def chosen_rows(block: Block) -> int:
    """Rows that experts multiply: those of a token for each expert that it chose."""
    layout = block.layout
    width = layout.experts // (3 * layout.num_experts * block.hidden)
    return block.tokens * (layout.active_inner // width)


def run_experts(
    tape: LayerTape,
    x: Value,
    weight: Value,
    *,
    opened: Callable[[LayerTape, Value], Value] = gated,
    biased: Callable[[LayerTape, Value, Storage], Value] | None = None,
) -> Value:
    """The way `grouped_mm`, transformers' default: chosen rows sorted by expert, two fused products.

    weight: of each chosen expert; opened: what the second product reads of the first; biased: adds the bias
    of each row's expert, whose number is in the storage.
    """
    block = tape.block
    layout = block.layout
    count, hidden, chosen = layout.num_experts, block.hidden, chosen_rows(block)
    width = layout.experts // (3 * count * hidden)
    # Sorting keeps two numbers of 8 bytes for each chosen row.
    rows = tape.step([x], chosen * hidden, x.width, saves=[Storage(16 * chosen)])
    # peft gives the two matrices that are stored as one twice the rank.
    reached = int(layout.expert_adapters)
    ids = Storage(8 * chosen)
    adapter = 2 * reached * block.rank * count * (2 * width + hidden)
    both = grouped(
        tape, tape.cast(rows, expert_width(block)), 2 * width * chosen, layout.experts * 2 // 3,
        adapter,
    )  # fmt: skip
    adapter = reached * block.rank * count * (width + hidden)
    inner = opened(tape, biased(tape, both, ids) if biased else both)
    out = grouped(tape, inner, hidden * chosen, layout.experts // 3, adapter)
    out = biased(tape, out, ids) if biased else out
    saves = [weight.storage] if weight.node is None else [weight.storage, out.storage]
    scaled_width = max(out.width, weight.width)
    temporary = scaled_width * out.elements if weight.node is not None else 0
    scaled = tape.step([out, weight], out.elements, scaled_width, saves=saves, temporary=temporary)
    back = tape.step([scaled], out.elements, scaled_width, saves=[Storage(8 * chosen)])
    wide = tape.cast(back, 4) if block.float_operations else back
    # The gradient of a sum is the same for all its rows, and is laid out when it is narrowed.
    total = tape.step([wide], x.elements, wide.width, passes=wide is not back)
    for one in (rows, out, back):  # variables of the function
        tape.reads(one)
    return tape.cast(total, x.width)


def expert_width(block: Block) -> int:
    """Of an expert's value as it is multiplied."""
    return block.dtypes.compute if block.quantization in FOUR_BITS else block.dtypes.weight


def grouped(tape: LayerTape, x: Value, elements: int, entries: int, adapter: int) -> Value:
    """Each expert's product with its rows; `adapter`: parameters of what `all-linear` adds to the weights.

    peft adds an adapter's product to a copy of all experts' weights, through which gradients pass. Packed
    weights are unpacked for each pass, and kept for the input's gradient.
    """
    block = tape.block
    width = expert_width(block)
    stored = block.dtypes.adapter
    if stored is None:
        fresh = width * entries
        return tape.step([x], elements, width, saves=[x.storage], params=entries, fresh=fresh)
    if block.adapted is not None or not adapter:
        unpacked = [Storage(width * entries, weight=True)] if block.quantization in FOUR_BITS else []
        return tape.step([x], elements, width, saves=unpacked)
    copy = Storage(width * entries, weight=True)
    # Each of the adapter's matrices is kept for the other's gradient, in the dtype of the experts.
    factors = [Storage(width * adapter, weight=True)] if width != stored else []
    folded = tape.step([], entries, width, view=copy, saves=factors, params=adapter, fresh=stored * adapter)
    return tape.step([x, folded], elements, width, saves=[x.storage, copy])


def router_params(block: Block) -> int:
    """Trained parameters of a router: its matrix, or its adapter where `all-linear` reaches it."""
    count = block.layout.num_experts
    if block.full:
        return count * block.hidden
    reached = block.adapted is None and block.layout.expert_adapters
    return block.rank * (count + block.hidden) if reached else 0


def softmax_route(tape: LayerTape, x: Value, *, wide: bool = False) -> Value:
    """A small product, and a softmax in float32. wide: the weights of the chosen experts stay in float32."""
    block = tape.block
    count = block.layout.num_experts
    scores = tape.matrix(x, count, count * block.hidden, params=router_params(block))
    shares = chosen_shares(tape, tape.cast(scores, 4))
    return shares if wide else tape.cast(shares, scores.width)


def chosen_shares(tape: LayerTape, scores: Value) -> Value:
    """The softmax of all experts' scores, of which the largest are made to add up to 1."""
    chosen = chosen_rows(tape.block)
    shares = tape.step([scores], scores.elements, 4, save_out=True)
    top = tape.step([shares], chosen, 4, saves=[Storage(8 * chosen)])
    total = tape.step([top], tape.block.tokens, 4)
    return tape.step([top, total], chosen, 4, saves=[top.storage, total.storage])
