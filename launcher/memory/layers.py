"""What one layer of each family keeps for the backward pass.

A `Block` names everything that a layer's memory depends on; `layer_cost` records the layer on a `Tape`. As
read in transformers 5.23 (the families' modeling files, integrations/sdpa_attention.py), torch 2.13
(autocast_mode: every product casts its inputs; `mm` keeps its input where the weight is trained, and the
weight where the input needs a gradient; attention kernels of CPU and CUDA), peft 0.21 (tuners/lora/layer.py,
bnb.py) and bitsandbytes 0.50 (autograd/_functions.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from launcher.facts.architectures import Layout, Linear
from launcher.facts.capabilities import is_varlen
from launcher.memory.tape import Peak, Storage, Tape, Value


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Widths in bytes of what flows through a layer."""

    compute: int
    """Output of the matrix products."""
    residual: int
    """The stream between layers."""
    autocast: bool
    """torch.autocast: every product casts its own copy of a float32 input."""
    adapter: int | None = None
    """Weights of a LoRA adapter; None: the model itself is trained."""
    on_cpu: bool = False
    frozen_inputs: bool = False
    """Products keep their input though their matrix is frozen."""

    @property
    def weight(self) -> int:
        """Of the stored weights that are not quantised: as the stream that they write."""
        return self.residual


@dataclass(frozen=True, slots=True)
class Block:
    """One layer of a stack at one batch: everything that its memory depends on."""

    model_type: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    layout: Layout
    dtypes: Dtypes
    attention: str
    """eager | sdpa | flash_attention_2 | flex_attention | varlen"""
    rows: int
    length: int
    """Tokens of a row."""
    masked: bool = False
    """Attention gets a mask of positions."""
    padded: bool = False
    """Some of the tokens are padding."""
    rank: int = 0
    """Of the LoRA adapters."""
    adapted: tuple[str, ...] | None = None
    """Paths of the linears that have an adapter; None: all of them."""
    whole: tuple[str, ...] = ()
    """Paths of modules that are trained completely beside the adapters."""
    adapter_dropout: bool = False
    quantization: str = "none"
    liger: bool = False
    chunked: bool = False
    """The loss is computed by chunks of tokens."""
    one_by_one: bool = False
    """Attention is computed document by document."""
    cast_inputs: bool = True
    """An adapter copies its input into its own dtype."""
    grad: bool = True
    """The input needs a gradient; a frozen embedding's output does not."""

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def full(self) -> bool:
        """The model itself is trained."""
        return self.dtypes.adapter is None

    @property
    def float_operations(self) -> bool:
        """CUDA's autocast computes norms, powers and softmax in float32; a CPU's leaves them alone."""
        return self.dtypes.autocast and not self.dtypes.on_cpu


STORED = Storage(0)
"""A weight that is kept without a copy: a checkpoint computes again when its derivative is wanted."""


def cast(tape: Tape, x: Value, width: int) -> Value:
    """A copy in another dtype; the tensor itself where it has that dtype."""
    if x.width == width:
        return x
    return tape.step([x], x.elements, width)


def dropout(tape: Tape, x: Value, active: bool, on_cpu: bool) -> Value:
    """A CPU keeps the factors of each value in its dtype, CUDA a bool."""
    if not active:
        return x
    mask = Storage(x.size if on_cpu else x.elements)
    return tape.step([x], x.elements, x.width, saves=[mask])


def add(tape: Tape, first: Value, second: Value) -> Value:
    """The sum, in the wider dtype."""
    return tape.step([first, second], first.elements, max(first.width, second.width), passes=True)


def product(tape: Tape, block: Block, x: Value, linear: Linear) -> Value:
    """What `linear` makes of `x`."""
    if block.dtypes.adapter is not None and linear.path not in block.whole:
        return adapted(tape, block, x, linear, block.dtypes.adapter)
    bias = linear.out_features if linear.bias else 0
    return matrix(tape, block, x, linear.out_features, linear.weights, params=linear.weights + bias)


