"""Questions on a terminal: each is asked again until its answer is valid."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from launcher.errors import EffilaunchError, Interrupted, Problem
from launcher.report.outcome import harmless, note
from launcher.report.terminal import is_tty

Answer = TypeVar("Answer")


def can_ask() -> bool:
    """Whether stdin and stderr are terminals."""
    return is_tty(sys.stdin) and is_tty(sys.stderr)


def ask(question: str, default: str, use: Callable[[str], Answer]) -> Answer:
    """The answer, or `default` if it is empty, as converted by `use`.

    An error of `use` is printed, and the question asked again. Raises Interrupted at the end of the input.
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
    """The input without surrounding blanks."""
    while True:
        sys.stderr.write(shown)
        sys.stderr.flush()
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError:
            note("  the answer is not UTF-8")
            continue
        if not line:
            note("")
            raise Interrupted(Problem("interrupted", "the input ended; nothing was written"))
        return line.strip()
