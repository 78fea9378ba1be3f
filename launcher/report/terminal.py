"""Width and colours of a text stream: those of a terminal, or plain text for a pipe or a file."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TextIO

from launcher.report.tables import wrapped

BOLD, DIM, RED, GREEN, YELLOW = "1", "2", "31", "32", "33"
LEAST_COLUMNS = 40
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def is_tty(stream: TextIO | None) -> bool:
    """Whether it is a terminal, which a user may stop with Ctrl-S."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # it was closed
        return False


def is_terminal(stream: TextIO | None) -> bool:
    """Whether it is a terminal that can move its cursor."""
    return is_tty(stream) and os.environ.get("TERM") not in ("dumb", "unknown")


def is_coloured(stream: TextIO | None) -> bool:
    """A terminal whose user has not set NO_COLOR (https://no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def plain(text: str) -> str:
    """The text without colours."""
    return _COLOUR.sub("", text) if "\x1b" in text else text


@dataclass(frozen=True, slots=True)
class Page:
    """Layout of plain text; without arguments that of a pipe or a file."""

    columns: int | None = None
    """None: each part has its default width."""
    coloured: bool = False

    def within(self, default: int) -> int:
        """The width of a part with this default width."""
        return default if self.columns is None else min(default, self.columns)

    def paint(self, text: str, *codes: str) -> str:
        """The text in a colour, if the page has colours."""
        return f"\x1b[{';'.join(codes)}m{text}\x1b[0m" if self.coloured and codes and text else text

    def heading(self, text: str, *codes: str) -> str:
        """The first line of a part."""
        return self.paint(text, BOLD, *codes)

    def fitted(self, line: str, hang: int = 4) -> list[str]:
        """The line, wrapped with a hanging indent where the page is too narrow."""
        if self.columns is None or len(line) <= self.columns:
            return [line]
        text = line.lstrip(" ")
        return wrapped(text, " " * (len(line) - len(text)), width=self.columns, hang=hang)


def page_of(stream: TextIO | None) -> Page:
    """The page of a stream."""
    if stream is None or not is_terminal(stream):
        return Page()
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return Page(max(columns, LEAST_COLUMNS) if columns else None, is_coloured(stream))
