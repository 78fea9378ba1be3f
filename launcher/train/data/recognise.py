"""Which format the rows of a source have, and a digest of what the source holds."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from launcher.errors import MachineError, Problem, RecipeError
from launcher.files.safe_files import read_json, write_json
from launcher.machine.probe import cache_root
from launcher.recipe.field_tables import TASK_FORMATS
from launcher.recipe.reward_columns import unread
from launcher.recipe.suggestions import listed
from launcher.recipe.yaml_writer import flow
from launcher.tasks import FORMATS, TASKS, task_named
from launcher.tasks.rows import PREFERENCE, TEXT, FieldKind
from launcher.tasks.sequence_classification import REGRESSION
from launcher.train.data import conll
from launcher.train.data.class_names import declared, of_labels, with_names
from launcher.train.data.encoded import Counts
from launcher.train.data.files import data_suffix, read_as
from launcher.train.data.formats import canonical, is_number
from launcher.train.data.messages import is_conversation
from launcher.train.data.remote import name_of
from launcher.train.data.sources import Detected, Row, bad_row, is_empty, iter_rows, source_files
from launcher.train.data.store import content_key, file_digest
from launcher.train.data.tables import NO_HEADER, may_lack_header
from launcher.train.data.unread import (
    begins_late,
    class_labels,
    foreign_column,
    is_text,
    lost_columns,
    task_kind,
    unread_columns,
    where_to,
    words_of,
)
from launcher.train.hooks import Hooks
from launcher.train.job import Job
from launcher.train.tasks import train_task

PEEK = 100
"""Rows that the format is recognised from."""
_JUDGED_ROWS = 20
"""Rows of a column that begins late by which it is judged: one alone may be an exception."""
_NEAR = 0.8
_TWIN = re.compile(r"[\W_]*(\d+|_[a-zA-Z])$")
"""The number or letter at the end of a column's name that distinguishes two alike names."""
_PROPOSED = 3
"""Most columns that are tried for a field, and most proposals of a message."""
_TEXTS = ("text", "text or texts", "text or messages")
# Words of names of columns that are meant for no field: they describe a row, or precede the
# question.
_NO_FIELD = frozenset({
    "system", "history", "id", "ids", "idx", "uuid", "hash", "index", "url", "count", "length", "len", "num",
    "type", "tokens",
})  # fmt: skip
_OF_TRL = {fmt for task in TASKS if "trl" in task.prepared_by for fmt in task.formats}
"""Formats whose samples trl makes."""
_HOLDS: Mapping[FieldKind, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "text or texts": lambda value: isinstance(value, str | list | tuple),
    "text or messages": lambda value: isinstance(value, str) or is_conversation(value),
    "messages": is_conversation,
    "tools": lambda value: isinstance(value, str | list | tuple | dict),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "label": lambda value: isinstance(value, str | int | float | list | tuple),
    "score": is_number,
    "list": lambda value: isinstance(value, list | tuple),
    "image": lambda value: isinstance(value, str | bytes | dict) or hasattr(value, "save"),
    "images": lambda value: isinstance(value, str | bytes | dict | list | tuple) or hasattr(value, "save"),
}
_KINDS: Mapping[str, FieldKind] = {
    field: kind for one in FORMATS.values() for field, kind in (*one.needed.items(), *one.optional.items())
}
"""Field -> what its column holds; a field means the same in each format that has it."""
_OPTIONAL = frozenset(field for one in FORMATS.values() for field in one.optional)
_LINES = (".jsonl", ".ndjson", ".csv", ".tsv", ".txt")


def detect(
    rows: Sequence[Row],
    asked: str,
    columns: Mapping[str, str | None],
    task: str,
    path: str,
    reward: Sequence[Mapping[str, Any]] = (),
) -> Detected:
    """As `match`; RecipeError also when the rows have a column that is to be learned and is not read.

    reward: entries of the recipe, whose functions read columns.
    """
    detected = match(rows, asked, columns, task, path, reward)
    refuse_lost(rows, detected, task, reward, partial(propose_columns, rows, asked, columns, task, reward))
    if detected.judged is None:
        return detected
    filled = (str(name) for row in rows for name, value in row.values.items() if not is_empty(value))
    return replace(detected, judged=frozenset(filled))


