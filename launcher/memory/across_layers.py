"""What layers share: the embedding of their own inputs, keys and values of other layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.memory.layers import LayerCost, tape_cost
from launcher.models.layers.layout import Stack
from launcher.models.layers.tape import Peak

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
    keys, top, block = tuple(_shared_keys(stacks)), len(stacks) - 1, stacks[0].first
    made = block.layout.own_inputs(block)
    if made is None:
        return AcrossLayers(keys=keys, top=top)
    inputs = tape_cost(*made, running, accumulated=accumulated, checkpointed=False)
    size = block.tokens * block.layout.layer_table[1] * block.dtypes.residual
    return AcrossLayers(inputs, size, size if block.inputs_grad else 0, keys, top)


def _shared_keys(stacks: Sequence[Stack]) -> Iterator[SharedKeys]:
    readers = {s.block.layout.window: i for i, s in enumerate(stacks) if s.block.layout.reads_keys}
    if not readers:
        return
    owners = {s.block.layout.window: i for i, s in enumerate(stacks) if not s.block.layout.reads_keys}
    for window, stores in owners.items():
        made = stacks[stores].block.layout.own_keys(stacks[stores].block)
        assert made is not None, "a kind that others read"
        tape, keys, values = made
        size = keys.size + values.size
        gradient = size if window in readers and keys.node is not None else 0
        yield SharedKeys(stores, readers.get(window, -1), size, sum(tape.saved()), gradient)
