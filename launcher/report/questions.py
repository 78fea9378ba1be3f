"""Questions on a terminal: each is asked again until its answer can be used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from launcher.errors import EffilaunchError, Interrupted, Problem
from launcher.report.outcome import harmless, note

Answer = TypeVar("Answer")


def can_ask() -> bool:
    """Whether there is somebody who sees a question and can answer it."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))


def ask(question: str, default: str, use: Callable[[str], Answer]) -> Answer:
    """What `use` makes of the answer; an empty one stands for `default`, where there is one.

    An answer that `use` refuses with an error is told why, and asked for again. Interrupted at the end of the
    input.
    """
    shown = f"{question} [{default}]: " if default else f"{question}: "
    while True:
        answer = _line(harmless(shown)) or default
        if not answer:
            note("  an answer is needed; Ctrl-C ends this, and nothing is written")
            continue
        try:
            return use(answer)
        except EffilaunchError as refused:
            for problem in refused.problems:
                note(f"  {problem}")


def _line(shown: str) -> str:
    """What was typed, without blanks around it."""
    while True:
        sys.stderr.write(shown)
        sys.stderr.flush()
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError:
            note("  that is no UTF-8")
            continue
        if not line:
            note("")
            raise Interrupted(Problem("interrupted", "the answers ended, and nothing was written"))
        return line.strip()