def match(
    rows: Sequence[Row],
    asked: str,
    columns: Mapping[str, str | None],
    task: str,
    path: str,
    reward: Sequence[Mapping[str, Any]] = (),
) -> Detected:
    """Recognise a source's format from its first rows.

    asked: `auto` or a format; columns: field -> column, from the recipe, and name of a column that is left
    out -> None; path: the source's, for errors. RecipeError when no format, or more than one, matches.
    """
    if asked not in ("auto", *TASK_FORMATS[task]):
        message = f"task {task} trains on {', '.join(TASK_FORMATS[task])}, not on {asked} rows"
        raise RecipeError(Problem("format-task", message, file=path, path="format"))
    _refuse_absent(rows, asked, columns, task, path, reward)
    found = _fitting(rows, asked, columns, task)
    if not found:
        raise _unknown(rows, asked, columns, task, path, reward)
    if len(found) > 1:
        names = [detected.format for detected in found]
        seen = listed(_names([row.without(found[0].left_out) for row in rows]))
        message = f"the rows can be read as {' and as '.join(names)}; the columns are {seen}"
        hint = f"write {' or '.join(f'`format: {name}`' for name in names)} in the source"
        raise RecipeError(Problem("format-ambiguous", message, file=path, hint=hint))
    return found[0]


def _fitting(rows: Sequence[Row], asked: str, columns: Mapping[str, str | None], task: str) -> list[Detected]:
    """The formats that the rows can be read as."""
    formats = TASK_FORMATS[task] if asked == "auto" else (asked,)
    left_out = frozenset(name for name, column in columns.items() if column is None)
    renames = {field: column for field, column in columns.items() if column is not None}
    seen = [row.without(left_out) for row in rows]
    named = {fmt: found for fmt in formats if (found := _columns(fmt, seen, renames)) is not None}
    fitting = [fmt for fmt in named if any(_fits(row, fmt, named[fmt]) for row in seen)]
    dropped = {*left_out, *task_named(task).unread_fields}
    made = []
    for name in fitting or list(named):  # a wrong type is reported for its row, which is more precise
        fmt, found = _as_chat(name, named[name], seen, task)
        unused = dropped - set(FORMATS[name].needed)  # a needed field has a column of another name
        kept = {f: column for f, column in found.items() if column not in left_out and f not in unused}
        judged = None if asked == TEXT.name else frozenset[str]()
        made.append(Detected(fmt, kept, left_out, judged))
    return made


def refuse_lost(
    rows: Sequence[Row],
    detected: Detected,
    task: str,
    reward: Sequence[Mapping[str, Any]] = (),
    proposals: Callable[[Collection[str]], Sequence[Mapping[str, str | None]]] = lambda lost: (),
    least: int = 1,
) -> None:
    """RecipeError where rows have columns that belong to what is learned and that nothing reads.

    proposals: makes the `columns` that would read some of them; least: rows of a column from which on it
    is judged whether it holds text.
    """
    for row, (name, what, other) in _foreign_columns(rows, detected):
        message = f"column {name} holds {what}, which {detected.format} rows do not read"
        message += f": such rows are for task {other}, not for {task}"
        hints = [where_to(other), *_trains_without(rows, detected, task, reward, least)]
        raise bad_row(row, message, "; ".join(hints), code="rows-of-another-task")
    lost = lost_columns(rows, detected, task, reward, least)
    if not lost:
        return
    names = f"column{'s' * (len(lost) > 1)} {listed(lost)}"
    message = f"{detected.format} rows do not read {names}, which would not be learned"
    if detected.format == PREFERENCE.name:
        message += ", or may tell which answer is better"
    seen = [row.without(detected.left_out) for row in rows]
    read = set(detected.columns.values())
    found = [one for one in proposals(lost) if read.isdisjoint(name for name in one if one[name] is None)]
    owner = _task_of(seen, lost, detected.format, task)
    hints = [f"{_either(found)} reads {'more of them' if len(lost) > 1 else 'it'}"] if found else []
    if owner is not None:
        message += f": such rows are for task {owner}, not for {task}"
        hints.append(where_to(owner))
    hints = hints or ["a `format_row` hook (`python: FILE`) can put it into what is read"]
    # `columns` may have the name as the key of a field that another column holds.
    fields = [name for name in lost if detected.columns.get(name, name) != name]
    if fields:
        hints.append(f"rename {listed(fields)} in the rows, and leave the new name out with `null`")
    else:
        hints += _trains_without(rows, detected, task, reward, least)
    if detected.format == TEXT.name:
        hints.append("`format: text` trains on the texts alone")
    code = "column-unread" if owner is None else "rows-of-another-task"
    raise bad_row(next(iter(lost.values())), message, "; ".join(hints), code=code)


