"""Columns that the format of a row does not read: those that belong to what is learned are refused.

A row with an image, a rejected answer or a history would else train without it, and nobody would know.
`columns: {NAME: null}` in the source leaves a column out. What is contained in the columns that are read
(the prompt of a conversation in a column of its own) is not lost, and passes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from launcher.errors import Problem, RecipeError
from launcher.recipe.vocabulary import TASK_FORMATS
from launcher.tasks.rows import FORMAT_FIELDS
from launcher.train.data.masks import OF_ROWS, is_mask_key, masks_row
from launcher.train.data.other_tasks import (
    is_content,
    is_empty,
    is_kto_label,
    is_media,
    is_side,
    plain_name,
)
from launcher.train.data.sources import Row

if TYPE_CHECKING:
    from launcher.train.data.detection import Detected

_ANSWERED = ("instruction", "prompt-completion", "chat")
"""Formats whose rows hold a question and its answer."""
_HISTORY = "earlier turns of the conversation"
_SYSTEM = "a system prompt"
_TOOLS = "tools that the model may call"
_TURNS = "a conversation"
_ASKED = "a part of the prompt"
_ANSWER = "an answer"
_REASONS = "the reasoning before the answer"
_PAIR = "the second text of a pair"
_MASK = "a mask of what is learned"
_CONVERSATION: Mapping[str, str] = {
    **dict.fromkeys(("history", "chat_history", "dialog_history", "previous_turns"), _HISTORY),
    **dict.fromkeys(("system", "system_prompt", "system_message", "system_instruction"), _SYSTEM),
    **dict.fromkeys(("tools", "functions", "available_tools", "tool_calls", "function_calls"), _TOOLS),
    **dict.fromkeys(("messages", "conversations", "conversation", "dialog", "dialogue", "turns"), _TURNS),
    **dict.fromkeys(("prompt", "instruction", "input", "context", "question", "query", "passage"), _ASKED),
    **dict.fromkeys(("completion", "response", "output"), _ANSWER),
    **dict.fromkeys(("reasoning", "reasoning_content", "thinking"), _REASONS),
}  # fmt: skip
_SECOND = frozenset(
    {"text2", "text_2", "text_b", "sentence2", "sentence_2", "sentence_b", "question2", "hypothesis"}
)
_BESIDE_TEXT = frozenset(
    {"prompt", "instruction", "completion", "response", "output", "messages", "conversation", "conversations"}
)
"""Names that make a row with a `text` one of another format, where the text does not hold what they hold."""
_OF_FIELD: Mapping[str, tuple[str, ...]] = {
    _ASKED: ("input", "prompt"),
    _TURNS: ("prompt",),
    _TOOLS: ("tools",),
    _PAIR: ("text_pair",),
}
"""What a column holds -> optional fields that take it."""


def unread_columns(rows: Sequence[Row], detected: Detected) -> tuple[str, ...]:
    """Columns of the rows, in their order, that are not read, as a field or as a mask of messages."""
    read = set(detected.columns.values())
    if detected.format == "chat":
        masks = {name for name in OF_ROWS if any(masks_row(row.values.get(name)) for row in rows)}
        read.update(masks - detected.left_out)
    names = dict.fromkeys(str(name) for row in rows for name in row.values)
    return tuple(name for name in names if name not in read)


def class_labels(rows: Sequence[Row]) -> set[str]:
    """Columns of the name of a KTO label that hold classes or counts: more than yes and no."""
    return {
        str(name)
        for row in rows
        for name, value in row.values.items()
        if is_kto_label(plain_name(str(name)), value=True)
        and not is_empty(value)
        and not is_kto_label(plain_name(str(name)), value)
    }


def refuse_lost(row: Row, fmt: str, columns: Mapping[str, str], left_out: frozenset[str], task: str) -> None:
    """RecipeError for a row with a column that belongs to what is learned and that the format does not read.

    columns: field of the format -> column; left_out: columns that the recipe leaves out.
    """
    read = columns.values()
    for name, value in row.values.items():
        what, meant = _role(name, fmt)
        if not what or name in read or name in left_out or is_empty(value):
            continue
        if what == _MASK:
            if not masks_row(value, str(name)):
                continue
        elif meant in ("", "dpo"):
            if not is_content(value) or _is_number(value):  # a score of the answer, a count of turns
                continue
            # A short rejected answer stands in many a prompt by chance.
            if not is_side(plain_name(name), "rejected") and _is_contained(value, row, read):
                continue
        elif meant == "kto" and not is_kto_label(plain_name(name), value):
            continue
        raise _refused(row, name, what, meant, fmt, columns, task)


@lru_cache(maxsize=4096)
def _role(column: str, fmt: str) -> tuple[str, str]:
    """What a column of this name holds, and the other task it is for ("": the rows' own), or ("", "")."""
    name = plain_name(str(column))
    if fmt != "image" and is_media(name):
        return "images, video or sound", "image-text-to-text"
    if fmt != "preference" and (is_side(name, "chosen") or is_side(name, "rejected")):
        return "an answer of a preference pair", "dpo"
    if fmt in _ANSWERED and is_kto_label(name, True):
        return "a label that says whether the answer is good", "kto"
    is_read = fmt == "chat" and column in OF_ROWS
    if fmt in (*_ANSWERED, "text", "preference") and is_mask_key(column) and not is_read:
        return _MASK, ""
    if fmt == "classification" and name in _SECOND:
        return _PAIR, ""
    if fmt in (*_ANSWERED, "preference", "image") or (fmt == "text" and name in _BESIDE_TEXT):
        return _CONVERSATION.get(name, ""), ""
    return "", ""


def _is_contained(value: Any, row: Row, read: Any) -> bool:
    """Whether all that a value says stands in the columns that are read, too."""
    held = "\n".join(text for column in read for text in _texts(row.values.get(column)))
    return all(text.strip() in held for text in _texts(value))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        parsed = _parsed(value)
        if parsed is None:
            yield value
        else:
            yield from _texts(parsed)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key not in ("role", "from"):
                yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif value is not None:
        yield str(value)


def _is_number(value: Any) -> bool:
    """Whether it is a number as CSV files hold it."""
    try:
        return isinstance(value, str) and float(value) is not None
    except ValueError:
        return False


def _parsed(text: str) -> Any:
    """A list or an object that is written as JSON text; None for any other text."""
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _refused(
    row: Row, name: str, what: str, meant: str, fmt: str, columns: Mapping[str, str], task: str
) -> RecipeError:
    leave = f"`columns: {{{name}: null}}` trains without it"
    message = f"column {name} holds {what}, which {fmt} rows do not read"
    if meant:
        here = f"write `task: {meant}`" if meant in TASK_FORMATS else f"this version has no task {meant}"
        message = f"{message}: such rows are for task {meant}, not for {task}"
        code, hint = "rows-of-another-task", f"{here}; {leave}"
    else:
        optional = FORMAT_FIELDS[fmt][1]
        free = [f for f in _OF_FIELD.get(what, ()) if f in optional and columns.get(f) not in row.values]
        reads = (
            f"`columns: {{{free[0]}: {name}}}`" if free else "a `format_row` hook that puts it into the row"
        )
        code, hint = "column-unread", f"{reads} reads it; {leave}"
    return RecipeError(Problem(code, message, file=row.file, line=row.number, hint=hint))
