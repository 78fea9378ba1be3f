"""The rows that a run logged, for a page: of a million, the some thousand that a curve shows.

A chart has some hundred columns, and in each of them nothing is seen but the first, the last, the least and
the largest value. So a long record is read in as many parts, and of each part these rows are kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

from launcher.files.safe_files import LONGEST_LINE, opened, parse_json, read_jsonl

WHOLE = 10_000
"""Up to this many rows, all are kept."""
PARTS = 700
"""Of a longer record: as many as a chart has columns."""
LAST = 100
"""Rows at the end that are all kept, at least."""
_RISING = ("step", "epoch", "tokens")
"""Columns whose extremes are the first and the last row."""
_COLUMNS = 24
"""Columns of which the least and the largest values are kept, at most."""


@dataclass(frozen=True, slots=True)
class Logged:
    """Rows that have a step, in their order."""

    rows: Sequence[Mapping[str, Any]]
    count: int
    """Lines of the record, of which these are some."""


def read_logged(path: Path) -> Logged:
    """The rows of metrics.jsonl; none where it cannot be read. Lines that are no row are skipped."""
    try:
        with opened(path) as stream:
            count = sum(chunk.count(b"\n") for chunk in iter(lambda: stream.read(1 << 22), b""))
        if count <= WHOLE:
            rows = [row for row in read_jsonl(path) if _has_step(row)]
            return Logged(rows, len(rows))
        with opened(path) as stream:
            return Logged(list(_thinned(stream, count)), count)
    except (OSError, ValueError):
        return Logged((), 0)


def _thinned(stream: BinaryIO, count: int) -> Iterator[Mapping[str, Any]]:
    """Rows of a record of `count` lines."""
    size = (count - LAST) // PARTS
    for _ in range(PARTS):
        yield from _ends(_rows(list(islice(_lines(stream), size))))
    yield from _rows(list(_lines(stream)))


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Lines; of one that is too long, parts that are no JSON."""
    return iter(lambda: stream.readline(LONGEST_LINE), b"")


def _rows(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """The rows among these lines; together they are parsed twice as fast as one by one."""
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")
        if {type(row["step"]) for row in found} <= {int, float}:
            return list(found)
    except (ValueError, TypeError, KeyError, RecursionError):  # a line that was cut, or is none of ours
        found = [_row(line) for line in lines]
    return [row for row in found if _has_step(row)]


def _row(line: bytes) -> Any:
    try:
        return parse_json(line.decode("utf-8", errors="replace"))
    except ValueError:
        return None


def _has_step(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("step"), int | float)


def _ends(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The first row and the last, those of evaluations, and of each column the least, the largest and the
    first value that is not finite."""
    if not rows:
        return
    kept = {0, len(rows) - 1}
    for name in [name for name in rows[0] if name not in _RISING][:_COLUMNS]:
        try:
            values = list(map(itemgetter(name), rows))
        except KeyError:
            values = [row.get(name) for row in rows]
        kept |= _extremes(values)
    kept |= {at for at, row in enumerate(rows) if "loss" not in row}
    yield from (rows[at] for at in sorted(kept))


def _extremes(values: list[Any]) -> set[int]:
    """Where the least and the largest of the numbers are, and the first that is none."""
    try:
        return {values.index(min(values)), values.index(max(values))}
    except TypeError:  # null: not finite
        pass
    numbers = [(value, at) for at, value in enumerate(values) if isinstance(value, int | float)]
    other = next((at for at, value in enumerate(values) if not isinstance(value, int | float)), 0)
    return {other, *((min(numbers)[1], max(numbers)[1]) if numbers else ())}
