"""What linear attention and state-space layers share, as a tape records it."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.models.layers.layout import LayerTape
from launcher.models.layers.linears import Sizes
from launcher.models.layers.tape import Tape, Value

_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
"""Older names of layer types (transformers' `remap_legacy_layer_types`)."""


def layer_types(s: Sizes, derived: Sequence[str]) -> list[str]:
    """Of each layer; `derived`: what the class makes of a configuration without them."""
    given = s.config.get("layer_types") or s.config.get("layers_block_type") or derived
    if len(given) != s.layers:
        raise ValueError(f"layer_types has {len(given)} entries for {s.layers} layers")
    return [_TYPES.get(str(one), str(one)) for one in given]


def convolution(tape: LayerTape, x: Value, width: int, kernel: int) -> Value:
    """A depthwise convolution over the positions before, and an activation."""
    block = tape.block
    d = block.dtypes
    narrow, params = d.weight, width * kernel if block.full else 0
    if d.autocast:
        x, narrow = tape.cast(x, d.compute), d.compute
    longer = block.rows * (block.length + kernel - 1) * width
    out = tape.step([x], longer, narrow, saves=[x.storage], params=params, fresh=narrow * params)
    return tape.activate(tape.step([out], x.elements, narrow, view=out.storage))


def copied(tape: Tape, x: Value) -> Value:
    """A copy with the rows of each head together."""
    return tape.step([x], x.elements, x.width, passes=True)
