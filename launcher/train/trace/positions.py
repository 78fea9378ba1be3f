"""Layers that compute position after position in a loop of Python: traced at short lengths, and extended.

A step of theirs has dozens of operations for each position of each layer. Every turn of such a loop allocates
and frees the same, so live bytes at a place of its first and of its last turn are a polynomial of the length,
of degree 2 at most: three lengths give it, and a fourth has to agree. Turns between lie between those two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from launcher.train.trace.extend import Corner, Rows, segment_rows
from launcher.train.trace.tape import KINDS, Tape

LENGTHS, CHECKED = (7, 9, 11), 13
"""Longer than the convolutions of such layers, and no size of a model."""
_TURNS = 4
"""A stretch that repeats so often is a loop."""
_BOUNDS = ("window", "chunk", "block")


class NotAlike(Exception):
    """The tapes at short lengths do not tell that of a longer one; the message is the reason."""


def largest_segment(length: int) -> int:
    """Events of a layer's pass from which its positions count as computed one by one."""
    return max(2 * length, 4096)


def refuse_bounds(config: Any, length: int) -> None:
    """Raise NotAlike where a window, chunk or block of the configuration is longer than the short lengths and
    shorter than `length`: the model computes otherwise beyond it."""
    for name, value in config.to_dict().items():
        if isinstance(value, int) and LENGTHS[0] < value < length and any(word in name for word in _BOUNDS):
            raise NotAlike(f"{name} is {value}")


def rows_at(
    record: Callable[[int, Corner], Tape], corners: Sequence[Corner], length: int
) -> tuple[dict[Corner, dict[str, Rows]], dict[Corner, Tape]]:
    """By corner: live bytes by segment of a tape of rows of `length` tokens, and the shortest tape.

    record: a tape of rows of so many tokens. Raises NotAlike where short rows do not tell of longer ones.
    """
    found: dict[Corner, dict[str, Rows]] = {}
    tapes: dict[Corner, Tape] = {}
    for corner in corners:
        shorts = [record(short, corner) for short in LENGTHS]
        if not tapes:  # the smallest tape
            _confirm([*shorts, record(CHECKED, corner)], length)
        parts = _parts(shorts)
        found[corner] = {key: _polynomial(LENGTHS, [part[key] for part in parts], length) for key in parts[0]}
        tapes[corner] = shorts[0]
    return found, tapes


def _confirm(tapes: Sequence[Tape], length: int) -> None:
    """Raise NotAlike unless the first tapes tell the one of length CHECKED, the last one, to a byte."""
    first, *_, last = map(_counts, tapes)
    most = (first + (last - first) / (CHECKED - LENGTHS[0]) * (length - LENGTHS[0])).max()
    if most <= largest_segment(length):
        raise NotAlike("it is not its positions that make a layer's events so many")
    *parts, seen = _parts(tapes)
    for key, rows in seen.items():
        told = _polynomial(LENGTHS, [part[key] for part in parts], CHECKED)
        if rows.shape != told.shape or np.abs(rows - told).max() >= 1:
            raise NotAlike(f"{key} is no polynomial of the length")


def _parts(tapes: Sequence[Tape]) -> list[dict[str, Rows]]:
    """The live bytes of tapes of different lengths; of loops their first and last turn."""
    keys = [[segment.key for segment in tape.segments] for tape in tapes]
    if any(one != keys[0] for one in keys):
        raise NotAlike("other layers are computed")
    starts = [_starts(tape) for tape in tapes]
    counts = np.array([_counts(tape) for tape in tapes])
    grown = np.flatnonzero((counts != counts[0]).any(axis=0)).tolist()
    return [
        segment_rows(tape, {i: start[i] + _ends(_marks(tape, start[i], start[i + 1])) for i in grown})
        for tape, start in zip(tapes, starts, strict=True)
    ]


def _starts(tape: Tape) -> list[int]:
    """Indices of the first events of its segments, and of its end."""
    return [*(segment.start for segment in tape.segments), len(tape.events)]


def _counts(tape: Tape) -> Any:
    """Events of each segment."""
    return np.diff(_starts(tape))


def _polynomial(lengths: Sequence[int], corners: Sequence[Rows], length: int) -> Rows:
    """Values at `length` of the polynomial through three corners (Newton's form)."""
    if len({corner.shape for corner in corners}) != 1:
        raise NotAlike("turns of a loop differ")
    (a, b, c), (low, middle, high) = lengths, corners
    first, second = (middle - low) / (b - a), (high - middle) / (c - b)
    return low + first * (length - a) + (second - first) / (c - a) * (length - a) * (length - b)


def _ends(marks: Any) -> Any:
    """Indices of the events that are left when each loop keeps its first and last turn.

    marks: what each event does, equal numbers for the same.
    """
    kept: Any = np.ones(len(marks), dtype=bool)
    for start, stop, period in _loops(marks):
        turns = (stop - start) // period
        kept[start + period : start + (turns - 1) * period] = False
    return np.flatnonzero(kept)


def _loops(marks: Any) -> list[tuple[int, int, int]]:
    """(start, end, events of a turn) of stretches that repeat, the longest ones first; none overlap."""
    found = [
        (start, stop + period, period)
        for period in range(1, len(marks) // _TURNS + 1)
        for start, stop in _runs(marks[period:] == marks[:-period])
        if stop - start >= (_TURNS - 1) * period
    ]
    chosen: list[tuple[int, int, int]] = []
    for start, stop, period in sorted(found, key=lambda one: (one[0] - one[1], one[2])):
        if all(stop <= other[0] or other[1] <= start for other in chosen):
            chosen.append((start, stop, period))
    return chosen


def _runs(flags: Any) -> Iterator[tuple[int, int]]:
    """Start and end of each stretch of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _marks(tape: Tape, start: int, stop: int) -> Any:
    """A number for what each event does: which kind and how many bytes, allocated or freed."""

    def mark(event: int) -> int:
        piece = tape.pieces[event if event >= 0 else ~event]
        number = piece.size * len(KINDS) + KINDS.index(piece.kind) + 1
        return number if event >= 0 else -number

    return np.array([mark(event) for event in tape.events[start:stop]], dtype=np.int64)
