"""Conversations as files write them to the messages that chat templates take.

Files hold `role`/`content` (OpenAI's way) or `from`/`value` (ShareGPT's), as objects or as JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from launcher.train.data.sources import Row, bad_row

Message = dict[str, Any]

_SHAREGPT_ROLES: Mapping[str, str] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
# In messages with role/content only these mean something else than they say: `tool`, `developer`,
# `function`, `ipython` are names that templates know.
_ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
}
_USUAL_ROLES = ("system", "user", "assistant", "tool")
_UNLEARNT = "leave the turn out, or learn the last one alone with data.loss_on: completion"


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages, or JSON text of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.lstrip().startswith("[") else None
        except (ValueError, RecursionError):
            return False
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(item, Mapping) and ("role" in item or "from" in item) for item in value)


def messages_of(row: Row, column: str) -> list[Message]:
    """The messages of a column, at least one; RecipeError names the row and the message at fault."""
    value = row.values.get(column)
    if isinstance(value, str):
        value = _parsed(row, column, value)
    if isinstance(value, Mapping):  # one turn alone, as some preference files write their answers
        value = [value]
    if not isinstance(value, list | tuple):
        raise bad_row(
            row,
            f"column {column} holds {kind_of(value)}, expected a list of messages",
            'a message is written {"role": "user", "content": "..."}',
        )
    if not value:
        raise bad_row(row, f"column {column} holds no messages", "delete the row")
    return [_message(row, f"{column}[{index}]", item) for index, item in enumerate(value)]


def tools_of(row: Row, column: str) -> list[dict[str, Any]] | None:
    """The tools that a conversation may call, as JSON schemas; None where there are none."""
    value = row.values.get(column)
    if isinstance(value, str) and value.strip():
        value = _parsed(row, column, value)
    if not value:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(tool, dict) for tool in value):
        raise bad_row(row, f"column {column} holds {kind_of(value)}, expected a list of JSON schemas")
    return list(value)


def kind_of(value: Any) -> str:
    """What a value is, for messages."""
    names = {type(None): "nothing", str: "text", list: "a list", tuple: "a list", dict: "an object"}
    names |= {int: "an integer", float: "a float", bool: "a boolean", bytes: "bytes"}
    return names.get(type(value), type(value).__name__)


def _parsed(row: Row, place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise bad_row(row, f"the text in {place} is not JSON: {error}") from error


def _message(row: Row, place: str, item: Any) -> Message:
    if not isinstance(item, Mapping):
        raise bad_row(row, f"{place} is {kind_of(item)}, expected an object with role and content")
    if "role" not in item and "from" in item:
        return _from_sharegpt(row, place, item)
    role = item.get("role")
    if not isinstance(role, str) or not role:
        raise bad_row(row, f"{place} has no role; it has {', '.join(map(str, item)) or 'no keys'}")
    # Templates ask `if message.tool_calls` or even `'tool_calls' in message`: what is not there must
    # not be there as None or [] either.
    message = {key: value for key, value in item.items() if value is not None}
    message["role"] = _ALIASES.get(role.lower(), role.lower() if role.lower() in _USUAL_ROLES else role)
    if item.get("weight", 1) in (0, 0.0):
        raise bad_row(row, f"{place} has weight 0, which is not read: the turn would be learnt", _UNLEARNT)
    calls = message.pop("tool_calls", None)
    if isinstance(calls, str):
        calls = _parsed(row, f"{place}.tool_calls", calls) if calls.strip() else None
    if calls:
        message["tool_calls"] = _tool_calls(row, f"{place}.tool_calls", calls)
    message["content"] = _content(row, place, item.get("content"), bool(calls))
    return message


def _from_sharegpt(row: Row, place: str, item: Mapping[str, Any]) -> Message:
    speaker, value = item["from"], item.get("value")
    if item.get("weight", 1) in (0, 0.0):
        raise bad_row(row, f"{place} has weight 0, which is not read: the turn would be learnt", _UNLEARNT)
    if speaker == "function_call":
        call = _parsed(row, f"{place}.value", value) if isinstance(value, str) else value
        calls = call if isinstance(call, list) else [call]
        wrapped = [{"type": "function", "function": call} for call in calls]
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": _tool_calls(row, f"{place}.value", wrapped),
        }
    role = _SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        known = ", ".join([*_SHAREGPT_ROLES, "function_call"])
        raise bad_row(row, f"{place} is from {speaker!r}; known are {known}", "rename the speaker")
    return {"role": role, "content": _content(row, place, value, False)}


def _content(row: Row, place: str, content: Any, has_calls: bool) -> str | None:
    """Text; parts of text are joined. None only beside tool calls."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        known = [text for text in texts if isinstance(text, str)]
        if len(known) == len(texts):
            return "".join(known)
        raise bad_row(
            row,
            f"{place} has content that is not text",
            "conversations about pictures or sound need a vision-language trainer such as trl's SFTTrainer",
        )
    if content is None or content == []:
        if has_calls:
            return None
        raise bad_row(row, f"{place} has neither content nor tool_calls", "delete the row or the message")
    raise bad_row(row, f"{place} has content that is {kind_of(content)}, expected text")


def _tool_calls(row: Row, place: str, calls: Any) -> list[Any]:
    """OpenAI's `function.arguments`, a JSON text there, as the object that chat templates expect."""
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise bad_row(row, f"{place} is {kind_of(calls)}, expected a list of objects")
    return [_tool_call(row, f"{place}[{index}]", call) for index, call in enumerate(calls)]


def _tool_call(row: Row, place: str, call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)  # a form of the template's own
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(row, f"{place}.function.arguments", arguments) if arguments.strip() else {}
        if not isinstance(arguments, dict):
            message = f"{place}.function.arguments holds {kind_of(arguments)}, expected an object"
            raise bad_row(row, message)
        function = {**function, "arguments": arguments}
    return {**call, "function": dict(function)}
