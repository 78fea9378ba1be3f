"""How wide a page of plain text is, and whether it has colours: a terminal's own, or what every pipe gets."""

from __future__ import annotations

import os
from dataclasses import dataclass
from textwrap import wrap
from typing import TextIO

from launcher.report.colour import BOLD, is_coloured, is_terminal, painted

LEAST_COLUMNS = 40


@dataclass(frozen=True, slots=True)
class Page:
    """Without arguments what goes into a pipe or a file."""

    columns: int | None = None
    """None: each part has its usual width."""
    coloured: bool = False

    def within(self, usual: int) -> int:
        """The width of a part that usually has `usual` columns."""
        return usual if self.columns is None else min(usual, self.columns)

    def paint(self, text: str, *codes: str) -> str:
        """The text in a colour, where the page has any."""
        return painted(text, *codes) if self.coloured else text

    def heading(self, text: str, *codes: str) -> str:
        """A line that begins a part."""
        return self.paint(text, BOLD, *codes)

    def fitted(self, line: str, hang: int = 4) -> list[str]:
        """The line; over several, which begin `hang` columns further in, where the page is too narrow."""
        if self.columns is None or len(line) <= self.columns:
            return [line]
        text = line.lstrip(" ")
        indent = " " * (len(line) - len(text))
        return wrap(
            text,
            self.columns,
            initial_indent=indent,
            subsequent_indent=indent + " " * hang,
            break_long_words=False,
            break_on_hyphens=False,
        )


def page_of(stream: TextIO | None) -> Page:
    """The page of a stream."""
    if stream is None or not is_terminal(stream):
        return Page()
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return Page(max(columns, LEAST_COLUMNS) if columns else None, is_coloured(stream))
