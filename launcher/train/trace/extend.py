"""Tapes at small depths and batches, extended to the complete model: decisive moments, and all events.

Live bytes at one event are a sum over layers of sums over samples. So two depths of each stack and two
batches give them for every depth and batch, event by event, without knowing the peak beforehand. Events
that are never the peak are dropped.

For an allocator, two training steps at full depth are one list of allocations and frees: the tape of a model
with two middle layers in each stack is read as a pattern, in which the second middle layer's forward pass and
the first one's backward pass are repeated for all layers between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from launcher.train.trace.tape import KINDS, Tape

Rows = Any
"""numpy array of (events, kinds), bytes."""
Corner = tuple[tuple[int, ...], int]
"""Depths of the stacks, and rows of the batch."""
Name = tuple[int, int, int]
"""Of a piece: its segment in the tape, which copy of the layer, and its place among the segment's pieces."""


def segment_rows(tape: Tape, kept: Mapping[int, Sequence[int]] = MappingProxyType({})) -> dict[str, Rows]:
    """Live bytes by kind after every event of a segment; equal keys follow each other.

    Segments of middle layers are left out: live bytes there are between those of the first and last layer.
    kept: of segments by index, the events that are left of them.
    """
    live = np.array(tape.live(), dtype=np.float64).reshape(-1, len(KINDS))
    ends = [segment.start for segment in tape.segments[1:]] + [len(tape.events)]
    rows: dict[str, list[Rows]] = {}
    for index, (segment, end) in enumerate(zip(tape.segments, ends, strict=True)):
        if not segment.key.endswith("-middle"):
            # What is live as the segment begins counts too, so that none is empty.
            before, stop = max(segment.start - 1, 0), max(end, segment.start)
            there = live[[before, *kept[index]]] if index in kept else live[before:stop]
            rows.setdefault(segment.key, []).append(there)
    return {key: np.concatenate(parts) for key, parts in rows.items()}


def extend(parts: Mapping[Corner, Mapping[str, Rows]], depths: Sequence[int]) -> list[tuple[str, Rows, Rows]]:
    """(segment, constant, per row of the batch) of every moment, for stacks of `depths`.

    parts: `segment_rows` by depths and rows; for every number of rows the base depth, and each stack alone
    deeper.
    """
    batches = sorted({rows for _, rows in parts})
    shapes = sorted({depth for depth, _ in parts}, key=sum)
    moments = []
    for key in parts[shapes[0], batches[0]]:
        whole = []
        for rows in batches:
            corners = _alike([parts[shape, rows][key] for shape in shapes])
            whole.append(to_depth(corners, shapes, depths))
        whole = _alike(whole)
        slope = (whole[-1] - whole[0]) / (batches[-1] - batches[0]) if len(batches) > 1 else 0 * whole[0]
        moments.append((key, whole[0] - slope * batches[0], slope))
    return moments


def to_depth(corners: Sequence[Rows], shapes: Sequence[tuple[int, ...]], depths: Sequence[int]) -> Rows:
    """Values at `depths`, from those at `shapes`: a base, and the base with one stack deeper."""
    base, value = shapes[0], corners[0]
    for shape, corner in zip(shapes[1:], corners[1:], strict=True):
        stack = next(i for i in range(len(base)) if shape[i] != base[i])
        value = value + (corner - corners[0]) / (shape[stack] - base[stack]) * (depths[stack] - base[stack])
    return value


def _alike(corners: list[Rows]) -> list[Rows]:
    """The corners, or the fullest moment of each where they differ in their events."""
    if len({len(corner) for corner in corners}) == 1:
        return corners
    return [corner[[int(corner.sum(axis=1).argmax())]] for corner in corners]


