"""Check shell lines with `bash -n`, which runs none of them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from launcher.errors import Problem

BASH = "/bin/bash"
"""The interpreter of the job scripts."""
_ANSWER_S = 10.0
_SAID = re.compile(r"bash: line (\d+): (.*)")


def check_shell(lines: Sequence[str], path: str) -> Problem | None:
    """The problem of the first of `lines` with a syntax error, else None; None without bash.

    path: their path in the recipe. They are checked alone: in the script, the rest would close an open quote.
    """
    if not lines:
        return None
    text = "\n".join(lines) + "\n"
    found = _said(text)
    if found is None and re.search(r"(?<!\\)(?:\\\\)*\\$", lines[-1]):
        found = len(text), "a backslash at the end joins the following line"
    if found is None:
        return None
    at, words = found
    starts = [1 + sum(line.count("\n") + 1 for line in lines[:index]) for index in range(len(lines))]
    entry = max(index for index, start in enumerate(starts) if start <= at)
    hint = "write complete commands: close quotes, brackets and blocks within `setup`"
    return Problem("wrong-value", f"bash reports a syntax error: {words}", path=f"{path}[{entry}]", hint=hint)


def _said(text: str) -> tuple[int, str] | None:
    """The line (from 1) of the error that `bash -n` reports, and its message."""
    words = [BASH, "--norc", "-O", "extglob", "-n"]  # since `shopt -s extglob` in the lines is not run
    env = {"LC_ALL": "C"}  # no BASH_ENV, no exported functions
    try:
        done = subprocess.run(words, input=text.encode(), env=env, capture_output=True, timeout=_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = done.stderr.decode(errors="replace")
    if (match := _SAID.search(said)) is None:
        return None
    begins = re.search(r" at line (\d+)", match[2])  # an unterminated here-document, only a warning
    return int((begins or match)[1]), match[2].removeprefix("warning: ")
