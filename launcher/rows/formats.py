"""Rows in one shape per format, whatever their columns are called, and the labels of classes.

text {text} · instruction and prompt-completion {prompt, completion} · chat {messages, tools}, and train where
the row masks messages · preference {prompt, chosen, rejected}, all text or all messages, and margin. The
formats of one task are in own_formats.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from launcher.recipe.suggestions import listed
from launcher.rows.class_names import DECIMAL, REGRESSION_HINT
from launcher.rows.messages import (
    TRAIN,
    Message,
    is_conversation,
    messages_of,
    refuse_masks,
    row_flags,
    tools_of,
)
from launcher.rows.sources import Row, bad_row, kind_of

Shaper = Callable[[Row, Mapping[str, str]], dict[str, Any]]
"""A row and the column of each field -> the canonical values. RecipeError names file and line."""


def instruction_prompt(instruction: str, given: str | None = None) -> str:
    """The prompt of an instruction, with the input it is about; the answer follows it directly."""
    parts = [f"### Instruction:\n{instruction}"]
    if given:
        parts.append(f"### Input:\n{given}")
    parts.append("### Response:\n")
    return "\n\n".join(parts)


def every_text(value: Any) -> Iterator[str]:
    """The texts in a value of a row, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from every_text(item)


def value_in(row: Row, column: str) -> Any:
    """What a column holds; RecipeError where the row has none."""
    if column not in row.values:
        raise bad_row(row, f"the row has no column {column}; it has {listed(row.values)}")
    return row.values[column]


def text_in(row: Row, column: str) -> str:
    """The text in a column; RecipeError for anything else."""
    value = row.values.get(column)
    if type(value) is not str:
        value = value_in(row, column)
        message = f"column {column} holds {kind_of(value)}, expected text"
        raise bad_row(row, message, "correct or delete the row")
    return value


def is_number(value: Any) -> bool:
    """Whether it is a number, or the text of one as CSV files hold it."""
    if isinstance(value, str):
        return DECIMAL.fullmatch(value.strip()) is not None
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number_in(row: Row, column: str) -> float:
    """The number in a column; RecipeError for anything else."""
    value = value_in(row, column)
    if not is_number(value):
        shown = repr(value) if isinstance(value, int | float) else kind_of(value)
        raise bad_row(row, f"column {column} holds {shown}, expected a number", "correct or delete the row")
    return float(value)


def optional_text_in(row: Row, column: str | None) -> str | None:
    """The text in a column that a row may leave out."""
    if column is None or row.values.get(column) is None:
        return None
    return text_in(row, column)