def ruling(moments: Sequence[tuple[str, Rows, Rows]]) -> list[dict[str, Any]]:
    """The moments that may be the fullest for some batch and some share of the gradients."""
    free = [KINDS.index(kind) for kind in ("activations", "logits", "temporary")]
    grads = KINDS.index("gradients")
    found = []
    for key, constant, per_row in moments:
        marks = np.stack(
            [
                constant[:, free].sum(axis=1),
                per_row[:, free].sum(axis=1),
                constant[:, grads] + per_row[:, grads],
            ],
            axis=1,
        ).round()
        # At one row a moment holds constant and slope together, so the constant alone may be negative.
        marks[:, 0] += marks[:, 1]
        for index in _undominated(marks):
            values = {
                kind: [float(constant[index, k]), float(per_row[index, k])]
                for k, kind in enumerate(KINDS)
                if kind not in ("weights", "optimizer")
            }
            found.append({"segment": key, **values})
    return found


def _undominated(marks: Rows) -> list[int]:
    """Rows that no other row reaches in every column."""
    order = np.argsort(-marks.sum(axis=1), kind="stable")
    kept: list[int] = []
    for index in order:
        if not kept or not (marks[kept] >= marks[index]).all(axis=1).any():
            kept.append(int(index))
    return sorted(kept)


def state_bytes(tapes: Mapping[Corner, Tape], depths: Sequence[int]) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer states at full depth, where all of them are there."""
    batch = min(rows for _, rows in tapes)
    most = {
        corner: np.array(tape.live(), dtype=np.float64).max(axis=0)
        for corner, tape in tapes.items()
        if corner[1] == batch
    }
    shapes = sorted({depth for depth, _ in most}, key=sum)
    whole = to_depth([most[shape, batch] for shape in shapes], shapes, depths)
    return {kind: float(whole[KINDS.index(kind)]) for kind in ("weights", "gradients", "optimizer")}


@dataclass(slots=True)
class Stretch:
    """The events of one segment; `layer` of a middle one: 1 or 2."""

    index: int
    key: str
    events: Sequence[int]
    layer: int = 0

    @property
    def forward(self) -> bool:
        return self.key.startswith("forward/")

    @property
    def place(self) -> str:
        return self.key.partition("/")[2]


@dataclass(slots=True)
class Script:
    """What the allocator is asked, in order: a piece's index where it is allocated, its complement freed."""

    sizes: list[int] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    _held: dict[Name, int] = field(default_factory=dict)

    def allocate(self, size: int, name: Name | None = None) -> int:
        index = len(self.sizes)
        self.sizes.append(size)
        self.events.append(index)
        if name is not None:
            self._held[name] = index
        return index

    def free(self, name: Name) -> None:
        if name in self._held:
            self.events.append(~self._held.pop(name))

    def free_all(self) -> None:
        """What a pass has left: gradients, as zero_grad frees them."""
        self.events += [~index for index in self._held.values()]
        self._held.clear()


def replay(
    tape: Tape, shallow: Tape, depths: Sequence[int], *, keeps_gradients: bool
) -> dict[str, list[int]]:
    """{"sizes", "events"} of two steps: the first makes the optimizer's states, the second meets them.

    tape: two middle layers in each stack. shallow: none, for what a layer adds to the states.
    keeps_gradients: they live from one micro-batch to the next.
    """
    starts = {segment.key: segment.start for segment in reversed(tape.segments)}
    step, forward = starts["step/start"], starts["forward/start"]
    script = Script()
    kinds = ("weights", "gradients") if keeps_gradients else ("weights",)
    for kind in kinds:
        for size in _states(tape, shallow, kind, depths):
            script.allocate(size)
    stretches = _stretches(tape, forward)
    _play(script, tape, stretches, depths)
    for size in _states(tape, shallow, "optimizer", depths):
        script.allocate(size)
    _temporaries(script, tape, range(step, forward))
    script.free_all()
    _play(script, tape, stretches, depths)
    _temporaries(script, tape, range(step, forward))
    script.free_all()
    return {"sizes": script.sizes, "events": script.events}


