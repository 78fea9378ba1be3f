"""The operations that layers are made of, as a tape records what they keep for the backward pass.

As read in transformers 5.23, torch 2.13
(autocast_mode: every product casts its inputs; `mm` keeps its input where the weight is trained, and the
weight where the input needs a gradient), peft 0.21 (tuners/lora/layer.py, bnb.py) and bitsandbytes 0.50
(autograd/_functions.py).
"""

from __future__ import annotations

from launcher.models.layers.layout import Block, Linear
from launcher.models.layers.tape import Storage, Tape, Value

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
    rows = x.elements // _inputs(weights, out)
    return matrices(tape, block, x, rows * out, weights, params=params)


def matrices(tape: Tape, block: Block, x: Value, elements: int, weights: int, *, params: int) -> Value:
    """As `matrix`, of one matrix or of several that read a part of `x` each; `elements`: of the output."""
    d = block.dtypes
    width, saves = d.weight, [STORED]
    if d.autocast:
        x, width = cast(tape, x, d.compute), d.compute
        if x.node is not None and d.weight != d.compute:
            saves.append(Storage(d.compute * weights, weight=True))
    if params or d.frozen_inputs:
        saves.append(x.storage)
    return tape.step([x], elements, width, saves=saves, params=params, fresh=width * params, makes_views=True)


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
    dropped = dropout(tape, source, block.adapter_dropout, d.on_cpu)
    inner = _small(tape, block, dropped, linear.in_features, block.rank, width)
    update = _small(tape, block, inner, block.rank, out, width)
    scaled = tape.step([update], update.elements, update.width)
    for one in (x, source):  # an argument and a variable of the adapter's function
        tape.reads(one)
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
    return tape.step(
        [x], rows * out, width, saves=saves, params=params, fresh=width * params, makes_views=True
    )


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


def liger_norm(tape: Tape, x: Value, width: int, *, in_place: bool = True) -> Value:
    """Liger's kernel keeps its input and one float32 per row; `in_place`: gradients are written over their
    source."""
    saves = [x.storage, Storage(4 * (x.elements // width))]
    return tape.step([x], x.elements, x.width, saves=saves, passes=in_place)


def layer_norm(tape: Tape, block: Block, x: Value, width: int) -> Value:
    """The fused LayerNorm over the last `width` values of `x`."""
    rows = x.elements // width
    if block.float_operations:
        x = cast(tape, x, 4)
    params = block.layout.norm_params(width) if block.full else 0
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


def rms_norm(tape: Tape, block: Block, x: Value, width: int, *, scales_input: bool = False) -> Value:
    """`scales_input`: the 16-bit input itself is scaled, in addition to the copy that was squared."""
    wide = cast(tape, x, 4)
    read = x if scales_input else wide
    return weighted(tape, block, cast(tape, normalised(tape, wide, read, width), x.width), width)


def wide_norm(tape: Tape, block: Block, x: Value, width: int) -> Value:
    """An RMSNorm that multiplies by its weight in float32, before the result is narrowed."""
    wide = cast(tape, x, 4)
    return cast(tape, weighted(tape, block, normalised(tape, wide, wide, width), width), x.width)


def plain_norm(tape: Tape, x: Value, width: int) -> Value:
    """An RMSNorm without a weight."""
    wide = cast(tape, x, 4)
    return cast(tape, normalised(tape, wide, wide, width), x.width)


def bmm(tape: Tape, block: Block, first: Value, second: Value, elements: int) -> Value:
    """A product of two activations, each copied where heads are not contiguous."""
    d = block.dtypes
    if d.autocast:
        first, second = cast(tape, first, d.compute), cast(tape, second, d.compute)
    return tape.step([first, second], elements, first.width, saves=[first.storage, second.storage])


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
