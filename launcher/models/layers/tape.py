"""What autograd keeps and allocates: a training step replayed on sizes alone. Pure arithmetic.

A `Tape` records the operations of one block as torch's autograd does: each `TapeNode` keeps the storages that
its derivative reads. `backward` runs them in reverse and follows every gradient from where it is allocated
to where it is freed, by the rules of torch 2.13's engine: a node's saved tensors are freed when it has
run, gradients of one value are added in place where nobody else holds the first, and views pass on the
gradient that they got. A view holds what it is a view of: where it is the first, the sum gets a place of its
own (csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


class Storage:
    """Bytes in memory; `weight`: a copy of a weight in another dtype, no activation."""

    __slots__ = ("holders", "size", "weight")

    def __init__(self, size: int, *, weight: bool = False) -> None:
        self.size, self.weight, self.holders = size, weight, 0


class TapeNode:
    """One step of the backward pass."""

    __slots__ = ("fresh", "joined", "makes_views", "params", "pending", "routes", "saved", "temporary")

    def __init__(self) -> None:
        self.routes: list[tuple[TapeNode, int]] = []
        """Where gradients go, with their bytes; 0 hands the incoming gradient on."""
        self.saved: list[Storage] = []
        self.temporary = 0
        """Bytes that the derivative allocates and frees; negative: gradients written over what is saved."""
        self.params = 0
        """Parameters whose gradients come to be here."""
        self.fresh = 0
        """Bytes of these gradients in the dtype that the product gave."""
        self.joined = False
        """Gradients of the parts are kept until all are there."""
        self.makes_views = False
        """The gradients that it makes are views of something else."""
        self.pending: list[list[int]] = []
        """Gradients that arrived: bytes, how many still read them, and 1 for a view."""


@dataclass(slots=True)
class Value:
    """A tensor: elements, bytes of each, their storage, and what made it (None: needs no gradient)."""

    elements: int
    width: int
    storage: Storage
    node: TapeNode | None

    @property
    def size(self) -> int:
        return self.elements * self.width


@dataclass(slots=True)
class Peak:
    """The worst moment of a backward pass, in bytes."""

    total: int = 0
    saved: int = 0
    """Of `total`, activations that are still kept."""
    weights: int = 0
    """Of `total`, copies of weights that are still kept."""
    gradients: int = 0
    """Of `total`, gradients of parameters."""


@dataclass(slots=True)
class Tape:
    """Operations of one block in the order of the forward pass."""

    on_cpu: bool = False
    """A CPU's kernels read operands of one width: they copy the narrower ones first."""
    learns: bool = True
    """False within torch.no_grad: nothing is kept, whatever asks for a gradient."""
    nodes: list[TapeNode] = field(default_factory=list)
    held: list[Storage] = field(default_factory=list)
    """Kept until the complete graph is freed: attributes of an autograd function's context."""
    forward: list[tuple[tuple[Storage, ...], bool]] = field(default_factory=list)
    """Of each operation: the storages that it reads, makes or keeps, and whether it keeps any."""

    def source(self, elements: int, width: int, *, grad: bool = True, counted: bool = True) -> Value:
        """The block's input; not `counted` where something outside keeps it."""
        node = TapeNode() if grad and self.learns else None
        if node is not None:
            self.nodes.append(node)
        return Value(elements, width, Storage(elements * width if counted else 0), node)

    def step(
        self,
        inputs: Sequence[Value],
        elements: int,
        width: int,
        *,
        saves: Sequence[Storage] = (),
        save_out: bool = False,
        passes: bool = False,
        view: Storage | None = None,
        temporary: int = 0,
        params: int = 0,
        fresh: int = 0,
        makes_views: bool = False,
    ) -> Value:
        """One operation; `passes`: its inputs get the gradient of its output itself.

        `params`: trainable parameters that it reads, whose gradients come as `fresh` bytes each.
        `makes_views`: its inputs get views of what its derivative makes.
        """
        storage = view if view is not None else Storage(elements * width)
        asking = [(value, value.node) for value in inputs if value.node is not None]
        touched = (*(value.storage for value in inputs), storage, *self._copies(inputs))
        if not asking and not (params and self.learns):
            self.forward.append((touched, False))
            return Value(elements, width, storage, None)
        node = TapeNode()
        for value, source in asking:
            alias = passes and value.width == width
            node.routes.append((source, 0 if alias else value.size))
            if not passes and value.width < width:
                # Computed in the wider dtype, then cast to that of the input.
                temporary += value.elements * width
        node.saved = [*saves, storage] if save_out else list(saves)
        node.temporary, node.params, node.fresh, node.makes_views = temporary, params, fresh, makes_views
        for kept in node.saved:
            kept.holders += 1
        self.nodes.append(node)
        self.forward.append(((*touched, *node.saved), bool(node.saved)))
        return Value(elements, width, storage, node)

    def _copies(self, inputs: Sequence[Value]) -> Iterator[Storage]:
        """What a CPU's kernel allocates for itself; CUDA's widen each number as they read it."""
        widest = max((value.width for value in inputs), default=0)
        if self.on_cpu:
            yield from (Storage(widest * one.elements) for one in inputs if one.width < widest)

    def reads(self, value: Value) -> None:
        """`value` is alive up to here: the function that runs has it as an argument."""
        self.forward.append(((value.storage,), False))

    def hold(self, storage: Storage) -> None:
        """Keep `storage` until the complete graph is freed."""
        storage.holders += 1
        self.held.append(storage)

    def saved(self) -> tuple[int, int]:
        """Bytes of activations and of copies of weights that are kept after the forward pass."""
        sizes: dict[int, Storage] = {id(kept): kept for node in self.nodes for kept in node.saved}
        sizes |= {id(kept): kept for kept in self.held}
        activations = sum(kept.size for kept in sizes.values() if not kept.weight)
        return activations, sum(kept.size for kept in sizes.values() if kept.weight)

    def recomputed(self) -> Peak:
        """The worst moment of the forward pass up to the last operation that keeps something.

        There a checkpoint stops computing again.
        """
        return self._forward(max((i for i, (_, keeps) in enumerate(self.forward) if keeps), default=-1) + 1)

    def first_pass(self) -> Peak:
        """The worst moment of the complete forward pass."""
        return self._forward(len(self.forward))

    def _forward(self, end: int) -> Peak:
        """The worst moment of the first `end` operations. What is not kept lives until its last use."""
        kept = {id(one) for node in self.nodes for one in node.saved}
        spans: dict[int, tuple[Storage, int, int]] = {}
        for i, (touched, _) in enumerate(self.forward):
            for one in touched:
                first = spans[id(one)][1] if id(one) in spans else i
                spans[id(one)] = (one, first, end if id(one) in kept else i)
        changes = [[0, 0, 0] for _ in range(end + 1)]  # bytes of each operation: saved, of weights, others
        for one, first, last in spans.values():
            part = 1 if one.weight else 0 if id(one) in kept else 2
            if first < end:
                changes[first][part] += one.size
                changes[min(last + 1, end)][part] -= one.size
        worst, saved, weights, others = Peak(), 0, 0, 0
        for change in changes[:end]:
            saved, weights, others = saved + change[0], weights + change[1], others + change[2]
            if saved + weights + others > worst.total:
                worst = Peak(saved + weights + others, saved, weights)
        return worst

    def backward(
        self, output: Value, gradient_width: float, *, accumulated: bool, recompute: bool = False
    ) -> Peak:
        """The worst moment of running all nodes in reverse; storages of the tape are used up.

        `gradient_width`: bytes that each trained parameter's gradient keeps. `accumulated`: all of them
        exist already, so a fresh one lives only until it is added. An output without a node, as of a frozen
        layer below all that is trained, has no backward pass. `recompute`: a checkpoint runs the forward pass
        again when the first node asks for what it kept.
        """
        if output.node is None:
            return Peak()
        again = self.recomputed() if recompute else None
        return _Replay(self, gradient_width, accumulated).run(output.node, output.size, again)


