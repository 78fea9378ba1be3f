"""A terminal for tests: a pty whose other end is read all the time, and what would stand on its screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Iterator

from patience import patience

_PARTS = re.compile(r"\x1b\[(\d*)([A-Za-z])|\x1b\[[\d;]*m|.", re.DOTALL)


class Terminal:
    """`stream` writes to it; `written` is all that came out, `states` what it was after each read."""

    def __init__(self, columns: int = 100) -> None:
        self._read, writer = pty.openpty()
        self.resize(columns)
        self.stream = os.fdopen(writer, "w", encoding="utf-8")
        self.written = b""
        self.states: list[str] = []
        self._reader = threading.Thread(target=self._collect, daemon=True)
        self._reader.start()

    def resize(self, columns: int) -> None:
        """Another width, which the next drawing finds."""
        fcntl.ioctl(self._read, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def _collect(self) -> None:
        with contextlib.suppress(OSError):  # nobody writes to it any more
            while chunk := os.read(self._read, 1 << 16):
                self.written += chunk
                self.states.append(self.screen())

    def screen(self) -> str:
        """What stands there by now."""
        return screen_of(self.written.decode(errors="replace"))

    def end(self) -> str:
        """No more is written; what stands there in the end."""
        self.stream.close()
        self._reader.join(patience(60))
        os.close(self._read)
        return self.screen()


@contextlib.contextmanager
def terminal(columns: int = 100) -> Iterator[Terminal]:
    """One that is closed in the end."""
    made = Terminal(columns)
    try:
        yield made
    finally:
        if not made.stream.closed:
            made.end()


def screen_of(text: str) -> str:
    """The lines that a terminal shows of a text, which may use \\r, \\n, up, and erasing to the end."""
    lines, row, column = [""], 0, 0
    for part in _PARTS.finditer(text):
        letter = part[0]
        if part[2] == "K":
            lines[row] = lines[row][:column]
        elif part[2] == "J":
            lines[row:] = [lines[row][:column]]
        elif part[2] == "A":
            row = max(0, row - int(part[1] or 1))
        elif letter == "\r":
            column = 0
        elif letter == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif not letter.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + letter + lines[row][column + 1 :]
            column += 1
    return "\n".join(lines)
