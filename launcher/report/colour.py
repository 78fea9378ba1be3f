"""Whether a stream is a terminal that people look at, and whether it gets colours."""

from __future__ import annotations

import os
import re
from typing import TextIO

BOLD, DIM, RED, GREEN, YELLOW = "1", "2", "31", "32", "33"
COLOUR = r"\x1b\[[0-9;]*m"
_WITHOUT_A_CURSOR = ("dumb", "unknown")


def is_tty(stream: TextIO | None) -> bool:
    """Whether somebody sits at it, who may stop it with Ctrl-S."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # it was closed
        return False


def is_terminal(stream: TextIO | None) -> bool:
    """Whether it can move its cursor: neither a pipe nor a file, nor what an editor takes for a terminal."""
    return is_tty(stream) and os.environ.get("TERM") not in _WITHOUT_A_CURSOR


def is_coloured(stream: TextIO | None) -> bool:
    """A terminal whose user has not set NO_COLOR (https://no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def painted(text: str, *codes: str) -> str:
    """The text in a colour, or as it is without one."""
    return f"\x1b[{';'.join(codes)}m{text}\x1b[0m" if codes and text else text


def plain(text: str) -> str:
    """The text without colours, whoever gave it any."""
    return re.sub(COLOUR, "", text) if "\x1b" in text else text
