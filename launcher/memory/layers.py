"""One layer of each family as a tape, and what its backward pass takes. Pure arithmetic, remembered."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from launcher.memory.attention import attention
from launcher.memory.feedforward import feed_forward
from launcher.memory.flow import Block
from launcher.memory.norms import norm
from launcher.memory.products import add, dropout
from launcher.memory.tape import Peak, Tape, Value


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


def _residual(tape: Tape, block: Block, x: Value, made: Value) -> Value:
    made = dropout(tape, made, block.layout.dropout > 0, block.dtypes.on_cpu)
    return add(tape, made, x)


def _pre_norm(tape: Tape, block: Block, x: Value, encoder: Value | None) -> Value:
    """Llama and most others; Gemma 2 and 3 norm the outputs as well, T5's decoder attends twice."""
    h, outer = block.hidden, block.layout.norms == 4
    made = attention(tape, block, norm(tape, block, x, h))
    x = _residual(tape, block, x, norm(tape, block, made, h) if outer else made)
    if encoder is not None:
        made = attention(tape, block, norm(tape, block, x, h), read=encoder, out="attn_cross")
        x = _residual(tape, block, x, made)
    made = feed_forward(tape, block, norm(tape, block, x, h))
    return _residual(tape, block, x, norm(tape, block, made, h) if outer else made)


def _post_norm(tape: Tape, block: Block, x: Value) -> Value:
    """BERT: each sum is normed."""
    x = norm(tape, block, _residual(tape, block, x, attention(tape, block, x)), block.hidden)
    return norm(tape, block, _residual(tape, block, x, feed_forward(tape, block, x)), block.hidden)


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
    peak = tape.backward(out, gradient_width, accumulated=accumulated)
    return LayerCost(saved, weights, held, params, peak)
