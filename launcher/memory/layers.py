"""What one layer keeps for the backward pass, as its family records it on a tape."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from launcher.models.layers.layout import Block, LayerTape
from launcher.models.layers.tape import Peak, Tape, Value


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
    first_pass: Peak
    """The worst moment of its forward pass; empty under checkpointing, where recomputation needs more."""


def record(block: Block, *, counted: bool, learns: bool = True) -> tuple[Tape, Value]:
    """The layer's tape and its output; not `counted`: something else keeps its input. learns: see `Tape`."""
    tape = LayerTape(block, learns=learns)
    size = block.tokens * block.hidden
    x = tape.source(size, block.dtypes.residual, grad=block.grad, counted=counted)
    out = block.layout.run(tape, x)
    tape.reads(x)  # an argument of the layer
    return tape, out


@functools.lru_cache(maxsize=4096)
def layer_cost(block: Block, gradient_width: float, *, accumulated: bool, checkpointed: bool) -> LayerCost:
    """What `block` keeps, and the worst moment of its backward pass.

    `checkpointed`: a checkpoint keeps the layer's input, which is not counted here.
    """
    tape, out = record(block, counted=not checkpointed)
    return tape_cost(tape, out, gradient_width, accumulated=accumulated, checkpointed=checkpointed)


def tape_cost(
    tape: Tape, out: Value, gradient_width: float, *, accumulated: bool, checkpointed: bool
) -> LayerCost:
    """What a tape keeps, and the worst moment of its backward pass; the tape is used up."""
    saved, weights = tape.saved()
    held = sum({id(kept): kept.size for kept in tape.held}.values())
    params = sum(node.params for node in tape.nodes)
    first_pass = Peak() if checkpointed else tape.first_pass()
    peak = tape.backward(out, gradient_width, accumulated=accumulated, recompute=checkpointed)
    return LayerCost(saved, weights, held, params, peak, first_pass)