def matrix(tape: Tape, block: Block, x: Value, out: int, weights: int, *, params: int) -> Value:
    """A product with a stored matrix of `weights` entries; `params` of it are trained."""
    d = block.dtypes
    width, saves = d.weight, [STORED]
    if d.autocast:
        x, width = cast(tape, x, d.compute), d.compute
        if x.node is not None and d.weight != d.compute:
            saves.append(Storage(d.compute * weights, weight=True))
    if params or d.frozen_inputs:
        saves.append(x.storage)
    rows = x.elements // _inputs(weights, out)
    return tape.step([x], rows * out, width, saves=saves, params=params, fresh=width * params)


def _inputs(weights: int, out: int) -> int:
    return max(1, weights // max(out, 1))


def adapted(tape: Tape, block: Block, x: Value, linear: Linear, width: int) -> Value:
    """A frozen product, and the two small ones of an adapter that is trained.

    `width`: bytes of an adapter's value.
    """
    out = linear.out_features
    base = frozen(tape, block, x, out, linear.weights)
    if linear.skipped if block.adapted is None else linear.path not in block.adapted:
        return base
    d = block.dtypes
    # peft's layers over quantised weights leave casts to autocast, but ask only whether CUDA's is on.
    conversion = block.quantization == "none" or not d.autocast or d.on_cpu
    source = cast(tape, x, width) if conversion and block.cast_inputs else x
    source = dropout(tape, source, block.adapter_dropout, d.on_cpu)
    inner = _small(tape, block, source, linear.in_features, block.rank, width)
    update = _small(tape, block, inner, block.rank, out, width)
    scaled = tape.step([update], update.elements, update.width)
    if block.quantization != "none":
        return add(tape, base, cast(tape, scaled, base.width) if conversion else scaled)
    return cast(tape, add(tape, base, scaled), base.width)


def _small(tape: Tape, block: Block, x: Value, inputs: int, out: int, stored: int) -> Value:
    """A product with one of an adapter's matrices, whose values are `stored` as so many bytes."""
    d = block.dtypes
    width = d.compute if d.autocast else stored
    x = cast(tape, x, width)
    rows = x.elements // inputs
    params = inputs * out
    saves = [x.storage]
    if width != stored and x.node is not None:
        saves.append(Storage(width * params, weight=True))
    return tape.step([x], rows * out, width, saves=saves, params=params, fresh=width * params)


def frozen(tape: Tape, block: Block, x: Value, out: int, weights: int) -> Value:
    """A product whose matrix is not trained, perhaps quantised."""
    d, inputs = block.dtypes, _inputs(weights, out)
    if block.quantization == "none":
        return matrix(tape, block, x, out, weights, params=0)
    if block.quantization == "int8":
        # The function's context keeps the input itself, out of reach of saved-tensor hooks.
        if x.node is not None:
            tape.hold(x.storage)
        rows = x.elements // inputs
        # The CPU's way is an ordinary product, which autocast narrows; CUDA's answers in the input's dtype.
        width = d.compute if d.autocast and d.on_cpu else x.width
        # The derivative unpacks the weight, and casts the gradient, to the input's dtype.
        temporary = x.width * weights + (x.width * rows * out if width != x.width else 0)
        return tape.step([x], rows * out, width, temporary=temporary)
    # 4 bits: nothing is kept; the derivative unpacks the weight in the compute dtype, then casts it.
    inner = cast(tape, x, d.compute)
    made = tape.step([inner], x.elements // inputs * out, d.compute, temporary=d.compute * weights)
    return cast(tape, made, x.width)


def norm(tape: Tape, block: Block, x: Value, width: int) -> Value:
    """A norm over the last `width` values of `x`."""
    if not block.layout.rms_norm:
        return _layer_norm(tape, block, x, width)
    if block.liger:
        # Liger's kernel keeps its input and one float32 per row; but for Gemma 2 and 3 it writes gradients
        # over their source.
        saves = [x.storage, Storage(4 * (x.elements // width))]
        return tape.step([x], x.elements, x.width, saves=saves, passes=not block.layout.output_norms)
    if block.layout.wide_norm_weight:
        return _wide_norm(tape, block, x, width)
    return _rms_norm(tape, block, x, width)


def _layer_norm(tape: Tape, block: Block, x: Value, width: int) -> Value:
    rows = x.elements // width
    if block.float_operations:
        x = cast(tape, x, 4)
    params = 2 * width if block.full else 0
    statistics = Storage(8 * rows)
    return tape.step(
        [x], x.elements, x.width, saves=[x.storage, statistics], params=params, fresh=x.width * params
    )


def normalised(tape: Tape, squared: Value, x: Value, width: int) -> Value:
    """`x * rsqrt(mean(squared ** 2))`, in float32."""
    n, rows = x.elements, x.elements // width
    # The derivative of a power holds the power below it and its multiple.
    power = tape.step([squared], n, 4, saves=[squared.storage], temporary=2 * squared.size)
    mean = tape.step([power], rows, 4)
    root = tape.step([mean], rows, 4, save_out=True)
    saves = [root.storage]
    if root.node is not None:
        saves.append(x.storage)
    # The gradient of the factors is as wide as the values before it is summed.
    return tape.step([x, root], n, 4, saves=saves, temporary=4 * n)


def weighted(tape: Tape, block: Block, x: Value, width: int) -> Value:
    """`weight * x`; the weight's gradient is as wide as `x` before it is summed."""
    params = width if block.full else 0
    saves = [x.storage] if params else [STORED]
    temporary = x.size if params else 0
    return tape.step(
        [x], x.elements, x.width, saves=saves, temporary=temporary, params=params, fresh=x.width * params
    )


def _rms_norm(tape: Tape, block: Block, x: Value, width: int) -> Value:
    wide = cast(tape, x, 4)
    # T5 scales the 16-bit input itself, in addition to the copy that was squared.
    read = x if block.layout.position_bias else wide
    return weighted(tape, block, cast(tape, normalised(tape, wide, read, width), x.width), width)


def _wide_norm(tape: Tape, block: Block, x: Value, width: int) -> Value:
    wide = cast(tape, x, 4)
    return cast(tape, weighted(tape, block, normalised(tape, wide, wide, width), width), x.width)


def attention(tape: Tape, block: Block, x: Value, *, read: Value | None = None, out: str = "attn") -> Value:
    """Attention of `x` over itself, or over `read`; `out` names what its last product reads."""
    layout = block.layout
    if layout.mixer != "attention":
        from launcher.memory.mixers import MIXERS  # made of the operations here

        return MIXERS[layout.mixer](tape, block, x)
    queries, keys, values = _project(tape, block, x, read, out)
    gate = None
    if queries.elements > block.tokens * block.heads * block.head_dim:
        queries, gate = views(tape, queries, *[queries.elements // 2] * 2)
        gate = tape.step([gate], gate.elements, gate.width)
    if layout.qk_norm:
        queries, keys = norm(tape, block, queries, block.head_dim), norm(tape, block, keys, block.head_dim)
    elif layout.qk_norm_joint:
        widths = block.heads * block.head_dim, block.kv_heads * block.head_dim
        queries, keys = norm(tape, block, queries, widths[0]), norm(tape, block, keys, widths[1])
    if not layout.positions and not layout.position_bias and read is None and layout.rotary_share:
        queries, keys = rotate(tape, block, queries), rotate(tape, block, keys)
    if layout.scaled_queries:
        queries = tape.step([queries], queries.elements, queries.width)
    mixed = _mix(tape, block, queries, keys, values)
    if gate is not None:
        mixed = times(tape, mixed, tape.step([gate], gate.elements, gate.width, save_out=True))
    last = next(linear for linear in layout.linears if linear.reads == out)
    made = product(tape, block, mixed, last)
    tape.reads(x)
    return made


def _project(tape: Tape, block: Block, x: Value, read: Value | None, out: str) -> tuple[Value, Value, Value]:
    linears = block.layout.linears
    if out == "attn_cross":
        first = [one for one in linears if one.reads in ("norm_cross", "encoder")]
    else:
        first = [one for one in linears if one.reads == "norm1"]
    if len(first) == 3:
        reads = (x, read or x, read or x)
        q, k, v = (product(tape, block, y, one) for y, one in zip(reads, first, strict=True))
        return q, k, v
    return _split(tape, block, product(tape, block, x, first[0]))


def _split(tape: Tape, block: Block, fused: Value) -> tuple[Value, Value, Value]:
    """Views of one product; the families that slice it write each gradient into zeros of the whole."""
    share = block.head_dim * block.tokens
    sizes = (block.heads * share, block.kv_heads * share, block.kv_heads * share)
    if block.layout.qkv_sliced:
        q, k, v = (tape.step([fused], n, fused.width, view=fused.storage) for n in sizes)
        return q, k, v
    whole = tape.step([fused], fused.elements, fused.width, view=fused.storage)
    if whole.node is not None:
        whole.node.joined = True
    q, k, v = (tape.step([whole], n, fused.width, view=fused.storage, passes=True) for n in sizes)
    return q, k, v


def rotate(tape: Tape, block: Block, x: Value) -> Value:
    """Rotary positions: `x * cos + rotate_half(x) * sin`; the factors are the same for all layers."""
    d, rest = block.dtypes, None
    if block.liger:  # in place, forwards and backwards
        return tape.step([x], x.elements, x.width, view=x.storage, passes=True)
    whole = x
    if block.layout.rotary_joined:
        turned = int(x.elements * block.layout.rotary_share)
        x = tape.step([whole], turned, whole.width, view=whole.storage)
        rest = tape.step([whole], whole.elements - turned, whole.width, view=whole.storage)
    width, n = max(x.width, d.residual), x.elements
    straight = tape.step([x], n, width)
    low = tape.step([x], n // 2, x.width, view=x.storage)
    high = tape.step([x], n // 2, x.width, view=x.storage)
    high = tape.step([high], n // 2, x.width)
    half = tape.step([low, high], n, x.width, passes=True)
    rotated = add(tape, straight, tape.step([half], n, width))
    if block.layout.narrow_rotation:
        rotated = cast(tape, rotated, x.width)
    if rest is None:
        return rotated
    return tape.step([rotated, rest], whole.elements, width, passes=True)


def _repeat(tape: Tape, block: Block, x: Value) -> Value:
    """Grouped keys or values, once for each query head."""
    groups = block.heads // block.kv_heads
    return x if groups == 1 else tape.step([x], x.elements * groups, x.width)


def _mix(tape: Tape, block: Block, q: Value, k: Value, v: Value) -> Value:
    """What attention makes of queries, keys and values, laid out as the last product reads it."""
    d, layout = block.dtypes, block.layout
    if block.attention == "eager":
        return _eager(tape, block, q, _repeat(tape, block, k), _repeat(tape, block, v))
    # torch's CPU kernel takes neither dropout nor a mask that learns.
    fallback = d.on_cpu and (layout.attention_dropout > 0 or layout.position_bias)
    # Kernels of CPU and those of any length take grouped keys, others take them repeated.
    varlen = is_varlen(block.attention)
    grouped = not fallback if d.on_cpu and (varlen or not block.masked) else varlen and not block.one_by_one
    if not grouped:
        k, v = _repeat(tape, block, k), _repeat(tape, block, v)
    if d.autocast:
        q, k, v = (cast(tape, x, d.compute) for x in (q, k, v))
    if fallback:
        return _fallback(tape, block, q, k, v)
    if block.one_by_one:  # documents are views, whose gradients are put side by side again
        q, k, v = (tape.step([x], x.elements, x.width, view=x.storage) for x in (q, k, v))
    saves = [q.storage, k.storage, v.storage, Storage(4 * (q.elements // block.head_dim))]
    maps = block.heads if layout.position_bias else int(block.masked and block.attention == "sdpa")
    # A mask is turned into numbers by each layer; learned biases of distances are one for each head.
    saves.append(Storage(q.width * maps * block.tokens * block.length))
    # CUDA's derivative sums the queries' gradient in float32.
    temporary = 0 if d.on_cpu else 4 * q.elements
    mixed = tape.step([q, k, v], q.elements, q.width, saves=saves, save_out=True, temporary=temporary)
    if block.one_by_one:  # and so is what attention makes of each
        mixed = tape.step([mixed], mixed.elements, mixed.width, passes=True)
    # Queries that were joined from parts are stored head by head, and so is the kernel's result; without
    # padding in between, rows are put back to their places.
    moved = layout.rotary_joined or (block.padded and block.attention == "flash_attention_2")
    return _side_by_side(tape, block, mixed) if moved else mixed


def _scores(block: Block) -> int:
    """Numbers of the attention maps."""
    return block.heads * block.tokens * block.length


def _bmm(tape: Tape, block: Block, first: Value, second: Value, elements: int) -> Value:
    """A product of two activations, each copied where heads are not contiguous."""
    d = block.dtypes
    if d.autocast:
        first, second = cast(tape, first, d.compute), cast(tape, second, d.compute)
    return tape.step([first, second], elements, first.width, saves=[first.storage, second.storage])


def _side_by_side(tape: Tape, block: Block, x: Value) -> Value:
    """A copy with each head's rows together, which a product of many heads reads."""
    if block.rows == 1 and x.width == block.dtypes.compute:
        return x
    return tape.step([x], x.elements, x.width, passes=True)


def _eager(tape: Tape, block: Block, q: Value, k: Value, v: Value) -> Value:
    d, layout, n = block.dtypes, block.layout, _scores(block)
    q, k, v = (cast(tape, x, d.compute) if d.autocast else x for x in (q, k, v))
    q, k, v = (_side_by_side(tape, block, x) for x in (q, k, v))
    scores = _bmm(tape, block, q, k, n)
    scores = tape.step([scores], n, scores.width)
    if layout.score_cap:
        scores = tape.step([scores], n, scores.width)
        scores = tape.step([scores], n, scores.width, save_out=True)
        scores = tape.step([scores], n, scores.width)
    # The mask has the dtype of the residual stream.
    wide = max(scores.width, d.residual) if block.masked or layout.causal else scores.width
    scores = tape.step([scores], n, wide, passes=True)
    if layout.float_softmax or block.float_operations:
        scores = cast(tape, scores, 4)
    weights = tape.step([scores], n, scores.width, save_out=True)
    weights = cast(tape, weights, d.compute)
    weights = dropout(tape, weights, layout.attention_dropout > 0, d.on_cpu)
    return _bmm(tape, block, weights, v, q.elements)


def _fallback(tape: Tape, block: Block, q: Value, k: Value, v: Value) -> Value:
    """Attention of single operations in float32."""
    d, layout, n, width = block.dtypes, block.layout, _scores(block), q.width
    q, k, v = (cast(tape, x, 4) for x in (q, k, v))
    q = tape.step([q], q.elements, 4)
    k = tape.step([k], k.elements, 4)
    q, k, v = (_side_by_side(tape, block, x) for x in (q, k, v))
    scores = tape.step([q, k], n, 4, saves=[q.storage, k.storage])
    weights = tape.step([scores], n, 4, save_out=True)
    weights = dropout(tape, weights, layout.attention_dropout > 0, d.on_cpu)
    mixed = tape.step([weights, v], q.elements, 4, saves=[weights.storage, v.storage])
    mixed = cast(tape, mixed, width)
    # Heads are laid side by side again, which copies.
    return tape.step([mixed], mixed.elements, width, passes=True)


def feed_forward(tape: Tape, block: Block, x: Value) -> Value:
    layout = block.layout
    if layout.experts:
        shared = _shared_block(tape, block, x)
        routed = _experts(tape, block, x)
        return routed if shared is None else add(tape, routed, shared)
    first = [linear for linear in layout.linears if linear.reads == "norm2"]
    last = next(linear for linear in layout.linears if linear.reads == "act" and "{}" in linear.path)
    if len(first) == 2 and block.liger:
        inner = _fused_gate(tape, *(product(tape, block, x, one) for one in first))
    elif len(first) == 2:
        gate = activate(tape, block, product(tape, block, x, first[0]))
        inner = times(tape, gate, product(tape, block, x, first[1]))
    elif layout.gated:  # both in one product, taken apart by a view
        inner = _gated(tape, block, product(tape, block, x, first[0]))
    else:
        inner = activate(tape, block, product(tape, block, x, first[0]))
    inner = dropout(tape, inner, layout.inner_dropout > 0, block.dtypes.on_cpu)
    made = product(tape, block, inner, last)
    tape.reads(x)
    return made


def _shared_block(tape: Tape, block: Block, x: Value) -> Value | None:
    """What all tokens pass through beside their experts, perhaps with a gate of one number for each."""
    linears = block.layout.linears
    first = [one for one in linears if one.reads == "shared"]
    if not first:
        return None
    both = [product(tape, block, x, one) for one in first]
    inner = times(tape, activate(tape, block, both[0]), both[1]) if both[1:] else _gated(tape, block, both[0])
    out = product(tape, block, inner, next(one for one in linears if one.reads == "shared_act"))
    for one in (one for one in linears if one.reads == "shared_gate"):
        gate = product(tape, block, x, one)
        gate = tape.step([gate], gate.elements, gate.width, save_out=True)
        out = broadcast(tape, out, gate)
    return out


def broadcast(tape: Tape, x: Value, factors: Value) -> Value:
    """`x` times fewer factors, whose gradient is as wide as `x` before it is summed."""
    width = max(x.width, factors.width)
    saves = [one.storage for one, other in ((x, factors), (factors, x)) if other.node is not None]
    temporary = x.elements * width if factors.node is not None else 0
    return tape.step([x, factors], x.elements, width, saves=saves, temporary=temporary)


def views(tape: Tape, whole: Value, *sizes: int) -> list[Value]:
    """Parts of a product as views of it, whose gradients wait for each other."""
    both = tape.step([whole], whole.elements, whole.width, view=whole.storage)
    if both.node is not None:
        both.node.joined = True
    return [tape.step([both], n, whole.width, view=whole.storage, passes=True) for n in sizes]


def times(tape: Tape, first: Value, second: Value) -> Value:
    """A product of two activations, each of which the other's gradient reads."""
    saves = [x.storage for x, other in ((first, second), (second, first)) if other.node is not None]
    return tape.step([first, second], first.elements, max(first.width, second.width), saves=saves)


def _fused_gate(tape: Tape, gate: Value, up: Value) -> Value:
    """Liger's kernel keeps both inputs and writes their gradients over them."""
    saves = [gate.storage, up.storage]
    return tape.step([gate, up], gate.elements, gate.width, saves=saves, temporary=-gate.size - up.size)


def _gated(tape: Tape, block: Block, both: Value) -> Value:
    gate, up = views(tape, both, *[both.elements // 2] * 2)
    return times(tape, activate(tape, block, gate), up)


def activate(tape: Tape, block: Block, x: Value) -> Value:
    """The activation; most are one operation that keeps its input, a ReLU keeps its output."""
    n, w = x.elements, x.width
    name = block.layout.activation
    if name in ("relu", "relu2"):
        positive = tape.step([x], n, w, save_out=True)
        return _square(tape, block, positive) if name == "relu2" else positive
    if name == "xielu":
        return _xielu(tape, block, x)
    if name != "gelu_new":
        return tape.step([x], n, w, saves=[x.storage])
    # 0.5 * x * (1 + tanh(c * (x + 0.044715 * x ** 3))), operation by operation.
    half = tape.step([x], n, w)
    base = cast(tape, x, 4) if block.float_operations else x
    w = base.width
    cube = tape.step([base], n, w, saves=[base.storage], temporary=2 * n * w)
    total = add(tape, x, tape.step([cube], n, w))
    tanh = tape.step([tape.step([total], n, w)], n, w, save_out=True)
    return times(tape, half, tape.step([tanh], n, w, passes=True))


def _square(tape: Tape, block: Block, x: Value) -> Value:
    wide = cast(tape, x, 4) if block.float_operations else x
    return tape.step([wide], x.elements, wide.width, saves=[wide.storage], temporary=2 * wide.size)


def _xielu(tape: Tape, block: Block, x: Value) -> Value:
    """transformers' Python version: `where(x > 0, a * x * x + b * x, (expm1(min(x, e)) - x) * c + b * x)`.

    `a` and `c` are trained, in the dtype of the weights; with the model frozen they are constants.
    """
    n, trained, positive = x.elements, block.full, Value(x.elements, 1, Storage(x.elements), None)
    tape.reads(positive)
    kept = [x.storage] if trained else []
    width = max(x.width, block.dtypes.weight)
    scaled = tape.step([x], n, width, saves=kept, temporary=n * width if trained else 0)
    square = times(tape, scaled, x)
    above = add(tape, square, tape.step([x], n, x.width))
    least = tape.step([x], n, x.width, saves=[x.storage])
    base = cast(tape, least, 4) if block.float_operations else least
    power = tape.step([base], n, base.width, save_out=True)
    gap = tape.step([power, x], n, power.width)
    kept = [gap.storage] if trained else []
    width = max(gap.width, block.dtypes.weight)
    curve = tape.step([gap], n, width, saves=kept, temporary=n * width if trained else 0)
    below = add(tape, curve, tape.step([x], n, x.width))
    return tape.step([above, below], n, max(above.width, below.width), saves=[positive.storage])


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
    reached = int(layout.expert_adapters)
    adapter = 2 * reached * block.rank * count * (2 * width + hidden)
    both = _grouped(
        tape, block, cast(tape, rows, d.weight), 2 * width * chosen, layout.experts * 2 // 3, adapter
    )
    adapter = reached * block.rank * count * (width + hidden)
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
    if block.adapted is not None or not adapter:
        return tape.step([x], elements, width)
    copy = Storage(width * entries, weight=True)
    # Each of the adapter's matrices is kept for the other's gradient, in the dtype of the experts.
    factors = [Storage(width * adapter, weight=True)] if width != stored else []
    folded = tape.step([], entries, width, view=copy, saves=factors, params=adapter, fresh=stored * adapter)
    return tape.step([x, folded], elements, width, saves=[x.storage, copy])


def _route(tape: Tape, block: Block, x: Value, count: int, chosen: int) -> Value:
    """The router: a small product, a softmax in float32, and the weights of the chosen experts."""
    entries = count * block.hidden
    reached = block.adapted is None and block.layout.expert_adapters
    adapter = block.rank * (count + block.hidden) if reached else 0
    if block.layout.router == "sigmoid":
        return _sigmoid_route(tape, block, x, chosen, entries if block.full else adapter)
    scores = matrix(tape, block, x, count, entries, params=entries if block.full else adapter)
    narrow = scores.width
    scores = cast(tape, scores, 4)
    shares = tape.step([scores], scores.elements, 4, save_out=True)
    top = tape.step([shares], chosen, 4, saves=[Storage(8 * chosen)])
    total = tape.step([top], block.tokens, 4)
    scaled = tape.step([top, total], chosen, 4, saves=[top.storage, total.storage])
    return scaled if block.model_type == "mixtral" else cast(tape, scaled, narrow)


def _sigmoid_route(tape: Tape, block: Block, x: Value, chosen: int, params: int) -> Value:
    """DeepSeek's router: a product in float32, and a sigmoid of each expert's score."""
    count, d = block.layout.num_experts, block.dtypes
    weights = count * block.hidden
    wide = cast(tape, x, 4)
    if not d.autocast:
        saves = [wide.storage] if params else []
        if wide.node is not None and d.weight < 4:
            saves.append(Storage(4 * weights, weight=True))
        scores = tape.step([wide], block.tokens * count, 4, saves=saves, params=params, fresh=4 * params)
    else:
        scores = matrix(tape, block, wide, count, weights, params=params)
    shares = tape.step([scores], scores.elements, scores.width, save_out=True)
    top = tape.step([shares], chosen, shares.width, saves=[Storage(8 * chosen)])
    total = tape.step([top], block.tokens, top.width)
    shares = tape.step([top, total], chosen, top.width, saves=[top.storage, total.storage])
    return tape.step([shares], chosen, shares.width)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Bytes of one layer."""

    saved: int
    """Kept for the backward pass, its input included where it is read."""
    weights: int
    """Copies of weights that autocast made, kept like activations."""
    held: int
    """Kept under checkpointing as well: what the context of a function holds."""
    params: int
    """Parameters that are trained, as counted by the products."""
    peak: Peak
    """The worst moment of the layer's backward pass; nothing outside the layer is counted."""


def _add_residual(tape: Tape, block: Block, x: Value, made: Value) -> Value:
    made = dropout(tape, made, block.layout.dropout > 0, block.dtypes.on_cpu)
    if block.layout.scaled_stream:
        made = tape.step([made], made.elements, made.width)
    return add(tape, made, x)


def _pre_norm(tape: Tape, block: Block, x: Value, encoder: Value | None) -> Value:
    """Llama and most others; some norm the outputs as well or instead, T5's decoder attends twice."""
    h, inner, outer = block.hidden, block.layout.input_norms, block.layout.output_norms
    made = attention(tape, block, norm(tape, block, x, h) if inner else x)
    x = _add_residual(tape, block, x, norm(tape, block, made, h) if outer else made)
    if encoder is not None:
        made = attention(tape, block, norm(tape, block, x, h), read=encoder, out="attn_cross")
        x = _add_residual(tape, block, x, made)
    made = feed_forward(tape, block, norm(tape, block, x, h) if inner else x)
    return _add_residual(tape, block, x, norm(tape, block, made, h) if outer else made)


def _post_norm(tape: Tape, block: Block, x: Value) -> Value:
    """BERT: each sum is normed."""
    x = norm(tape, block, _add_residual(tape, block, x, attention(tape, block, x)), block.hidden)
    return norm(tape, block, _add_residual(tape, block, x, feed_forward(tape, block, x)), block.hidden)


def _parallel(tape: Tape, block: Block, x: Value) -> Value:
    """GPT-NeoX: both halves read the layer's input."""
    p, on_cpu = block.layout.dropout > 0, block.dtypes.on_cpu
    first = dropout(tape, attention(tape, block, norm(tape, block, x, block.hidden)), p, on_cpu)
    second = dropout(tape, feed_forward(tape, block, norm(tape, block, x, block.hidden)), p, on_cpu)
    return add(tape, add(tape, second, first), x)


def record(block: Block, *, counted: bool) -> tuple[Tape, Value]:
    """The layer's tape and its output; not `counted`: something else keeps its input."""
    tape = Tape()
    size = block.tokens * block.hidden
    x = tape.source(size, block.dtypes.residual, grad=block.grad, counted=counted)
    if block.layout.post_norm:
        return tape, _post_norm(tape, block, x)
    if block.layout.parallel:
        return tape, _parallel(tape, block, x)
    encoder = None
    if block.layout.crossed:
        encoder = tape.source(size, block.dtypes.residual, counted=False)
    return tape, _pre_norm(tape, block, x, encoder)


@functools.lru_cache(maxsize=4096)
def layer_cost(block: Block, gradient_width: float, *, accumulated: bool, checkpointed: bool) -> LayerCost:
    """What `block` keeps, and the worst moment of its backward pass.

    `checkpointed`: a checkpoint keeps the layer's input, which is not counted here.
    """
    tape, out = record(block, counted=not checkpointed)
    saved, weights = tape.saved()
    held = sum({id(kept): kept.size for kept in tape.held}.values())
    params = sum(node.params for node in tape.nodes)
    peak = tape.backward(out, gradient_width, accumulated=accumulated, recompute=checkpointed)
    return LayerCost(saved, weights, held, params, peak)
