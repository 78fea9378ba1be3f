"""What one traced step allocates and frees, in order, and what each piece of memory was for."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from launcher.train.upstream.torch_seams import DispatchMode, leaves, local_part, storage_key

KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "temporary")


class LongSegment(Exception):
    """A layer allocates and frees so often that its positions are computed one by one."""


class StorageWatch(DispatchMode):
    """Sees each storage from its first use as an output of an operation until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, int] = {}

    def born(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> int:
        """A storage is seen for the first time, of `tensor`; the number under which it is remembered."""
        raise NotImplementedError

    def died(self, number: int) -> None:
        """The storage that `born` gave this number was freed."""
        raise NotImplementedError

    def add(self, tensor: torch.Tensor) -> int | None:
        """The number of the tensor's storage, None for one that has no storage of its own (sparse)."""
        try:
            storage = local_part(tensor).untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None
        key = storage_key(storage)
        if key not in self._known:
            self._known[key] = self.born(storage, tensor)
            weakref.finalize(storage, self._free, key)
        return self._known[key]

    def _free(self, key: int) -> None:
        self.died(self._known.pop(key))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # Most operations return one tensor, and walking a tree of one costs more than looking.
        for leaf in (out,) if isinstance(out, torch.Tensor) else leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return out


@dataclass(slots=True)
class Piece:
    """One storage."""

    size: int
    """Bytes."""
    elements: int
    born: int
    """Index of its first event."""
    phase: str
    """build | step | forward | backward: when it was allocated."""
    in_head: bool
    """Allocated after the last layer: by the head, the loss, or the first part of their backward pass."""
    recomputed: bool
    """Allocated by a forward pass inside the backward pass."""
    died: int | None = None
    died_recomputing: bool = False
    kind: str = "temporary"


@dataclass(slots=True)
class Segment:
    """A stretch of events that is the same at every depth."""

    key: str
    """phase/place, where place names a stack and its first or last layer."""
    start: int
    """Index of its first event."""


@dataclass(slots=True)
class Tape:
    """Events in order: the index of a piece where it is allocated, its complement where it is freed."""

    pieces: list[Piece] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    def classify(self, pieces: Iterable[int], kind: str) -> None:
        for index in pieces:
            self.pieces[index].kind = kind

    def live(self) -> list[tuple[int, ...]]:
        """Bytes by kind after every event."""
        row, rows = [0] * len(KINDS), []
        for event in self.events:
            piece = self.pieces[event if event >= 0 else ~event]
            row[KINDS.index(piece.kind)] += piece.size if event >= 0 else -piece.size
            rows.append(tuple(row))
        return rows


_BINARY = (torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor, torch.ops.aten.mul.Tensor)


class Recorder(StorageWatch):
    """Writes a tape: a storage is allocated when an operation first returns it, freed when it dies.

    `on_cpu`: operands of two widths are first made one, in copies of the narrower one, as CPU kernels do.
    `longest`: LongSegment is raised in a layer's pass with more events.
    """

    def __init__(self, *, on_cpu: bool = False, longest: int | None = None) -> None:
        super().__init__()
        self.tape, self.on_cpu, self.longest = Tape(), on_cpu, longest
        self.phase, self.in_head = "build", False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copies = _widened(args) if self.on_cpu and func in _BINARY else []
        for copy in copies:
            self.add(copy)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def mark(self, place: str) -> None:
        """Begin a segment. Marks inside a recomputed layer belong to that layer's backward pass."""
        if self.phase == "backward" and torch.is_grad_enabled():
            return
        self.in_head = place == "head"
        self.tape.segments.append(Segment(f"{self.phase}/{place}", len(self.tape.events)))

    def begin(self, phase: str) -> None:
        self.phase = phase
        self.mark("start")

    def born(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> int:
        """The index of its piece on the tape."""
        if self.longest and self.phase in ("forward", "backward"):
            segment = self.tape.segments[-1]
            if len(self.tape.events) - segment.start > self.longest:
                raise LongSegment(segment.key)
        index = len(self.tape.pieces)
        recomputed = self.phase == "backward" and torch.is_grad_enabled()
        size = storage.nbytes()
        piece = Piece(
            size, size // tensor.element_size(), len(self.tape.events), self.phase, self.in_head, recomputed
        )
        self.tape.pieces.append(piece)
        self.tape.events.append(index)
        return index

    def died(self, number: int) -> None:
        piece = self.tape.pieces[number]
        piece.died = len(self.tape.events)
        piece.died_recomputing = self.phase == "backward" and torch.is_grad_enabled()
        self.tape.events.append(~number)


def _widened(args: Sequence[Any]) -> list[torch.Tensor]:
    """Copies of the narrower of two tensors, in the dtype of the wider one."""
    operands = [x for x in args if isinstance(x, torch.Tensor) and x.ndim and x.is_floating_point()]
    wide = max((x.dtype for x in operands), key=lambda dtype: dtype.itemsize, default=torch.float32)
    return [x.to(wide) for x in operands if x.dtype.itemsize < wide.itemsize]


def name_kinds(tape: Tape, backward_starts: int, logits: int) -> None:
    """Say of every piece that is not a state what it was: logits, a kept activation, or temporary.

    backward_starts: index of the first event of the backward pass. logits: elements of the logits.
    """
    for piece in tape.pieces:
        if piece.kind != "temporary":
            continue
        kept = piece.phase == "forward" and (piece.died is None or piece.died >= backward_starts)
        if piece.in_head and piece.elements >= logits:
            piece.kind = "logits"
        elif kept or (piece.recomputed and not piece.died_recomputing):
            piece.kind = "activations"