def _foreign_columns(rows: Sequence[Row], detected: Detected) -> Iterator[tuple[Row, tuple[str, str, str]]]:
    """Rows of another task, each with the `foreign_column` that makes it one."""
    classes = class_labels(rows)
    for row in rows:
        if (found := foreign_column(row, detected, classes)) is not None:
            yield row, found


def _trains_without(
    rows: Sequence[Row], detected: Detected, task: str, reward: Sequence[Mapping[str, Any]], least: int
) -> list[str]:
    """The hint to leave out what is refused; empty where the rows cannot be trained on without it."""
    names: dict[str, None] = {}
    rest = detected
    while more := {column: None for _, (column, _, _) in _foreign_columns(rows, rest)}:
        names |= more
        rest = replace(rest, left_out=rest.left_out | more.keys())
    names |= dict.fromkeys(lost_columns(rows, rest, task, reward, least))
    rest = replace(rest, left_out=rest.left_out | names.keys())
    them = "them" if len(names) > 1 else "it"
    return [f"{_written(names)} trains without {them}"] if _can_read(rows, rest) else []


def _can_read(rows: Sequence[Row], detected: Detected) -> bool:
    try:
        for row in rows:
            read_row(row, detected)
    except RecipeError:
        return False
    return True


def read_row(row: Row, detected: Detected) -> Row:
    """A row in the canonical shape. RecipeError names its file and line, whatever is wrong with it."""
    try:
        return canonical(row, detected)
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        message = f"the row cannot be read: {type(error).__name__}: {error}"
        raise bad_row(row, message, "fix or remove the row") from error


class LaterRows:
    """Reads the rows of a source one by one, and judges columns that begin after the first rows."""

    def __init__(self, detected: Detected, task: str, reward: Sequence[Mapping[str, Any]] = ()) -> None:
        self._detected, self._task, self._reward = detected, task, reward
        self._begun: dict[str, list[Row]] = {}

    def read(self, row: Row) -> Row:
        """The row in the canonical shape. RecipeError where something of it, or of a column, is lost."""
        refuse_lost([row], self._detected, self._task, self._reward, least=_JUDGED_ROWS)
        for name in begins_late(row, self._detected):
            held = self._begun.setdefault(name, [])
            if len(held) < _JUDGED_ROWS:
                held.append(row)
                if len(held) == _JUDGED_ROWS:
                    self._judge(_JUDGED_ROWS)
        return read_row(row, self._detected)

    def end(self) -> None:
        """Judge the columns that fewer rows have. RecipeError names all that are lost."""
        self._judge(1)

    def _judge(self, least: int) -> None:
        rows = {(row.file, row.number): row for held in self._begun.values() for row in held}
        if lost_columns(list(rows.values()), self._detected, self._task, self._reward, least):
            refuse_lost(list(rows.values()), self._detected, self._task, self._reward)


def _task_of(rows: Sequence[Row], lost: Collection[str], fmt: str, task: str) -> str | None:
    """Another task whose rows these are, or that reads a column that is lost; fmt: what the rows are."""
    kinds = (kind.task for row in rows if (kind := task_kind(row.values)) is not None)
    if (other := next(kinds, task)) != task and fmt not in TASK_FORMATS.get(other, ()):
        return other
    for name, formats in TASK_FORMATS.items():
        for one in set(formats) - set(TASK_FORMATS[task]):
            needed = FORMATS[one].needed  # one column alone, a prompt, is in many rows
            found = _columns(one, rows, {}) if len(needed) > 1 else None
            if found and not {found[field] for field in needed}.isdisjoint(lost):
                return name
    return None


def _written(columns: Mapping[str, str | None]) -> str:
    """`columns` as the recipe has it."""
    return f"`columns: {flow(columns)}`"


def _either(proposals: Sequence[Mapping[str, str | None]]) -> str:
    return " or ".join(map(_written, proposals))


def _as_chat(fmt: str, columns: dict[str, str], rows: Sequence[Row], task: str) -> tuple[str, dict[str, str]]:
    """Prompts and completions that are messages are a chat; else format and columns as they are."""
    if fmt == "prompt-completion" and "chat" in TASK_FORMATS[task]:
        held = [columns["prompt"], columns["completion"]]
        if any(all(is_conversation(row.values.get(name)) for name in held) for row in rows):
            return "chat", {**columns, "tools": "tools"}
    return fmt, columns


