"""Columns and sizes as plain text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

WIDTH = 100
_LEAST = 40
"""Columns for the last cell of a row whose first ones leave no room."""


def gib(size: float | None) -> str:
    """Bytes as GiB (or MiB below one)."""
    if size is None:
        return "unknown"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def wrapped(text: str, indent: str = "  ", *, width: int = WIDTH) -> list[str]:
    """A sentence over lines of at most `width` columns; what follows its first line stands further in."""
    return wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def table(rows: Sequence[Sequence[str]], indent: str = "  ", *, width: int | None = None) -> list[str]:
    """Columns padded to their widest cell; the last one is free, or wrapped inside `width` columns in all."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)] if rows else []
    lines = []
    for *cells, last in rows:
        start = indent + "".join(cell.ljust(w) + "  " for cell, w in zip(cells, widths, strict=True))
        parts = [last] if width is None else _wrapped(last, max(width - len(start), _LEAST))
        lines += [start + parts[0], *(" " * len(start) + part for part in parts[1:])]
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    return wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
