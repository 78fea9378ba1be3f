"""Check the first rows of a source of local files, as `prepare` checks all of them."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.recipe.keys import has_problem_types
from launcher.recipe.reward_columns import unread as without_readers
from launcher.recipe.schema import DataSource, Recipe
from launcher.recipe.suggestions import listed
from launcher.rows.files import data_suffix, read_file
from launcher.rows.image_rows import refuse_texts
from launcher.rows.lines import CutOffError
from launcher.rows.recognise import PEEK, LaterRows, detect, refuse_misfit
from launcher.rows.sources import Detected, Row, image_row, is_image, source_files, source_lines
from launcher.rows.unread import unread_columns
from launcher.tasks import FORMATS, task_named
from launcher.tasks.sequence_classification import SINGLE

_ROWS = 100
_BYTES = 4 << 20
"""Of each file."""
_FILES = 16
"""Of each source."""
_WRAPPED = 40
"""Characters from which on a line may be one of wrapped text."""
_ENDS = (".", "!", "?", ":", ";", '"', ")")
_COLUMNAR = (".parquet", ".arrow")


def check_source(
    source: DataSource, place: str, recipe: Recipe, hooked: bool, wrong: list[Problem], unread: list[str]
) -> tuple[list[Row], bool]:
    """Check the first rows of a source whose path exists; adds to `wrong` and `unread` (see `Looked`).

    place: `data.train[0]`; hooked: a `format_row` changes the rows, so their columns are not checked.
    Returns the canonical rows, none where one is wrong, and whether they are all of the source.
    """
    settings, task = source.model_dump(), recipe.task
    try:
        files = source_files(settings)
        lines = source_lines(settings, offer=not isinstance(recipe.data.eval, list))
        if len(lines) > 1:  # some files are left
            unread.append(f"{place}: {'; '.join(lines)}")
            if not place.startswith("data.train") and source in recipe.data.train:
                unread.append(f"{place}: these files are trained on, too; set `split` beside `path`")
        if len(files) == 1 and files[0].stat().st_size == 0:
            raise RecipeError(Problem("no-rows", "is empty", file=source.path, hint="give a file with rows"))
        looks = [_first_rows(file, settings) for file in files[:_FILES]]
        by_file = [rows for rows, _ in looks if rows]
        if not by_file or hooked:
            return [], False
        if line := _wrapped(by_file, settings):
            unread.append(f"{place}: {line}")
        peek = list(itertools.islice(itertools.chain.from_iterable(by_file), PEEK))  # as `prepare` does
        reward = [entry.model_dump() for entry in recipe.reward]
        detected = detect(peek, settings["format"], settings["columns"], task, source.path, reward)
        if names := without_readers(unread_columns(peek, detected), reward):
            unread.append(f"columns that are not read: {listed(names)} ({place})")
        section = _own_section(recipe)
        if problem := task_named(task).misfit(detected.format, section):
            if problem not in wrong:  # of another source
                wrong.append(problem)
            return [], False
        read = [row for rows in by_file for row in _check_rows(rows, detected, task, section, reward)]
        whole = all(all_read for _, all_read in looks) and len(files) <= _FILES
        if whole and task_named(task).sees_images and not any(row.values["images"] for row in read):
            refuse_texts(settings, "path")
        return read, whole
    except RecipeError as error:
        wrong.extend(replace(p, path=f"{place}.{p.path or 'path'}") for p in error.problems)
    except (OSError, ValueError) as error:  # a folder that may not be listed, a name that no file can have
        message = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        wrong.append(Problem("data-unreadable", message, file=source.path, path=f"{place}.path"))
    return [], False


def check_labels(read: Sequence[tuple[Sequence[Row], bool]], recipe: Recipe) -> list[Problem]:
    """Problems of the labels of training rows; of all of them together only where they were all read.

    read: of each source, as `check_source` returns it.
    """
    rows = [row for part, _ in read for row in part]
    if not rows or not task_named(recipe.task).classifies:
        return []
    from launcher.rows.targets import label_names

    kind = (recipe.data.problem_type or SINGLE) if has_problem_types(task_named(recipe.task)) else None
    try:
        label_names(kind, rows)
    except RecipeError as error:
        whole = all(all_read for _, all_read in read)
        found = [problem for problem in error.problems if whole or problem.line is not None]
        return [replace(problem, path=problem.path or "data.train") for problem in found]
    return []


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


def _first_rows(file: Path, source: Mapping[str, Any]) -> tuple[list[Row], bool]:
    """The first rows of a file, and whether they are all; none if reading them is too expensive."""
    if is_image(file):
        return [image_row(file)], True
    if data_suffix(file) in _COLUMNAR and (file.suffix.lower() not in _COLUMNAR or not _has_pyarrow()):
        return [], False  # a compressed file would be unpacked completely
    rows: list[Row] = []
    try:
        for number, values in itertools.islice(read_file(file, None, _BYTES, source), _ROWS):
            rows.append(Row(values, str(file), number))
    except (CutOffError, ModuleNotFoundError, MemoryError):
        return rows, False
    # Of whole numbers, Parquet and Arrow files may have the names in their schema.
    return rows, len(rows) < _ROWS and data_suffix(file) not in _COLUMNAR


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
) -> list[Row]:
    """The rows in the canonical shape. Raises the RecipeError that `prepare` would raise for one of them."""
    fields = FORMATS[detected.format].needed
    needed = [detected.columns[name] for name in fields if name in detected.columns]
    present = {name for row in rows for name in row.values}
    if absent := [column for column in needed if column not in present]:
        message = f"no column {', '.join(absent)} for {detected.format} rows, as those of the other files are"
        hint = f"the columns here are {listed(dict.fromkeys(n for row in rows for n in row.values))}"
        raise RecipeError(Problem("column-missing", message, file=rows[0].file, hint=hint))
    later = LaterRows(detected, task, reward)
    read = []
    for row in rows:
        read.append(later.read(row))
        if section is not None:
            refuse_misfit(read[-1], task_named(task), section)
    if len(rows) < _ROWS:  # else the column may have other values below
        later.end()
    return read