def _columns(fmt: str, rows: Sequence[Row], renames: Mapping[str, str]) -> dict[str, str] | None:
    """Field -> column of a format, None when no row has all that it needs."""
    needed, fields = FORMATS[fmt].needed, FORMATS[fmt].fields
    if not set(renames) <= set(fields):
        return None
    found = {field: field for field in fields if field not in renames.values()} | dict(renames)
    present = set().union(*(row.values for row in rows))
    for field in FORMATS[fmt].other_names:
        other = None if field in renames or field in present else _second_name(field, fmt, rows)
        if other is not None and other not in renames.values():
            found[field] = other
    if not all(field in found for field in needed):
        return None
    wanted = [found[field] for field in needed]
    return found if any(all(name in row.values for name in wanted) for row in rows) else None


def _second_name(field: str, fmt: str, rows: Sequence[Row]) -> str | None:
    """The column of a field's other name; None where no row has it.

    Of `prompt` it is OpenAI's `input`, messages: a text is what an instruction is about.
    """
    other = FORMATS[fmt].other_names.get(field)
    held = [row.values[other] for row in rows if other in row.values]
    if other == "input":
        held = [value for value in held if isinstance(value, dict) or is_conversation(value)]
    return other if held else None


def _fits(row: Row, fmt: str, columns: Mapping[str, str]) -> bool:
    """Whether the needed fields of a row hold what the format expects."""
    return all(_HOLDS[kind](row.values.get(columns[field])) for field, kind in FORMATS[fmt].needed.items())


def _refuse_absent(
    rows: Sequence[Row],
    asked: str,
    columns: Mapping[str, str | None],
    task: str,
    path: str,
    reward: Sequence[Mapping[str, Any]],
) -> None:
    """Every column that the recipe names must be in the rows; one to leave out may come in a later row."""
    present = _names(rows)
    for field, named in columns.items():
        column = field if named is None else named
        if column in present:
            continue
        fitting = present if named is None else [name for name in present if _suits(name, field, rows)]
        near = difflib.get_close_matches(column, fitting, _PROPOSED)
        lines: list[dict[str, str | None]] = [{field: one} for one in near]
        if named is None:
            lines = [{one: None} for one in near]
        rest = {key: value for key, value in columns.items() if key != field}
        lines = [one for one in lines if _tried(rows, asked, {**rest, **one}, task, reward)][:1]
        if named is None and (not lines or field in _OPTIONAL):
            continue
        hint = f"did you mean {_either(lines)}?" if lines else "correct `columns` of the source"
        role = "which `columns` leaves out" if named is None else f"for {field}"
        message = f"no column {column} ({role}); the columns are {listed(present)}"
        raise RecipeError(Problem("column-missing", message, file=path, hint=hint))


def _suits(name: str, field: str, rows: Sequence[Row]) -> bool:
    """Whether a column can be meant for a field: it is content, and of the field's type in some row."""
    if _NO_FIELD & words_of(name):
        return False
    holds = _HOLDS[_KINDS.get(field, "text")]
    return any(holds(row.values.get(name)) for row in rows)


