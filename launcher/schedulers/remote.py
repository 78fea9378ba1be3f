"""What a job runs on machines that do not see the files of this one. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from launcher.errors import Problem
from launcher.schedulers.queue import EXIT, RESULT, START

_MISSING = 127
"""Exit code of a shell that finds no command of the name."""
NO_COMMAND = "effilaunch: the command is missing: install effilaunch in the image, or set it up in `setup`"


def run_script(
    recipe: str, run_dir: str, *, rank: str, head: str, nodes: int, tiny: bool, setup: Sequence[str]
) -> str:
    """Bash that starts one node of a run and prints its result.

    recipe, run_dir: paths on the node. rank, head: shell words for the node's rank, and the name and the
    port of node rank 0. A shell that is the first process of a container has to pass on signals itself.
    """
    place = f" --node-rank {rank} --master-addr {head}" if nodes > 1 else ""
    result = shlex.quote(f"{run_dir}/result.json")
    lines = [
        f'echo "{START}of $HOSTNAME ===="',
        "command -v effilaunch >/dev/null || {",
        f"  echo {shlex.quote(f'error: {NO_COMMAND}')}",
        f"  exit {_MISSING}",
        "}",
        f"effilaunch run {shlex.quote(recipe)} --output-dir {shlex.quote(run_dir)} --resume auto"
        f"{' --tiny' if tiny else ''}{place} &",
        "pid=$!",
        "trap 'kill -TERM $pid' TERM INT",
        "wait $pid && code=0 || code=$?",
        "while kill -0 $pid 2>/dev/null; do wait $pid && code=0 || code=$?; done",
        f'if [ "$code" = 0 ] && [ {rank} = 0 ]; then',
        f"  printf '{RESULT}%s\\n' \"$(tr -d '\\n' < {result})\"",
        "fi",
        f'[ "$code" = 0 ] || echo "{EXIT}$code"',
        'exit "$code"',
    ]
    return "\n".join(_with_setup(setup, lines)) + "\n"


def prepare_script(recipe: str, *, tiny: bool, setup: Sequence[str]) -> str:
    """Bash that prepares the data."""
    lines = [f"exec effilaunch prepare {shlex.quote(recipe)}{' --tiny' if tiny else ''}"]
    return "\n".join(_with_setup(setup, lines)) + "\n"


def _with_setup(setup: Sequence[str], lines: Sequence[str]) -> list[str]:
    return ["set -eo pipefail", *setup, *lines]


def check_paths(paths: Mapping[str, str], places: Sequence[str], code: str, key: str) -> list[Problem]:
    """Problems of files of the recipe that the jobs do not see. places: the folders that they see."""
    found = []
    for path, file in paths.items():
        if not any(PurePosixPath(file).is_relative_to(place) for place in places):
            message = f"{file} is not on the nodes, which see {', '.join(places) or 'no folder of yours'}"
            hint = f"write the absolute path that it has there, below a path of `{key}`"
            found.append(Problem(code, message, path=path, hint=hint))
    return found


class _ScriptDumper(yaml.SafeDumper):
    """Scripts as blocks of lines."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_ScriptDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def dump_yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    return yaml.dump_all(documents, Dumper=_ScriptDumper, sort_keys=False, width=1000, allow_unicode=True)
