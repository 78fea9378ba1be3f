"""Which format rows have: by the fields that are there, their types, and what the task can train on."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.errors import MachineError, Problem, RecipeError
from launcher.recipe.vocabulary import FORMAT_FIELDS, TASK_FORMATS
from launcher.train.data.messages import is_conversation
from launcher.train.data.sources import Row

_SHAREGPT_COLUMN = "conversations"
_NEAR = 0.75
# Words of column names that often hold a field. They only make the hint of an error: nothing is guessed.
_RELATED: Mapping[str, frozenset[str]] = {
    "text": frozenset({"content", "sentence", "document", "body", "code", "review"}),
    "label": frozenset({"labels", "class", "category", "target"}),
    "instruction": frozenset({"prompt", "question", "query"}),
    "output": frozenset({"response", "answer", "completion", "solution"}),
    "prompt": frozenset({"question", "query", "instruction", "problem", "source"}),
    "completion": frozenset({"response", "answer", "output", "solution", "target", "reply"}),
    "messages": frozenset({"conversation", "dialog", "dialogue", "chat", "turns"}),
    "chosen": frozenset({"preferred", "accepted", "better"}),
    "rejected": frozenset({"dispreferred", "refused", "worse"}),
    "image": frozenset({"img", "picture", "photo", "file"}),
}


@dataclass(frozen=True, slots=True)
class Detected:
    """The format of a source's rows."""

    format: str
    columns: Mapping[str, str]
    """Field of the format -> column of the file, also for optional fields that no row may have.

    A chat whose rows are a prompt and a completion, both messages, has these instead of `messages`.
    """


def detect(rows: Sequence[Row], asked: str, columns: Mapping[str, str], task: str, path: str) -> Detected:
    """Recognise a source's format from its first rows.

    asked: `auto` or a format; columns: field -> column, from the recipe; path: the source's, for errors.
    RecipeError when no format, or more than one, matches; MachineError when the rows need trl.
    """
    _refuse_absent(rows, columns, path)
    formats = TASK_FORMATS[task] if asked == "auto" else (asked,)
    if asked not in ("auto", *TASK_FORMATS[task]):
        message = f"task {task} trains on {', '.join(TASK_FORMATS[task])}, not on {asked} rows"
        raise RecipeError(Problem("format-task", message, file=path, path="format"))
    named = {fmt: found for fmt in formats if (found := _columns(fmt, rows, columns)) is not None}
    fitting = [fmt for fmt in named if any(_fits(row, fmt, named[fmt]) for row in rows)]
    chosen = fitting or list(named)  # a wrong type is reported for its row, which says more
    if not chosen:
        raise _unknown(rows, asked, columns, task, path)
    if len(chosen) > 1:
        raise RecipeError(
            Problem(
                "format-ambiguous",
                f"the rows can be read as {' and as '.join(chosen)}; the columns are {_listed(rows)}",
                file=path,
                hint=f"write `format: {chosen[0]}` (or another of these) beside the path",
            )
        )
    return _checked(chosen[0], named[chosen[0]], rows, task)


def _checked(fmt: str, columns: Mapping[str, str], rows: Sequence[Row], task: str) -> Detected:
    if fmt == "prompt-completion" and "chat" in TASK_FORMATS[task]:
        held = [columns["prompt"], columns["completion"]]
        if any(all(is_conversation(row.values.get(name)) for name in held) for row in rows):
            return Detected("chat", {**columns, "tools": "tools"})
    if fmt == "preference" and importlib.util.find_spec("trl") is None:
        hint = "pip install 'effilaunch[dpo]'"
        raise MachineError(Problem("package-missing", "preference rows need the package trl", hint=hint))
    return Detected(fmt, columns)


def _columns(fmt: str, rows: Sequence[Row], renames: Mapping[str, str]) -> dict[str, str] | None:
    """Field -> column of a format, None when no row has all that it needs."""
    needed, optional = FORMAT_FIELDS[fmt]
    if not set(renames) <= {*needed, *optional}:
        return None
    found = {field: field for field in (*needed, *optional) if field not in renames.values()} | dict(renames)
    present = set().union(*(row.values for row in rows))
    if fmt == "chat" and "messages" not in renames and "messages" not in present:
        found["messages"] = _SHAREGPT_COLUMN
    if not all(field in found for field in needed):
        return None
    wanted = [found[field] for field in needed]
    return found if any(all(name in row.values for name in wanted) for row in rows) else None


