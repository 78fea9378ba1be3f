"""Whether bash can read lines of shell: asked of bash itself, which runs none of them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from launcher.errors import Problem

BASH = "/bin/bash"
"""What the job scripts begin with."""
_ANSWER_S = 10.0
_SAID = re.compile(r"bash: line (\d+): (.*)")


def check_shell(lines: Sequence[str], path: str) -> Problem | None:
    """The problem of the first entry of `lines` that bash cannot read. path: where the recipe has them.

    They are read without what stands behind them: an open quote would take its other half from there.
    None where there is no bash to ask.
    """
    if not lines:
        return None
    text = "\n".join(lines) + "\n"
    found = _said(text)
    if found is None and re.search(r"(?<!\\)(?:\\\\)*\\$", lines[-1]):
        found = len(text), "a backslash at the end takes the line behind it"
    if found is None:
        return None
    at, words = found
    starts = [1 + sum(line.count("\n") + 1 for line in lines[:index]) for index in range(len(lines))]
    entry = max(index for index, start in enumerate(starts) if start <= at)
    hint = "write whole commands: what is opened in `setup` is closed there"
    return Problem("wrong-value", f"bash cannot read it: {words}", path=f"{path}[{entry}]", hint=hint)


def _said(text: str) -> tuple[int, str] | None:
    """The line, from 1 on, that `bash -n` complains of, and its words."""
    words = [BASH, "--norc", "-O", "extglob", "-n"]  # no `shopt -s extglob` among the lines is run
    env = {"LC_ALL": "C"}  # no BASH_ENV, no exported functions
    try:
        done = subprocess.run(words, input=text.encode(), env=env, capture_output=True, timeout=_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = done.stderr.decode(errors="replace")
    if (match := _SAID.search(said)) is None:
        return None
    begins = re.search(r" at line (\d+)", match[2])  # of a here-document without end, which is a mere warning
    return int((begins or match)[1]), match[2].removeprefix("warning: ")
