"""Check the first rows of a recipe's local files before planning.

Limited in rows, bytes and files of a source, and in seconds. What is not found within these limits, or needs
a package that is missing, is left to `prepare`, which reads every row.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import MachineError, Problem, RecipeError
from launcher.machine import probe
from launcher.machine.hardware import device_facts
from launcher.machine.time_limit import TooSlow, time_limit
from launcher.planner.planner import missing_data
from launcher.recipe.data_paths import is_glob, is_loaded_hub_id, is_url
from launcher.recipe.loading import LoadedRecipe
from launcher.recipe.schema import Recipe
from launcher.tasks import task_named

if TYPE_CHECKING:
    from launcher.recipe.hook_file import HookFile

_SECONDS = 2.0
_NEAR = 0.75
_SIBLINGS = 10_000


@dataclass(frozen=True, slots=True)
class Looked:
    """What was found in the first rows."""

    absent: list[Problem] = field(default_factory=list)
    """Missing paths, which another machine may have."""
    wrong: list[Problem] = field(default_factory=list)
    """Data that cannot be trained on, and missing paths that resemble an existing one."""
    unread: list[str] = field(default_factory=list)
    """Files and columns that are not read, and text files of wrapped lines; one line per source and kind."""


def look_at_data(loaded: LoadedRecipe, hooks: Sequence[str]) -> Looked:
    """Look at the paths and first rows of `data.train` and `data.eval`.

    hooks: names of the recipe's hooks; the columns of rows that a `format_row` changes are not checked.
    RecipeError where a file of `reward:` is wrong.
    """
    if loaded.recipe.reward:
        from launcher.recipe.reward_rules import check_reward_files

        check_reward_files(loaded.recipe.reward)
    rows, looked = loaded.recipe.data, Looked()
    sources = {f"data.train[{index}]": source for index, source in enumerate(rows.train)}
    if isinstance(rows.eval, list):
        sources |= {f"data.eval[{index}]": source for index, source in enumerate(rows.eval)}
    exists = {source.path: _exists(source.path) for source in sources.values()}
    for problem in missing_data(loaded, exists):
        near = _similar(sources[str(problem.path).removesuffix(".path")].path)
        if near is None:
            looked.absent.append(problem)
        else:
            looked.wrong.append(replace(problem, hint=f"did you mean {near}?"))
    here = {
        place: source
        for place, source in sources.items()
        if exists[source.path] and not (is_loaded_hub_id(source.path) or is_url(source.path))
    }
    if here:
        from launcher.inputs.source_rows import (
            check_labels,
            check_source,
        )  # a plan made elsewhere reads no rows

        with contextlib.suppress(TooSlow), time_limit(_SECONDS):
            read = {
                place: check_source(
                    source, place, loaded.recipe, "format_row" in hooks, looked.wrong, looked.unread
                )
                for place, source in here.items()
            }
            training = [read.get(f"data.train[{index}]", ([], False)) for index in range(len(rows.train))]
            looked.wrong.extend(check_labels(training, loaded.recipe))
    return looked


def data_problems(loaded: LoadedRecipe) -> list[Problem]:
    """Problems of the data for a run here: missing files, and files that do not fit the task."""
    looked = look_at_data(loaded, _hook_names(loaded.recipe))
    return [*looked.absent, *looked.wrong]


def judged_data(loaded: LoadedRecipe, on: str | None) -> tuple[list[str], list[str]]:
    """The warnings about the data, and the files and columns that are not read.

    Raises RecipeError if the plan is for this machine and the data cannot be trained on.
    """
    looked = look_at_data(loaded, _hook_names(loaded.recipe))
    if looked.wrong and _is_for_here(loaded.recipe, on):
        raise RecipeError(looked.wrong)
    return [_warning(problem) for problem in (*looked.absent, *looked.wrong)], looked.unread


def find_hooks(recipe: Recipe) -> HookFile | None:
    """The hooks that the recipe's `python` file defines; None without a file."""
    if recipe.python is None:
        return None
    from launcher.recipe.hook_file import read_hooks

    return read_hooks(recipe.python, task_named(recipe.task))


def _hook_names(recipe: Recipe) -> tuple[str, ...]:
    found = find_hooks(recipe)
    return () if found is None else found.names


def _is_for_here(recipe: Recipe, on: str | None) -> bool:
    """Whether a plan is for this machine."""
    asked = recipe.hardware
    if on is not None or asked is None:
        return on is None
    if asked.num_nodes > 1 or asked.device == "cpu":
        return asked.num_nodes == 1
    try:
        found = probe.probe_hardware()
    except MachineError:  # which a run here reports
        return False
    return device_facts(asked.device)[0] == found.device and asked.devices_per_node <= found.devices_per_node


def _exists(path: str) -> bool:
    """Whether a data path exists; hub ids and URLs are not looked up."""
    if is_loaded_hub_id(path) or is_url(path):
        return True
    try:
        if is_glob(path) and not Path(path).exists():
            pattern = Path(path)
            return any(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))))
        return probe.resolve_path(path).exists()
    except (RecipeError, OSError, ValueError):
        return False


def _similar(path: str) -> Path | None:
    """An existing path with a similar name in the same folder."""
    try:
        wanted = Path(path).expanduser()
        with os.scandir(wanted.parent) as entries:
            names = [entry.name for entry in itertools.islice(entries, _SIBLINGS)]
    except (OSError, ValueError, RuntimeError):
        return None
    from difflib import get_close_matches

    near = get_close_matches(wanted.name, names, 1, _NEAR)
    return wanted.parent / near[0] if near else None


def _warning(problem: Problem) -> str:
    """The problem as a warning in a plan for another machine."""
    if problem.code != "data-missing":
        return str(problem)
    near = f"; {problem.hint}" if (problem.hint or "").startswith("did you mean") else ""
    return f"{problem.message} ({problem.path}){near}"
