"""Survey data for `init`: the goals that its rows suit, their number and length.

Uses the readers of the worker, which need the standard library, and pyarrow for Parquet.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.errors import MachineError, Problem, RecipeError
from launcher.files.safe_files import expanded
from launcher.planner.starting import GOALS, Rows, task_of
from launcher.recipe.data_paths import is_hub_id, is_package, is_url
from launcher.recipe.suggestions import listed
from launcher.rows.class_names import collect_labels
from launcher.rows.formats import every_text
from launcher.rows.image_rows import has_image
from launcher.rows.recognise import PEEK, LaterRows, detect, match, propose_columns
from launcher.rows.sources import Detected, Row, iter_rows
from launcher.rows.targets import PROBLEM_TYPES
from launcher.rows.unread import lost_columns
from launcher.tasks import FORMATS, TASKS, task_named
from launcher.tasks.causal_lm import CausalLM
from launcher.tasks.grpo import KEY
from launcher.tasks.rows import TEXT
from launcher.tasks.sequence_classification import problem_type_of

_MOST = 200_000
"""Largest number of rows that are read; the others are read when the run starts."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The rows of a data path, independent of a goal."""

    path: str
    """Absolute path, part of a package, or hub id of a dataset."""
    first: tuple[Row, ...]
    """Empty for datasets of the hub, which are not read."""
    count: int | None
    more: bool

    @property
    def columns(self) -> str:
        return listed(dict.fromkeys(str(name) for row in self.first for name in row.values))


def look(path: str) -> Sight:
    """Read the rows of a path, file or hub id.

    RecipeError names file and line of what is broken, or says that there are none; MachineError where a
    package is missing that reads such files.
    """
    if is_url(path):
        message, hint = "a URL is not read", "download it, or name a data set of the hub: organisation/name"
        raise RecipeError(Problem("unsupported", message, file=path, hint=hint))
    if not is_package(path) and is_hub_id(path, Path.cwd()):
        return Sight(path, (), None, more=False)
    if not is_package(path):
        path = str(expanded(path).absolute())
    rows = _rows(path)
    first = tuple(itertools.islice(rows, PEEK))
    count = len(first) + sum(1 for _ in itertools.islice(rows, _MOST - len(first)))
    return Sight(path, first, count, more=next(rows, None) is not None)


def _rows(path: str) -> Iterator[Row]:
    try:
        yield from iter_rows({"path": path})
    except ModuleNotFoundError as absent:
        message = f"reading it needs the package {absent.name}"
        hint = f"pip install {absent.name}, or write the rows as .jsonl"
        raise MachineError(Problem("package-missing", message, file=path, hint=hint)) from None
    except (OSError, ValueError) as error:  # e.g. a name that no file system would take
        message = getattr(error, "strerror", None) or str(error)
        raise RecipeError(Problem("data-unreadable", f"cannot be read: {message}", file=path)) from None


def goals_of(sight: Sight, columns: Mapping[str, str | None]) -> list[str]:
    """The goals that the rows suit, the most specific first."""
    fitting = {
        goal: max(len(FORMATS[fmt].needed) for fmt in found)
        for goal in GOALS
        if (found := _formats(sight, goal, columns)) and _suits(sight, goal, found)
    }
    return sorted(fitting, key=lambda goal: (goal == "text", not _with_images(goal), -fitting[goal]))


def _with_images(goal: str) -> bool:
    """Whether the goal is learned from images with texts."""
    return any(goal in task.goals and task.sees_images for task in TASKS)


def _suits(sight: Sight, goal: str, formats: Mapping[str, Detected]) -> bool:
    """Whether the rows have what is particular to a format: of images with texts, an image."""
    marks = [task.goal_columns for task in TASKS if goal in task.goals and task.goal_columns]
    names = {str(name) for row in sight.first for name in row.values}
    if marks and not any(names & set(columns) for columns in marks):
        return False
    return any(
        "images" not in detected.columns or has_image(row, detected.columns)
        for detected in formats.values()
        if not _loses_text(sight, detected)
        for row in sight.first
    )


def _loses_text(sight: Sight, detected: Detected) -> bool:
    """Whether rows of texts have a column that `format: auto` would not leave out."""
    asked = replace(detected, judged=frozenset())
    return detected.format == TEXT.name and bool(lost_columns(sight.first, asked, CausalLM.name, ()))


def _formats(sight: Sight, goal: str, columns: Mapping[str, str | None]) -> dict[str, Detected]:
    """The formats that fit the rows."""
    asked = (*GOALS[goal], *(("prompt-completion",) if goal == "chat" else ()))  # of messages on both sides
    found = {}
    for fmt in asked:
        try:
            detected = match(sight.first, fmt, columns, task_of(goal, fmt, ()), sight.path)
        except RecipeError:
            continue
        if detected.format in GOALS[goal]:
            found[fmt] = detected
    return found


def suggestion(sight: Sight, goal: str) -> dict[str, str | None]:
    """Columns that make the rows fit the goal, tried on them; None: the column is left out."""
    tasks = {fmt: task_of(goal, fmt, ()) for fmt in GOALS[goal]}
    made = [
        proposal
        for fmt, task in tasks.items()
        for proposal in propose_columns(sight.first, fmt, {}, task, _first_reward(sight, task))
    ]
    return min(made, key=len, default={})