def _fits(row: Row, fmt: str, columns: Mapping[str, str]) -> bool:
    """Whether the needed fields of a row hold what the format expects."""
    return all(_TYPES[field](row.values.get(columns[field])) for field in FORMAT_FIELDS[fmt][0])


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_text_or_turns(value: Any) -> bool:
    return isinstance(value, str | dict) or is_conversation(value)


def _is_label(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _is_picture(value: Any) -> bool:
    return isinstance(value, str | bytes | dict) or hasattr(value, "save")


_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "text": _is_text,
    "instruction": _is_text,
    "output": _is_text,
    "prompt": _is_text_or_turns,
    "completion": _is_text_or_turns,
    "messages": is_conversation,
    "chosen": _is_text_or_turns,
    "rejected": _is_text_or_turns,
    "label": _is_label,
    "image": _is_picture,
}


def _refuse_absent(rows: Sequence[Row], columns: Mapping[str, str], path: str) -> None:
    """Every column that the recipe names must be in the rows."""
    present = _names(rows)
    for field, column in columns.items():
        if column in present:
            continue
        near = difflib.get_close_matches(column, present, 1)
        hint = f"did you mean `columns: {{{field}: {near[0]}}}`?" if near else "mend `columns` of the source"
        message = f"no column {column} (for {field}); the columns are {_listed(rows)}"
        raise RecipeError(Problem("column-missing", message, file=path, hint=hint))


def _unknown(
    rows: Sequence[Row], asked: str, columns: Mapping[str, str], task: str, path: str
) -> RecipeError:
    formats = TASK_FORMATS[task] if asked == "auto" else (asked,)
    wanted = "; ".join(f"{fmt}: {', '.join(FORMAT_FIELDS[fmt][0])}" for fmt in formats)
    who = f"task {task}" if asked == "auto" else f"format {asked}"
    message = f"the columns {_listed(rows)} do not make the rows that {who} needs (expected {wanted})"
    others = [fmt for fmt in FORMAT_FIELDS if fmt not in formats and _columns(fmt, rows, columns) is not None]
    suggestions = [s for fmt in formats if (s := suggest_columns(fmt, rows, columns)) is not None]
    if suggestions:
        fewest = min(suggestions, key=len)
        named = ", ".join(f"{field}: {column}" for field, column in fewest.items())
        hint = f"did you mean `columns: {{{named}}}`?"
    elif others and asked != "auto":
        hint = f"they look like {others[0]} rows"
    elif others:
        tasks = [name for name, known in TASK_FORMATS.items() if others[0] in known]
        hint = f"they look like {others[0]} rows, which task {' or '.join(tasks)} trains on"
    else:
        hint = "name the columns with `columns: {field: column}` beside the path"
    return RecipeError(Problem("format-unknown", message, file=path, hint=hint))


def suggest_columns(fmt: str, rows: Sequence[Row], columns: Mapping[str, str]) -> dict[str, str] | None:
    """What to write as `columns` when each missing field has a column of a like name."""
    needed, optional = FORMAT_FIELDS[fmt]
    if not set(columns) <= {*needed, *optional}:
        return None
    present, renames = _names(rows), dict(columns)
    free = [name for name in present if name not in {*needed, *optional, *columns.values()}]
    for field in needed:
        if field in renames or field in present:
            continue
        near = difflib.get_close_matches(field, free, 1, _NEAR) or [
            name for name in free if _RELATED[field] & set(re.split(r"[^a-z]+", name.lower()))
        ]
        if not near:
            return None
        renames[field] = near[0]
        free.remove(near[0])
    return renames


def _names(rows: Sequence[Row]) -> list[str]:
    """Columns of the rows, in their order."""
    return list(dict.fromkeys(str(name) for row in rows for name in row.values))


def _listed(rows: Sequence[Row]) -> str:
    return ", ".join(_names(rows)) or "none"