class _Replay:
    """The state of one backward pass."""

    def __init__(self, tape: Tape, gradient_width: float, accumulated: bool) -> None:
        self.tape, self.gradient_width, self.accumulated = tape, gradient_width, accumulated
        self.saved, self.weights = tape.saved()
        self.gradients = 0
        self.flow = 0
        self.peak = Peak()

    def run(self, output: TapeNode, size: int, again: Peak | None) -> Peak:
        output.pending.append([size, 1, 0])
        self.flow = size
        self._note(0)
        for node in reversed(self.tape.nodes):
            if again is not None and node.pending and node.saved:
                total = again.total + self.flow + self.gradients
                if total > self.peak.total:
                    self.peak = Peak(total, again.saved, again.weights, self.gradients)
                again = None
            made = self._step(node) if node.pending else []
            for kept in node.saved:
                self._release(kept)
            for target, gradient in made:
                self._arrive(target, gradient)
        return self.peak

    def _note(self, more: int) -> None:
        total = self.saved + self.weights + self.gradients + self.flow + more
        if total > self.peak.total:
            self.peak = Peak(total, self.saved, self.weights, self.gradients)

    def _step(self, node: TapeNode) -> list[tuple[TapeNode, list[int]]]:
        """Runs a node: the gradients that it made, and where they go. Those that it read are freed then."""
        incoming = node.pending
        made: list[tuple[TapeNode, list[int]]] = []
        for target, size in node.routes:
            gradient = [size, 0, int(node.makes_views)] if size else incoming[0]
            if size:
                self.flow += size
            made.append((target, gradient))
        self._note(node.temporary + node.fresh)
        if node.params:
            kept = int(node.params * self.gradient_width)
            if not self.accumulated:
                if kept and kept != node.fresh:  # cast or copied
                    self._note(min(node.temporary, 0) + node.fresh + kept)
                self.gradients += kept
        for _, gradient in made:
            gradient[1] += 1
        for gradient in incoming:
            self._drop(gradient)
        node.pending = []
        return made

    def _arrive(self, target: TapeNode, gradient: list[int]) -> None:
        if target.joined or not target.pending:
            target.pending.append(gradient)
            return
        first = target.pending[0]
        if first[1] > 1 or first[2]:
            # Somebody else holds the first gradient, so the sum gets a place of its own.
            total = [max(first[0], gradient[0]), 1, 0]
            self.flow += total[0]
            self._note(0)
            target.pending[0] = total
            self._drop(first)
        self._drop(gradient)

    def _drop(self, gradient: list[int]) -> None:
        """One reader less."""
        gradient[1] -= 1
        if gradient[1] == 0:
            self.flow -= gradient[0]

    def _release(self, kept: Storage) -> None:
        kept.holders -= 1
        if kept.holders == 0:
            if kept.weight:
                self.weights -= kept.size
            else:
                self.saved -= kept.size