def flags_of(columns: Mapping[str, str | None]) -> list[str]:
    """Columns as `--columns` takes them: FIELD=COLUMN, NAME= for one that is left out; quoted for a shell."""
    return [shlex.quote(f"{field}={column or ''}") for field, column in columns.items()]


def _first_reward(sight: Sight, task: str) -> Sequence[Mapping[str, Any]]:
    """The entries of `reward:` that the first recipe has."""
    values: dict[str, list[object]] = {}
    for row in sight.first:
        for name, value in row.values.items():
            values.setdefault(name, []).append(value)
    entries, _ = task_named(task).first_keys(values).get(KEY, ((), ""))
    return entries if isinstance(entries, list) else ()


def rows_for(sight: Sight, goal: str, columns: Mapping[str, str | None]) -> Rows:
    """The rows as a recipe names them, each of them checked.

    RecipeError `goal-rows` where they are for something else, `goal-columns` where their columns have to be
    named, `format-ambiguous` where they can be read in two ways; else with the line of the row that is wrong.
    """
    if sight.count is None:
        fmt = GOALS[goal][0] if len(GOALS[goal]) == 1 else "auto"
        return Rows(sight.path, fmt, columns, None, None)
    formats = _formats(sight, goal, columns)
    if not formats:
        raise _misfit(sight, goal, columns)
    if len(formats) > 1:
        message = f"the rows can be read as {' and as '.join(formats)}; the columns are {sight.columns}"
        hint = "remove the columns that are not for training, or name the fields: --columns FIELD=COLUMN"
        raise RecipeError(Problem("format-ambiguous", message, file=sight.path, hint=hint))
    ((fmt, _),) = formats.items()
    task = task_of(goal, fmt, ())
    detected = detect(sight.first, fmt, columns, task, sight.path, _first_reward(sight, task))
    longest = _check_all(sight, detected, task)
    return Rows(sight.path, fmt, columns, sight.count, longest, sight.more, _first(sight, detected))


def _first(sight: Sight, detected: Detected) -> dict[str, list[object]]:
    """Field of the format, and each other column -> the values in the first rows."""
    fields = {column: field for field, column in detected.columns.items()}
    found: dict[str, list[object]] = {}
    for row in sight.first:
        for name, value in row.values.items():
            found.setdefault(fields.get(name, str(name)), []).append(value)
    return found


def _misfit(sight: Sight, goal: str, columns: Mapping[str, str | None]) -> RecipeError:
    """The error for rows that do not fit the goal."""
    wanted = "; or ".join(", ".join(FORMATS[fmt].needed) for fmt in GOALS[goal])
    if others := goals_of(sight, columns):
        message = f"its rows are for goal {' or '.join(others)}; goal {goal} needs the columns {wanted}"
        return RecipeError(Problem("goal-rows", message, file=sight.path, hint=f"--goal {others[0]}"))
    message = f"the columns {sight.columns} do not make rows for goal {goal}, which needs {wanted}"
    named = suggestion(sight, goal)
    words = " ".join(f"--columns {word}" for word in flags_of(named))
    hint = f"did you mean {words}?" if named else "name them: --columns FIELD=COLUMN, once for each field"
    return RecipeError(Problem("goal-columns", message, file=sight.path, hint=hint))


def _check_all(sight: Sight, detected: Detected, task: str) -> list[str] | None:
    """Check every row and return the texts of the longest one; None for images alone."""
    rows = itertools.islice(_rows(sight.path), _MOST)
    if detected.format == "image":
        collect_labels(
            Row({"label": r.values.get(detected.columns["label"])}, r.file, r.number) for r in rows
        )
        return None
    later = LaterRows(detected, task, _first_reward(sight, task))
    longest, most = list[str](), 0

    def shaped() -> Iterator[Row]:
        nonlocal longest, most
        for row in rows:
            made = later.read(row)
            texts = {field: text for field, text in made.values.items() if field not in ("label", "labels")}
            if detected.format == "preference":  # of two answers, the longer one counts
                texts["rejected"] = max(texts["rejected"], texts.pop("chosen"), key=_size)
            if (size := _size(texts)) > most:
                longest, most = list(every_text(texts)), size
            yield made
        later.end()

    if detected.format == "classification":
        labels = _first(sight, detected).get("label", [])
        PROBLEM_TYPES[problem_type_of(labels)].names(shaped())
    else:
        for _ in shaped():
            pass
    return longest


def _size(value: Any) -> int:
    """UTF-8 bytes of all texts in a value."""
    return sum(len(text.encode("utf-8", "replace")) for text in every_text(value))


def rows_words(rows: Rows) -> str:
    """What was found, for people: `1,204 rows, chat messages, the longest about 1,900 tokens …`."""
    if rows.count is None:
        return f"{rows.path} is on the hub, and is read when the run begins"
    words = f"{'more than ' if rows.more else ''}{rows.count:,} row{'' if rows.count == 1 else 's'}"
    words += f", {FORMATS[rows.format].what}"
    if rows.longest_tokens is None:
        return words
    tokens = rows.longest_tokens
    shown = tokens if tokens < 100 else round(tokens, 1 - len(str(tokens)))
    return f"{words}, the longest about {shown:,} tokens {rows.tokens_by}"
