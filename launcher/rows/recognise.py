"""Which format the rows of a source have, and the rows in the shape of that format."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.recipe.field_tables import TASK_FORMATS
from launcher.recipe.suggestions import listed
from launcher.recipe.yaml_writer import flow
from launcher.rows.formats import SHARED, is_number
from launcher.rows.messages import is_conversation
from launcher.rows.own_formats import OWN_FORMATS
from launcher.rows.sources import Detected, Row, bad_row, is_empty
from launcher.rows.tables import NO_HEADER, may_lack_header
from launcher.rows.unread import (
    begins_late,
    class_labels,
    foreign_column,
    is_text,
    lost_columns,
    task_kind,
    where_to,
    words_of,
)
from launcher.tasks import FORMATS, task_named
from launcher.tasks.rows import PREFERENCE, TEXT, FieldKind
from launcher.tasks.task import Task

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


def canonical(row: Row, detected: Detected) -> Row:
    """The row's values in the canonical shape of its format. RecipeError names file and line."""
    left_out = detected.left_out.difference(detected.columns.values())
    shape = SHARED.get(detected.format) or OWN_FORMATS[detected.format].shape
    return Row(shape(row.without(left_out), detected.columns), row.file, row.number)


def read_row(row: Row, detected: Detected) -> Row:
    """A row in the canonical shape. RecipeError names its file and line, whatever is wrong with it."""
    try:
        return canonical(row, detected)
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        message = f"the row cannot be read: {type(error).__name__}: {error}"
        raise bad_row(row, message, "fix or remove the row") from error


def refuse_misfit(row: Row, task: Task, section: Any) -> None:
    """RecipeError for a canonical row that the task's own section does not take."""
    if problem := task.row_misfit(row.values, section):
        raise RecipeError(replace(problem, file=row.file, line=row.number))


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
