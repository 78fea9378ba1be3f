"""Columns, sizes and durations as plain text. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

WIDTH = 100
_LEAST = 40
"""Columns of the last cell of a row whose first cells fill the width."""
BYTES = "bytes"
"""The unit whose values are shown in KiB, MiB or GiB."""


def gib(size: float | None) -> str:
    """Bytes as GiB (or MiB below one)."""
    if size is None:
        return "unknown"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def divisor(largest: float, unit: str) -> tuple[float, str]:
    """What values are divided by to be shown, and the name of the shown unit."""
    if unit != BYTES:
        return 1.0, unit
    for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if largest >= size:
            return float(size), name
    return 1.0, "B"


def amount(value: float, unit: str) -> str:
    """A value with its unit, to three digits."""
    size, name = divisor(abs(value), unit)
    shown = value / size
    places = max(0, 2 - math.floor(math.log10(abs(shown)))) if shown else 0
    text = f"{shown:.{places}f}" if places <= 6 else f"{shown:.2e}"
    return f"{text} {name}".rstrip()


def parameters(value: float) -> str:
    """A number of parameters: `135 M`."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """12 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    rounded = round(seconds)
    for size, name, smaller, lesser in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if rounded >= size:
            rest = rounded % size // smaller
            return f"{rounded // size} {name}" + (f" {rest} {lesser}" if rest else "")
    return f"{rounded} s"


def wrapped(text: str, indent: str = "  ", *, width: int = WIDTH, hang: int = 2) -> list[str]:
    """A sentence over lines of at most `width` columns; those after the first have a hanging indent."""
    from textwrap import wrap  # many an output has no sentence

    return wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + " " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )


def table(rows: Sequence[Sequence[str]], indent: str = "  ", *, width: int | None = None) -> list[str]:
    """Columns padded to their widest cell; the last one is free, or wrapped inside `width` columns in all."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)] if rows else []
    lines = []
    for *cells, last in rows:
        start = indent + "".join(cell.ljust(w) + "  " for cell, w in zip(cells, widths, strict=True))
        least = max((width or 0) - len(start), _LEAST)
        parts = [last] if width is None else wrapped(last, "", width=least, hang=0) or [""]
        lines += [start + parts[0], *(" " * len(start) + part for part in parts[1:])]
    return lines
