"""Matrix products as autograd keeps them: plain, cast by autocast, quantised, with a LoRA adapter.

As read in torch 2.13 (autocast_mode: every product casts its inputs; `mm` keeps its input where the weight
is trained, and the weight where the input asks for a gradient), peft 0.21 (tuners/lora/layer.py, bnb.py)
and bitsandbytes 0.50 (autograd/_functions.py).
"""

from __future__ import annotations

from launcher.facts.architectures import Linear
from launcher.memory.flow import Block
from launcher.memory.tape import Storage, Tape, Value


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
    width, saves = d.weight, []
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
    """A frozen product, and beside it the two small ones of an adapter that is trained.

    `width`: bytes of an adapter's value.
    """
    out = linear.out_features
    base = frozen(tape, block, x, out, linear.weights)
    if block.adapted is not None and linear.path not in block.adapted:
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
