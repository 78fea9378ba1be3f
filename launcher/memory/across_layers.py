"""What the layers of Gemma 4 share: the embedding of their own inputs, keys and values of other layers.

As read in transformers 5.23 (models/gemma4): `project_per_layer_inputs` runs before the first layer and
outside its checkpoint; `KVSharingDict` passes keys and values on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.memory.layers import LayerCost, plain_norm, rotate, tape_cost
from launcher.memory.operations import Block, Stack, add, norm, product
from launcher.memory.tape import Peak, Tape, Value

_NOTHING = LayerCost(0, 0, 0, 0, Peak(), Peak())


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Keys and values that later layers read, in bytes."""

    stores: int
    """Stack whose last layer makes them."""
    reads: int
    """Stack whose last layer reads them last."""
    size: int
    graph: int
    """What the graph of their layer, computed again by a checkpoint, keeps for them."""
    gradient: int


@dataclass(frozen=True, slots=True)
class AcrossLayers:
    """What lives while several layers run, in bytes; nothing for models whose layers share nothing."""

    inputs: LayerCost = _NOTHING
    """Of what makes the layers' own inputs."""
    own_inputs: int = 0
    """The own inputs of all layers."""
    gradient: int = 0
    """Their gradient, from the last layer on."""
    keys: tuple[SharedKeys, ...] = ()
    top: int = 0
    """The last stack."""

    def kept(self, *, checkpointing: bool) -> int:
        """Until the backward pass of the first layer: what checkpoints pass to layers lives, too."""
        keys = sum(one.size for one in self.keys) if checkpointing else 0
        return self.inputs.saved + self.inputs.weights + self.own_inputs + keys

    def at(self, index: int, *, last: bool, checkpointing: bool) -> int:
        """Besides, while a layer of stack `index` runs backwards; `last`: the stack's last layer."""
        found = 0 if last and index == self.top else self.gradient
        for one in self.keys:
            if one.stores <= index and not (last and index == one.reads) and index <= one.reads:
                found += one.gradient if index > one.stores or last else 0
            if checkpointing and (index < one.stores or (index == one.stores and not last)):
                found += one.graph
        return found


def across_layers(stacks: Sequence[Stack], running: float, *, accumulated: bool) -> AcrossLayers:
    """Of the stacks of a decoder; `running`: bytes of a trained parameter's gradient."""
    keys, top, block = tuple(_shared_keys(stacks)), len(stacks) - 1, stacks[-1].block
    if not block.inputs_width:
        return AcrossLayers(keys=keys, top=top)
    tape, out = own_inputs(stacks[0].first)
    inputs = tape_cost(tape, out, running, accumulated=accumulated, checkpointed=False)
    size = block.tokens * block.inputs_width * block.dtypes.residual
    return AcrossLayers(inputs, size, size if block.inputs_grad else 0, keys, top)


def own_inputs(block: Block) -> tuple[Tape, Value]:
    """The layers' own inputs, from the embedded tokens and an embedding of their own.

    `block`: of the first layer.
    """
    layout, tape = block.layout, Tape(block.dtypes.on_cpu)
    projection = next(one for one in layout.linears if one.reads == "inputs")
    width = next(one.in_features for one in layout.linears if one.reads == "gated")
    x = tape.source(block.tokens * block.hidden, block.dtypes.residual, grad=block.grad, counted=False)
    made = product(tape, block, x, projection)
    made = tape.step([made], made.elements, made.width)
    made = norm(tape, block, made, width)
    trained = block.full or bool({*(block.adapted or ()), *block.whole} & set(layout.embed_paths[1:]))
    found = tape.source(made.elements, block.dtypes.residual, grad=trained, counted=False)
    total = add(tape, made, found)
    return tape, tape.step([total], total.elements, total.width)


def _shared_keys(stacks: Sequence[Stack]) -> Iterator[SharedKeys]:
    readers = {s.block.layout.window: i for i, s in enumerate(stacks) if s.block.layout.shared_keys}
    if not readers:
        return
    owners = {s.block.layout.window: i for i, s in enumerate(stacks) if not s.block.layout.shared_keys}
    for window, stores in owners.items():
        tape, keys, values = _own_keys(stacks[stores].block)
        size = keys.size + values.size
        gradient = size if window in readers and keys.node is not None else 0
        yield SharedKeys(stores, readers.get(window, -1), size, sum(tape.saved()), gradient)


def _own_keys(block: Block) -> tuple[Tape, Value, Value]:
    """Keys and values of a layer, with the norm before them."""
    tape = Tape(block.dtypes.on_cpu)
    x = tape.source(block.tokens * block.hidden, block.dtypes.residual, grad=block.grad, counted=False)
    x = norm(tape, block, x, block.hidden)
    made = [product(tape, block, x, one) for one in block.layout.linears if one.reads == "norm1"][1:]
    keys = rotate(tape, block, norm(tape, block, made[0], block.head_dim))
    return tape, keys, plain_norm(tape, made[-1], block.head_dim)