def _states(tape: Tape, shallow: Tape, kind: str, depths: Sequence[int]) -> list[int]:
    """Sizes of all pieces of a kind at full depth: the tape's, and what the missing layers add."""
    there = [piece.size for piece in tape.pieces if piece.kind == kind and piece.phase in ("build", "step")]
    less = [piece.size for piece in shallow.pieces if piece.kind == kind and piece.phase in ("build", "step")]
    added = sorted((Counter(there) - Counter(less)).elements())
    # The tape has two more layers in each stack than `shallow`.
    missing = max(0, sum(depths) - 4 * len(depths))
    cycles, rest = divmod(missing, 2 * len(depths))
    partly = [added[i * 2 * len(depths) // rest] for i in range(len(added) * rest // (2 * len(depths)))]
    return there + cycles * added + partly


def _temporaries(script: Script, tape: Tape, events: Iterable[int]) -> None:
    """What the optimizer's step allocates and frees at the tape's depth."""
    for place in events:
        event = tape.events[place]
        index = event if event >= 0 else ~event
        if tape.pieces[index].kind != "temporary" or tape.pieces[index].phase != "step":
            continue
        if event >= 0:
            script.allocate(tape.pieces[index].size, (-1, 0, index))
        else:
            script.free((-1, 0, index))


def _stretches(tape: Tape, start: int) -> list[Stretch]:
    """Forward and backward pass in segments; middle layers are numbered as the forward pass meets them."""
    ends = [segment.start for segment in tape.segments[1:]] + [len(tape.events)]
    keys = Counter(segment.key for segment in tape.segments)
    found: list[Stretch] = []
    for index, (segment, end) in enumerate(zip(tape.segments, ends, strict=True)):
        if segment.start < start:
            continue
        stretch = Stretch(index, segment.key, tape.events[segment.start : end])
        if segment.key.endswith("-middle") and keys[segment.key] == 2:
            before = sum(other.key == segment.key for other in found)
            stretch.layer = 1 + before if stretch.forward else 2 - before
        found.append(stretch)
    return found


def _play(script: Script, tape: Tape, stretches: Sequence[Stretch], depths: Sequence[int]) -> None:
    """One forward and backward pass with all layers."""
    names = _names(tape, stretches)
    by_index = {stretch.index: stretch for stretch in stretches}
    for stretch in stretches:
        copies = max(depths[_stack(stretch.key)] - 2, 0) if stretch.layer else 1
        for copy in _copies(stretch, copies):
            for event in stretch.events:
                piece = event if event >= 0 else ~event
                if piece not in names:
                    continue
                name = _name(names[piece], by_index, stretch, copy, depths)
                if event >= 0:
                    script.allocate(tape.pieces[piece].size, name)
                else:
                    script.free(name)


def _names(tape: Tape, stretches: Sequence[Stretch]) -> dict[int, tuple[int, int]]:
    """Segment and place in it of every piece that a pass allocates."""
    found: dict[int, tuple[int, int]] = {}
    for stretch in stretches:
        made = [event for event in stretch.events if event >= 0]
        found |= {piece: (stretch.index, place) for place, piece in enumerate(made)}
    return found


def _stack(key: str) -> int:
    return int(key.partition("stack")[2].partition("-")[0])


def _copies(stretch: Stretch, copies: int) -> Sequence[int]:
    """Which middle layers (from 1) a stretch is played for: those that are not the other stretch's."""
    if not stretch.layer:
        return (0,)
    if stretch.forward:
        return (1,) if stretch.layer == 1 else range(2, copies + 1)
    return (copies,) if stretch.layer == 2 else range(copies - 1, 0, -1)


def _name(
    born: tuple[int, int],
    by_index: dict[int, Stretch],
    stretch: Stretch,
    copy: int,
    depths: Sequence[int],
) -> Name:
    """The piece that an event means when its stretch is played for the middle layer `copy`."""
    segment, place = born
    maker = by_index[segment]
    if not maker.layer:
        return segment, 0, place
    same = [other for other in by_index.values() if other.place == maker.place]
    # Pieces of both middle layers' forward (or backward) passes differ in the copy alone.
    first = next(other.index for other in same if other.forward == maker.forward)
    if stretch.place == maker.place:
        return first, copy + maker.layer - stretch.layer, place
    last = max(depths[_stack(maker.key)] - 2, 0)
    turn = min((other.index for other in same if not other.forward), default=len(by_index) + first)
    # Until the backward pass has come down to these layers, only the topmost of them can be meant.
    return first, last + maker.layer - 2 if stretch.index < turn else maker.layer, place
