"""Check the first rows of a recipe's local files before planning.

Limited in rows, bytes and files of a source, and in seconds. What is not found within these limits, or needs
a package that is missing, is left to `prepare`, which reads every row.
"""

from __future__ import annotations

import difflib
import importlib
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from launcher.errors import MachineError, Problem, RecipeError
from launcher.machine import probe
from launcher.machine.hardware import device_facts
from launcher.machine.time_limit import TooSlow, time_limit
from launcher.planner.planner import missing_data
from launcher.recipe.data_paths import is_glob, is_loaded_hub_id, is_url
from launcher.recipe.loading import LoadedRecipe
from launcher.recipe.reward_columns import unread
from launcher.recipe.schema import DataSource, Recipe
from launcher.recipe.suggestions import listed
from launcher.rows.files import data_suffix, read_file
from launcher.rows.lines import CutOffError
from launcher.rows.recognise import PEEK, LaterRows, detect, refuse_misfit
from launcher.rows.sources import Detected, Row, image_row, is_image, source_files, source_lines
from launcher.rows.unread import unread_columns
from launcher.tasks import FORMATS, task_named

_ROWS = 100
_BYTES = 4 << 20
"""Of each file."""
_FILES = 16
"""Of each source."""
_SECONDS = 2.0
_NEAR = 0.75
_SIBLINGS = 10_000
_WRAPPED = 40
"""Characters from which on a line may be one of wrapped text."""
_ENDS = (".", "!", "?", ":", ";", '"', ")")
_COLUMNAR = (".parquet", ".arrow")


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
    try:
        with time_limit(_SECONDS):
            for place, source in sources.items():
                if exists[source.path] and not (is_loaded_hub_id(source.path) or is_url(source.path)):
                    _look_at(source, place, loaded.recipe, "format_row" in hooks, looked)
    except TooSlow:
        pass
    return looked


def data_problems(loaded: LoadedRecipe) -> list[Problem]:
    """Problems of the data for a run here: missing files, and files that do not fit the task."""
    looked = look_at_data(loaded, hook_names(loaded.recipe.python))
    return [*looked.absent, *looked.wrong]


def judged_data(loaded: LoadedRecipe, on: str | None) -> tuple[list[str], list[str]]:
    """The warnings about the data, and the files and columns that are not read.

    Raises RecipeError if the plan is for this machine and the data cannot be trained on.
    """
    looked = look_at_data(loaded, hook_names(loaded.recipe.python))
    if looked.wrong and _is_for_here(loaded.recipe, on):
        raise RecipeError(looked.wrong)
    return [_warning(problem) for problem in (*looked.absent, *looked.wrong)], looked.unread


def hook_names(file: str | None) -> tuple[str, ...]:
    """Names of the functions that the recipe's `python` file defines."""
    if file is None:
        return ()
    from launcher.recipe.hook_file import read_hooks

    return read_hooks(Path(file)).names


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
    near = difflib.get_close_matches(wanted.name, names, 1, _NEAR)
    return wanted.parent / near[0] if near else None


def _look_at(source: DataSource, place: str, recipe: Recipe, hooked: bool, looked: Looked) -> None:
    settings, task = source.model_dump(), recipe.task
    try:
        files = source_files(settings)
        lines = source_lines(settings, offer=not isinstance(recipe.data.eval, list))
        if len(lines) > 1:  # some files are left
            looked.unread.append(f"{place}: {'; '.join(lines)}")
            if not place.startswith("data.train") and source in recipe.data.train:
                looked.unread.append(f"{place}: these files are trained on, too; set `split` beside `path`")
        if len(files) == 1 and files[0].stat().st_size == 0:
            raise RecipeError(Problem("no-rows", "is empty", file=source.path, hint="give a file with rows"))
        by_file = [rows for file in files[:_FILES] if (rows := _first_rows(file, settings))]
        if not by_file or hooked:
            return
        if line := _wrapped(by_file, settings):
            looked.unread.append(f"{place}: {line}")
        peek = list(itertools.islice(itertools.chain.from_iterable(by_file), PEEK))  # as `prepare` does
        reward = [entry.model_dump() for entry in recipe.reward]
        detected = detect(peek, settings["format"], settings["columns"], task, source.path, reward)
        if names := unread(unread_columns(peek, detected), reward):
            looked.unread.append(f"columns that are not read: {listed(names)} ({place})")
        section = _own_section(recipe)
        if problem := task_named(task).misfit(detected.format, section):
            if problem not in looked.wrong:  # of another source
                looked.wrong.append(problem)
            return
        for rows in by_file:
            _check_rows(rows, detected, task, section, reward)
    except RecipeError as error:
        looked.wrong.extend(replace(p, path=f"{place}.{p.path or 'path'}") for p in error.problems)
    except (OSError, ValueError) as error:  # a folder that may not be listed, a name that no file can have
        message = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        looked.wrong.append(Problem("data-unreadable", message, file=source.path, path=f"{place}.path"))


