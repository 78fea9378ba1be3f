"""Makers of the held-out logs: as capture.caused, and by shell commands that filter the output."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

from tools.corpus.capture import MADE, Script, body, capture, caused

SRUN = "sed -u 's/^/0: /'"
"""As `srun -l` writes the lines of task 0."""
CLOCK = """while IFS= read -r line; do printf '%(%Y-%m-%dT%H:%M:%S)T %s\\n' -1 "$line"; done"""
DOCKER = (
    "python -u -c 'import json, sys\n"
    'for line in sys.stdin: print(json.dumps({"log": line, "stream": "stderr", "tag": "job-17"}))\''
)
"""As the json-file driver of a container keeps each line."""


def held(failure: str, variant: str = "", **how: object) -> Callable[[Script], Script]:
    """`caused` for the held-out set that the maker's module belongs to."""

    def register(script: Script) -> Script:
        return caused(failure, variant, kind=_set_of(script), **how)(script)

    return register


def _set_of(script: Script) -> str:
    first = Path(inspect.getfile(script)).name.startswith("held_out_")
    return "first_held_out" if first else "held_out"


def shell(
    failure: str, variant: str, command: str, env: Mapping[str, str] = {}, files: Mapping[str, object] = {}
) -> Callable[[Script], Script]:
    """As `held`, but run by a shell command that knows the script as train.py."""

    def register(script: Script) -> Script:
        name = f"{failure}-{variant}"
        by = f"tools/corpus/{Path(inspect.getfile(script)).name}:{script.__name__}"
        beside = {"train.py": body(script), **files}
        kind = _set_of(script)
        MADE[name] = lambda: capture(name, failure, command, env=env, files=beside, by=by, kind=kind)
        return script

    return register