def _pair(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    return {"prompt": text_in(row, columns["prompt"]), "completion": text_in(row, columns["completion"])}


def _instruction(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    given = optional_text_in(row, columns.get("input"))
    prompt = instruction_prompt(text_in(row, columns["instruction"]), given)
    return {"prompt": prompt, "completion": text_in(row, columns["output"])}


def _chat(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    flags = row_flags(row)
    if "messages" in columns:
        value_in(row, columns["messages"])
        messages = messages_of(row, columns["messages"], flags)
    else:
        if flags is not None:
            message = "a column masks messages, and the messages are in two columns"
            raise bad_row(row, message, 'write "train": false into the messages, or use one column')
        messages = [turn for field in ("prompt", "completion") for turn in _turns(row, columns[field])]
    train = [message.pop(TRAIN, None) for message in messages]
    shaped = {"messages": messages, "tools": tools_of(row, columns["tools"]) if "tools" in columns else None}
    return shaped if train.count(None) == len(train) else {**shaped, TRAIN: train}


def _turns(row: Row, column: str) -> list[Message]:
    value_in(row, column)
    return messages_of(row, column)


def _preference(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    asked = row.values.get(columns.get("prompt", ""))
    if isinstance(asked, Mapping) and "messages" in asked:  # OpenAI's `input`: messages and their tools
        said = {columns["prompt"]: asked["messages"]}
        if asked.get("tools") and "tools" in columns:
            said[columns["tools"]] = asked["tools"]
        row = Row({**row.values, **said}, row.file, row.number)
    margin = columns.get("margin")
    held = None if margin is None else row.values.get(margin)
    shaped = _pair_of_answers(row, columns)
    return shaped if held is None else {**shaped, "margin": _number(row, str(margin), held)}


def _number(row: Row, column: str, held: Any) -> float:
    """A finite number, which may be text as CSV files have it."""
    try:
        number = math.nan if isinstance(held, bool) else float(held)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        shown = repr(held) if isinstance(held, str | int | float) else kind_of(held)
        raise bad_row(row, f"column {column} holds {shown}, expected a finite number", "correct the row")
    return number


def _pair_of_answers(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    sides = [columns["chosen"], columns["rejected"]]
    given = columns.get("prompt")
    prompt = None if given is None else row.values.get(given)
    for column in sides:
        if value_in(row, column) is None:
            raise bad_row(row, f"column {column} holds nothing, expected an answer", "delete the row")
    are_text = {isinstance(row.values[column], str) for column in sides}
    if len(are_text) > 1:
        raise bad_row(row, f"of {sides[0]} and {sides[1]}, one is text and one is messages")
    if are_text == {False} or is_conversation(prompt):
        shaped = _preference_of_messages(row, sides, given if prompt is not None else None)
        refuse_masks(row, shaped)
        tools = tools_of(row, columns["tools"]) if "tools" in columns else None
        return shaped if tools is None else {**shaped, "tools": tools}
    chosen, rejected = (text_in(row, column) for column in sides)
    if prompt is None:
        return _shared_prompt(row, chosen, rejected)
    assert given is not None
    return {"prompt": text_in(row, given), "chosen": chosen, "rejected": rejected}


def _preference_of_messages(row: Row, sides: Sequence[str], given: str | None) -> dict[str, Any]:
    chosen, rejected = (_answer(row, column) for column in sides)
    prompt = None if given is None else row.values[given]
    turns: list[Message] = []
    if given is not None and is_conversation(prompt):
        turns = messages_of(row, given)
        chosen, rejected = (after_prompt(turns, side) for side in (chosen, rejected))
        if not (chosen and rejected):
            raise bad_row(row, "nothing follows the prompt in chosen or rejected", "delete the row")
    elif given is not None and not (chosen[0] == rejected[0] and len(chosen) > 1 and len(rejected) > 1):
        turns = [{"role": "user", "content": text_in(row, given)}]
    shaped = {"prompt": turns, "chosen": chosen, "rejected": rejected}
    if not turns or (opening(chosen) and chosen[0] == rejected[0]):
        shared = _shared_prompt(row, chosen, rejected)
        if given is not None and not turns:
            refuse_outside(row, given, shared["prompt"], sides, f"columns: {{{given}: null}}")
        shaped = {**shared, "prompt": turns + shared["prompt"]}
    for column, side in zip(sides, ("chosen", "rejected"), strict=True):
        if opening(shaped[side]):
            role = shaped[side][0]["role"]
            message = f"the answer in {column} begins with a message of role {role}, which would be learned"
            raise bad_row(
                row, message, "begin both answers with the same messages, or put them into the prompt"
            )
    return shaped


def after_prompt(prompt: Sequence[Message], turns: list[Message]) -> list[Message]:
    """Turns without the prompt that whole conversations hold a second time."""
    return turns[len(prompt) :] if turns[: len(prompt)] == list(prompt) else turns


def opening(turns: Sequence[Message]) -> list[Message]:
    """The turns before the first one of the assistant."""
    return list(itertools.takewhile(lambda turn: turn["role"] != "assistant", turns))


def refuse_outside(
    row: Row, column: str, prompt: Sequence[Message], answers: Sequence[str], without: str
) -> None:
    """RecipeError where the text of a column is not in the prompt that the answers themselves begin with.

    without: keys of the source with which it is not read.
    """
    if text_in(row, column).strip() not in "\n".join(str(turn.get("content")) for turn in prompt):
        message = (
            f"column {column} holds a text that the messages before the answer in {listed(answers)} lack"
        )
        hint = f"put it into these messages, or `{without}` trains without it"
        raise bad_row(row, message, hint, code="column-unread")


def _answer(row: Row, column: str) -> list[dict[str, Any]]:
    """The messages of chosen or rejected; a text beside a prompt of messages is the assistant's."""
    value = row.values[column]
    if isinstance(value, str) and not is_conversation(value):
        return [{"role": "assistant", "content": value}]
    return messages_of(row, column)


def _shared_prompt(row: Row, chosen: Any, rejected: Any) -> dict[str, Any]:
    """The beginning that both answers share, as the prompt, as trl takes it."""
    if not chosen or not rejected or chosen[0] != rejected[0]:
        message = "chosen and rejected share no beginning, and there is no prompt"
        raise bad_row(row, message, "give a column `prompt`")
    pairs = enumerate(zip(chosen, rejected, strict=False))
    end = next((index for index, (one, other) in pairs if one != other), min(len(chosen), len(rejected)) - 1)
    if chosen[end] != rejected[end] and chosen[end - 1] == " ":
        end -= 1  # the space before an answer is learned with it
    if end < 1:
        raise bad_row(row, "chosen and rejected are the same single message", "give a column `prompt`")
    return {"prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}


SHARED: Mapping[str, Shaper] = {
    "text": lambda row, columns: {"text": text_in(row, columns["text"])},
    "instruction": _instruction,
    "prompt-completion": _pair,
    "chat": _chat,
    "preference": _preference,
}
"""Formats that several tasks read; the others are OWN_FORMATS."""


def label_of(row: Row, label: Any, column: str) -> str | int | bool:
    """A label as a column holds it, checked. RecipeError names file and line."""
    if isinstance(label, float):
        message = f"label {label} is a decimal number, and classes are whole numbers or names"
        raise bad_row(row, message, REGRESSION_HINT)
    if not isinstance(label, str | int) or label == "":
        held = "nothing" if label == "" else kind_of(label)
        raise bad_row(row, f"column {column} holds {held}, expected a label", "correct or delete the row")
    return label


def label_id(row: Row, label: Any, labels: Sequence[str]) -> int:
    """The id of a canonical row's label; RecipeError when training knows no such label."""
    name = str(label)
    try:
        return labels.index(name)
    except ValueError:
        message = f"label {name!r} is not among the training labels {listed(labels)}"
        raise bad_row(row, message, "labels come from data.train; correct the row or leave it out") from None
