"""A terminal with a changing line at the bottom and lines that stay above it.

Without a terminal, or with one that cannot move its cursor, only the lines that stay are written.
"""

from __future__ import annotations

import contextlib
import os
import sys
import unicodedata
from collections.abc import Callable
from typing import TextIO

from launcher.report.colour import is_coloured, is_terminal, is_tty, plain
from launcher.report.outcome import echo, harmless, is_quiet

_KEPT_BYTES = 1 << 20
"""Limit of the text that waits for a stopped terminal (Ctrl-S); the oldest is dropped."""
_PLAIN = "\x1b[0m"


class Screen:
    """Writes without ever waiting: a terminal may be stopped, full or gone while ranks are supervised."""

    def __init__(
        self,
        stream: TextIO | None = None,
        otherwise: Callable[[str], None] = echo,
        *,
        draws: bool = True,
    ) -> None:
        """stream: None for stdout. otherwise: receives the lines where that is no terminal.

        draws: whether there is a line that changes, where the terminal can have one.
        """
        stream = sys.stdout if stream is None else stream
        self._otherwise = otherwise
        self._descriptor = _opened_anew(stream) if is_tty(stream) and not is_quiet() else None
        self._is_coloured = is_coloured(stream)
        self._draws = draws and is_terminal(stream)
        self._waiting = b""
        self._shown, self._columns = "", 0
        """The line at the bottom, and how many columns it takes."""

    @property
    def is_live(self) -> bool:
        """Whether there is a line that changes."""
        return self._draws and self._descriptor is not None

    def line(self, text: str) -> None:
        """Write one or more lines that stay. Never fails."""
        if self._descriptor is None:
            self._otherwise(text)
            return
        shown = harmless(text if self._is_coloured else plain(text))
        end = _PLAIN if "\x1b" in shown else ""  # whoever wrote it may have been cut off within one
        self._add(self._erased() + f"{shown}{end}\n" + self._shown)
        self._push()

    def draw(self, text_of: Callable[[int], str]) -> None:
        """Write the bottom line anew. text_of: the columns that there are -> what stands in them.

        Nothing is drawn while the terminal has not taken what was written before, or by a background job.
        Called regularly, since it also writes what waits.
        """
        self._push()
        if not self.is_live or self._waiting or not self._is_in_front():
            return
        text = harmless(text_of(self._width() - 1)).replace("\n", " ")  # the last column might begin a line
        if text != self._shown:
            erased = self._erased()
            self._shown, self._columns = text, columns_of(text)
            self._add(erased + text)
            self._push()

    def close(self) -> None:
        """Remove the bottom line and write what still waits."""
        if self._descriptor is None:
            return
        self._add(self._erased())
        self._shown = ""
        with contextlib.suppress(OSError):
            os.set_blocking(self._descriptor, True)  # nothing runs any more that must be watched
        self._push()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _erased(self) -> str:
        """Takes the bottom line away; it lies on several rows where the window was made narrower since."""
        if not self._shown:
            return ""
        above = max(0, self._columns - 1) // self._width()
        return f"\x1b[{above}A\r\x1b[J" if above else "\r\x1b[K"

    def _width(self) -> int:
        """The columns by now: asked each time, since a window changes."""
        assert self._descriptor is not None, "only a live screen has a width"
        try:
            return os.get_terminal_size(self._descriptor).columns or 80
        except OSError:
            return 80

    def _is_in_front(self) -> bool:
        assert self._descriptor is not None, "only a live screen has a job in front"
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:  # a terminal that controls no job, or another's
            return True

    def _add(self, text: str) -> None:
        self._waiting = (self._waiting + text.encode("utf-8", errors="replace"))[-_KEPT_BYTES:]

    def _push(self) -> None:
        """Hand over what the terminal takes at once."""
        while self._waiting and self._descriptor is not None:
            try:
                written = os.write(self._descriptor, self._waiting)
            except BlockingIOError:
                return
            except OSError:  # it is gone: what comes goes where `echo` leads it
                os.close(self._descriptor)
                self._descriptor, self._waiting = None, b""
                return
            self._waiting = self._waiting[written:]


def _opened_anew(stream: TextIO) -> int | None:
    """A descriptor of the terminal that never waits, without a change of those that others share."""
    try:
        name = os.ttyname(stream.fileno())
        return os.open(name, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except (OSError, ValueError):  # in a container without /dev/pts, or without a descriptor
        return None


def columns_of(text: str) -> int:
    """Columns of a text on a terminal: two for a wide character, none for a combining mark or a colour."""
    return sum(map(_columns_of_one, plain(text)))


def flat(text: str) -> str:
    """Foreign text as it may appear within a line: no colour, tab or line end."""
    return " ".join(harmless(plain(text)).split())


def cut(text: str, columns: int) -> str:
    """A text without colours cut to so many columns, with an ellipsis."""
    if columns_of(text) <= columns:
        return text
    kept, used = "", 0
    for letter in text:
        used += _columns_of_one(letter)
        if used > columns - 1:
            break
        kept += letter
    return f"{kept}…" if columns > 0 else ""


def _columns_of_one(letter: str) -> int:
    if unicodedata.combining(letter) or unicodedata.category(letter) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in ("W", "F") else 1
