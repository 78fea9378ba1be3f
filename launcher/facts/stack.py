"""What the installed training stack says of this machine: asked in a child process.

The child (launcher/train/machine.py) prints one JSON object a line, a section each, so that a library that
brings the process down takes no other section with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.facts.user_files import parse_json

CHILD = "launcher.train.machine"
TIMEOUT_S = 120
SECTIONS = ("torch", "bitsandbytes", "deepspeed")

Stack = Mapping[str, Mapping[str, Any]]
"""Section -> facts; a section that could not be asked has the key `error`, one sentence."""


def ask_stack(python: str, environ: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> Stack:
    """The child's sections. A missing library, a broken one and a child that hangs are facts, too.

    python: the interpreter that has the training packages.
    """
    import subprocess

    try:
        done = subprocess.run(
            [python, "-m", CHILD],
            capture_output=True,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return read_sections(_text(late.stdout), f"no answer within {timeout_s:g} s")
    except OSError as error:
        return read_sections("", f"{python} cannot be started: {error.strerror}")
    why = f"the process ended with code {done.returncode}: {_last_line(_text(done.stderr))}"
    return read_sections(_text(done.stdout), why)


def read_sections(text: str, why: str) -> Stack:
    """The sections of the child's output; `why` is the error of each that is missing."""
    found: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        try:
            answer = parse_json(line)
        except ValueError:  # the last line of a process that died in it
            continue
        if isinstance(answer, dict):
            found |= {name: facts for name, facts in answer.items() if name in SECTIONS}
    return {name: found.get(name, {"error": why}) for name in SECTIONS}


def _text(output: bytes | str | None) -> str:
    if isinstance(output, bytes):
        return output.decode("utf-8", errors="replace")
    return output or ""


def _last_line(text: str) -> str:
    lines: Sequence[str] = text.splitlines()
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it said nothing")