def _wrapped(by_file: Sequence[Sequence[Row]], source: Mapping[str, Any]) -> str | None:
    """What to do about text files whose lines are parts of sentences, each of which would be a document."""
    texts = [rows for rows in by_file if data_suffix(Path(rows[0].file)) == ".txt"]
    if source.get("sample_by", "line") != "line":
        return None
    pairs = [pair for rows in texts for pair in itertools.pairwise(rows)]
    broken = sum(
        below.number == line.number + 1
        and len(line.values["text"]) >= _WRAPPED
        and not line.values["text"].rstrip().endswith(_ENDS)
        and below.values["text"].lstrip()[:1].islower()
        for line, below in pairs
    )
    if broken * 4 < len(pairs) or broken < 2:
        return None
    return (
        f"{broken} of the first {len(pairs) + len(texts)} lines end in the middle of a sentence, and each "
        "line is a document: set `sample_by: document` (a document per file) or `sample_by: paragraph`"
    )


def _first_rows(file: Path, source: Mapping[str, Any]) -> list[Row]:
    """The first rows of a file; none if reading them is too expensive."""
    if is_image(file):
        return [image_row(file)]
    if data_suffix(file) in _COLUMNAR and (file.suffix.lower() not in _COLUMNAR or not _has_pyarrow()):
        return []  # a compressed file would be unpacked completely
    rows: list[Row] = []
    try:
        for number, values in itertools.islice(read_file(file, None, _BYTES, source), _ROWS):
            rows.append(Row(values, str(file), number))
    except (CutOffError, ModuleNotFoundError, MemoryError):
        pass
    return rows


def _has_pyarrow() -> bool:
    try:
        importlib.import_module("pyarrow.parquet")
    except ImportError:
        return False
    return True


def _own_section(recipe: Recipe) -> Any:
    """The section of the recipe that only its task reads, with a value for every key; None without one."""
    task = task_named(recipe.task)
    if task.section is None:
        return None
    values = task.section_values(getattr(recipe, task.section))
    return SimpleNamespace(**{key: value for key, (value, _) in values.items()})


def _check_rows(
    rows: Sequence[Row], detected: Detected, task: str, section: Any, reward: Sequence[Mapping[str, Any]]
) -> None:
    """Raise the RecipeError that `prepare` would raise for one of these rows."""
    fields = FORMATS[detected.format].needed
    needed = [detected.columns[name] for name in fields if name in detected.columns]
    present = {name for row in rows for name in row.values}
    if absent := [column for column in needed if column not in present]:
        message = f"no column {', '.join(absent)} for {detected.format} rows, as those of the other files are"
        hint = f"the columns here are {listed(dict.fromkeys(n for row in rows for n in row.values))}"
        raise RecipeError(Problem("column-missing", message, file=rows[0].file, hint=hint))
    later = LaterRows(detected, task, reward)
    for row in rows:
        shaped = later.read(row)
        if section is not None:
            refuse_misfit(shaped, task_named(task), section)
    if len(rows) < _ROWS:  # else the column may have other values below
        later.end()


def _warning(problem: Problem) -> str:
    """The problem as a warning in a plan for another machine."""
    if problem.code != "data-missing":
        return str(problem)
    near = f"; {problem.hint}" if (problem.hint or "").startswith("did you mean") else ""
    return f"{problem.message} ({problem.path}){near}"