def _unknown(
    rows: Sequence[Row],
    asked: str,
    columns: Mapping[str, str | None],
    task: str,
    path: str,
    reward: Sequence[Mapping[str, Any]],
) -> RecipeError:
    formats = TASK_FORMATS[task] if asked == "auto" else (asked,)
    renames = {field: column for field, column in columns.items() if column is not None}
    seen = [row.without(columns.keys() - renames.keys()) for row in rows]
    wanted = "; ".join(f"{fmt}: {', '.join(FORMATS[fmt].needed)}" for fmt in formats)
    who = f"task {task}" if asked == "auto" else f"format {asked}"
    message = f"the columns {listed(_names(seen))} do not make the rows that {who} needs (expected {wanted})"
    others = [fmt for fmt in FORMATS if fmt not in formats and _columns(fmt, seen, renames) is not None]
    others.sort(key=lambda fmt: -len(FORMATS[fmt].needed))  # the one that explains most columns
    kinds = [kind for row in seen if (kind := task_kind(row.values)) is not None]
    kind = next((kind for kind in kinds if kind.task != task), None)
    if kind is not None and not (others and others[0] in TASK_FORMATS.get(kind.task, ())):
        message = f"the rows are {kind.what}, for task {kind.task}: {message}"
        return RecipeError(Problem("rows-of-another-task", message, file=path, hint=where_to(kind.task)))
    tasks = [name for name, known in TASK_FORMATS.items() if others and others[0] in known]
    alike = f"they look like {others[0]} rows" if others else ""
    alike += f", which task {' or '.join(tasks)} trains on" if tasks and asked == "auto" else ""
    if kind is None and (proposals := propose_columns(rows, asked, columns, task, reward)):
        hint = f"did you mean {_either(proposals)}?" + (f" {alike}" if alike else "")
    elif "tokens" in formats and path.endswith(".txt"):
        hint = "a CoNLL file is read as such when its name ends in .conll"
    elif any(other.task == task for other in kinds):
        hint = "name their columns with `columns`, or shape them with a `format_row` hook (`python: FILE`)"
    elif alike:
        hint = alike
    else:
        hint = "name the columns with `columns: {field: column}` beside the path, or shape the rows with a "
        hint += "`format_row` hook (`python: FILE`)"
    if may_lack_header(rows[0].file, rows[0].values):
        hint = f"if the first line of {Path(rows[0].file).name} is a row, {NO_HEADER}; else: {hint}"
    return RecipeError(Problem("format-unknown", message, file=path, hint=hint))


def propose_columns(
    rows: Sequence[Row],
    asked: str,
    columns: Mapping[str, str | None],
    task: str,
    reward: Sequence[Mapping[str, Any]] = (),
    lost: Collection[str] = (),
) -> list[dict[str, str | None]]:
    """The `columns` with which the rows were tried and can be read, of the format that needs the fewest.

    lost: columns of which at least one has to be read, where there are any.
    """
    best: list[dict[str, str | None]] = []
    for fmt in TASK_FORMATS[task] if asked == "auto" else (asked,):
        tried = [_tried(rows, asked, made, task, reward) for made in _candidates(fmt, rows, columns)]
        found = [one for one in tried if one and one != columns]
        found = [one for one in found if not lost or not set(lost).isdisjoint(one.values())]
        fewest = min(map(len, found), default=0)
        if found and (not best or fewest < len(best[0])):
            best = [one for one in found if len(one) == fewest]
    return best[:_PROPOSED]


def _candidates(
    fmt: str, rows: Sequence[Row], columns: Mapping[str, str | None]
) -> Iterator[dict[str, str | None]]:
    """`columns` in which each missing field has a column of a like name and its type."""
    needed, optional, related = FORMATS[fmt].needed, FORMATS[fmt].optional, FORMATS[fmt].related
    renames = {field: column for field, column in columns.items() if column is not None}
    if not set(renames) <= set(FORMATS[fmt].fields):
        return
    present = _names(rows)
    used = {*needed, *optional, *columns, *renames.values()}
    free = [name for name in present if name not in used]
    likes: dict[str, list[str]] = {}
    for field in (*needed, *(field for field in optional if field in related)):
        if field in renames or field in present or _second_name(field, fmt, rows) is not None:
            continue
        fitting = [name for name in free if _suits(name, field, rows)]
        near = [name for name in fitting if {field, *related.get(field, ())} & words_of(name)]
        if field in needed:
            near = near or difflib.get_close_matches(field, fitting, 1, _NEAR)
            if not near:
                return
        if near:
            likes[field] = near[:_PROPOSED]
    for chosen in itertools.product(*likes.values()) if likes else ():
        # answer1 and answer2: to train on one of them is not what the rows are for
        stems = {_TWIN.sub("", name) for name in chosen if _TWIN.search(name)}
        twins = {name for name in free if _TWIN.search(name) and _TWIN.sub("", name) in stems}
        if len(set(chosen)) == len(chosen) and twins <= set(chosen):
            yield {**columns, **dict(zip(likes, chosen, strict=True))}


def _tried(
    rows: Sequence[Row],
    asked: str,
    columns: Mapping[str, str | None],
    task: str,
    reward: Sequence[Mapping[str, Any]],
) -> dict[str, str | None] | None:
    """`columns` that read the rows, with `null` for what they do not read; None where they cannot."""
    fitting = _fitting(rows, asked, columns, task)
    if len(fitting) != 1 or next(_foreign_columns(rows, fitting[0]), None) or not _can_read(rows, fitting[0]):
        return None
    detected = fitting[0]
    lost = lost_columns(rows, detected, task, reward)
    named = [column for field, column in columns.items() if column and _KINDS[field] in _TEXTS]
    held = [[row.values.get(name) for row in rows] for name in named]
    # Of several choices in a column of their own, an answer may be the letter alone. And the key of a field
    # cannot leave out a column of its name.
    if lost and not (all(map(is_text, held)) and columns.keys().isdisjoint(lost)):
        return None
    return {**columns, **dict.fromkeys(lost)}


def _names(rows: Sequence[Row]) -> list[str]:
    """Columns of the rows, in their order."""
    return list(dict.fromkeys(str(name) for row in rows for name in row.values))


@dataclass(frozen=True, slots=True)
class Source:
    """One source of the plan."""

    settings: Mapping[str, Any]
    place: str
    """Where the recipe names it: `data.train[0]`."""
    detected: Detected
    digest: str = "stream"
    """Of the files' contents; of id and commit for a data set of the hub."""
    files: tuple[str, ...] = ()
    """Names of its files, as rows give them."""
    unused: tuple[str, ...] = ()
    """Columns that the format does not read."""
    lines: int | None = None
    """Line feeds of its files: about the rows of line formats; None where unknown."""
    classes: tuple[str, ...] = ()
    """Names of whole-number labels, by number, that the data set declares."""

    @property
    def key(self) -> list[Any]:
        """What of the source decides its samples."""
        found = self.detected
        classes = [list(self.classes)] if self.classes else []
        return [self.digest, found.format, dict(found.columns), sorted(found.left_out), *classes]

    def later(self, job: Job) -> LaterRows:
        """What reads its rows, from the first one on."""
        return LaterRows(self.detected, job.task.name, job.reward)

    def form(self, job: Job, row: Row, hooks: Hooks, later: LaterRows) -> Row | None:
        """A raw row in the canonical shape; None for one that the user's `format_row` leaves out."""
        hooked = after_hook(job, row, hooks)
        if hooked is None:
            return None
        formed = later.read(hooked)
        return with_names(formed, self.classes) if self.classes else formed

    def rows(self, job: Job, hooks: Hooks, counts: Counts | None = None) -> Iterator[Row]:
        """Canonical rows; those that `format_row` drops are counted."""
        counts = counts or Counts()
        later = self.later(job)
        for row in raw_rows(job, self.settings):
            counts.read += 1
            formed = self.form(job, row, hooks, later)
            if formed is None:
                counts.dropped["format_row"] += 1
            else:
                yield formed
        if counts.read < self.settings.get("first", inf):  # else the column may have other values below
            later.end()


def raw_rows(job: Job, settings: Mapping[str, Any]) -> Iterator[Row]:
    """Rows as the source holds them; those of a rehearsal are made up."""
    if job.tiny:
        from launcher.train.data.made_up import tiny_rows

        made_up = tiny_rows(settings, job.task.name, job.data.loss_on)
        rehearsed = train_task(job.task.name).rehearsed
        return (replace(row, values=rehearsed(job, row.values)) for row in made_up)
    return iter_rows(settings, job.model.cache_dir)


def after_hook(job: Job, row: Row, hooks: Hooks) -> Row | None:
    """The row that `format_row` makes of a row, None where it leaves it out.

    Not called for the rows of a rehearsal, which have the format that the source would have after it.
    """
    if job.tiny or hooks.format_row is None:
        return row
    values = hooks.format_row(row.values, row.file, row.number)
    return None if values is None else Row(values, row.file, row.number)


def recognise(job: Job, name: str, hooks: Hooks, *, digest: bool = True) -> list[Source]:
    """The sources of `data.NAME` (train, eval), each with the format of its first rows.

    digest: False for rows that are streamed, whose contents are not cached. RecipeError when one holds
    no rows or rows of no known format; MachineError when the hub is out of reach and was never asked.
    """
    sources = []
    given = job.data.train if name == "train" else job.data.eval
    for index, settings in enumerate(given if isinstance(given, list) else []):
        place = f"data.{name}[{index}]"
        if job.tiny:
            source = _detect(job, {**settings, "columns": {}}, place, hooks)
            sources.append(replace(source, digest="tiny", files=(str(settings["path"]),)))
        elif not digest:
            sources.append(_detect(job, settings, place, hooks))
        elif files := source_files(settings):
            sources.append(_digested(job, _detect(job, settings, place, hooks), files))
        else:
            sources.append(_from_hub(job, settings, place, hooks))
    return sources


def _detect(job: Job, settings: Mapping[str, Any], place: str, hooks: Hooks) -> Source:
    hooked = (after_hook(job, row, hooks) for row in raw_rows(job, settings))
    rows = list(itertools.islice((row for row in hooked if row is not None), PEEK))
    path = str(settings["path"])
    if not rows:
        raise RecipeError(Problem("no-rows", "holds no rows", file=path, path=f"{place}.path"))
    detected = detect(rows, settings["format"], settings["columns"], job.task.name, path, job.reward)
    require_packages(detected)
    unused = unread(unread_columns(rows, detected), job.reward)
    return Source(settings, place, detected, unused=unused, classes=_classes(job, settings, detected, hooks))


def _classes(job: Job, settings: Mapping[str, Any], detected: Detected, hooks: Hooks) -> tuple[str, ...]:
    """Names that the data set declares for its labels; none after a hook, whose numbers may be others."""
    is_score = job.data.problem_type == REGRESSION
    if job.tiny or not job.task.classifies or is_score or hooks.format_row is not None:
        return ()
    return of_labels(declared(settings, job.model.cache_dir), detected.columns)


def require_packages(detected: Detected) -> None:
    """MachineError where a package is missing that encodes rows of this format."""
    if detected.format in _OF_TRL and importlib.util.find_spec("trl") is None:
        hint = "pip install 'effilaunch[dpo]'"
        raise MachineError(
            Problem("package-missing", f"{detected.format} rows need the package trl", hint=hint)
        )


def _digested(job: Job, source: Source, files: list[Path]) -> Source:
    """With the digest of the files, in one pass over them.

    Samples of images hold their paths, and their labels may be folder names, so there the path of a
    file counts as well as its content. Elsewhere moved files are found again.
    """
    images = job.task.sees_images or not job.task.reads_tokens
    digests, lines = [], 0
    for file in files:
        content, count = file_digest(file) if "first" not in source.settings else ("", 0)
        # Of CoNLL files, numbers of words were once read as words.
        form = "numbered" if data_suffix(file) in conll.SUFFIXES else read_as(source.settings) or ""
        digests.append(f"{form}{file.absolute() if images else ''}:{content}")
        lines += count
    plain = all(file.suffix in _LINES for file in files)
    names = tuple(map(name_of, files))
    return replace(source, digest=";".join(digests), files=names, lines=lines if plain else None)


def _from_hub(job: Job, settings: Mapping[str, Any], place: str, hooks: Hooks) -> Source:
    """A data set of the hub: what was found when it was asked last serves a machine that cannot ask.

    So a job without a network finds what `prepare` left where there was one.
    """
    asked = {name: settings[name] for name in ("path", "name", "split", "revision", "format", "columns")}
    note = cache_root() / "hub" / f"{content_key({**asked, 'hooks': hooks.digest})}.json"
    name = str(settings["path"])
    try:
        source = _detect(job, settings, place, hooks)
    except MachineError:
        try:
            known = read_json(note)
            left_out, unused = frozenset(known.get("left_out", ())), tuple(known["unused"])
            judged = None if settings["format"] == TEXT.name else frozenset(unused)
            detected = Detected(known["format"], known["columns"], left_out, judged)
            classes = tuple(known.get("classes", ()))
            return Source(settings, place, detected, known["digest"], (name,), unused, classes=classes)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            pass  # no note, a damaged one, or one of another user: as if the hub had never been asked
        raise
    digest = f"hub:{name}:{settings['name']}:{settings['split']}:{_commit(settings)}"
    known = {"format": source.detected.format, "columns": dict(source.detected.columns)}
    known |= {"left_out": sorted(source.detected.left_out), "classes": list(source.classes)}
    with contextlib.suppress(OSError):  # only a machine without a network misses it
        note.parent.mkdir(parents=True, exist_ok=True)
        write_json(note, {**known, "digest": digest, "unused": list(source.unused)})
    return replace(source, digest=digest, files=(name,))


def _commit(settings: Mapping[str, Any]) -> str | None:
    """The commit of a data set of the hub; the revision as given where that cannot be asked."""
    from huggingface_hub import HfApi

    revision: str | None = settings["revision"]
    try:
        return str(HfApi().dataset_info(settings["path"], revision=revision, timeout=10).sha)
    except Exception:  # offline, private, unreachable: reading the rows has reported it
        return revision
