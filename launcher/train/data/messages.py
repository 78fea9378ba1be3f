"""Conversations as files write them to the messages that chat templates take.

Files hold `role`/`content` (OpenAI's way) or `from`/`value` (ShareGPT's), as objects or as JSON text.
Roles and keys of other tools become those that templates know; which of these a template takes is decided
in `rendered`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.facts.safe_files import parse_json
from launcher.recipe.suggestions import listed
from launcher.train.data.masks import TRAIN, is_mask_key, merged_flag, train_flag
from launcher.train.data.other_tasks import is_empty, is_media, plain_name
from launcher.train.data.pieces import REASONING
from launcher.train.data.sources import Row, bad_row, kind_of, parsed_json
from launcher.train.data.tool_calls import calls_of_message, tool_calls
from launcher.train.data.turns import Message

_ROLES: Mapping[str, str] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "tool_result": "tool",
    "tool_output": "tool",
    "function_response": "tool",
}
"""Roles that mean one thing wherever they stand. Others (`developer`, `ipython`, `critic`) stay."""
_SPEAKERS: Mapping[str, str] = {**_ROLES, "function": "tool"}
_CALLS = frozenset({"tool_call", "tool_calls", "function_call"})
"""Roles of messages that hold nothing but calls, which are the assistant's."""
_MESSAGE_HINT = 'a message is written {"role": "user", "content": "..."}'
_REASONING_PARTS = ("thinking", "reasoning")
_CALL_PARTS = ("tool_use", "tool_call", "tool_result", "function_call")
_CALLED = "calls are written as tool_calls of the message, their results as messages of the role tool"
_MEDIA = "conversations about images or sound need a vision-language trainer such as trl's SFTTrainer"


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages, or JSON text of one."""
    if isinstance(value, str):
        try:
            value = parse_json(value) if value.lstrip().startswith("[") else None
        except ValueError:
            return False
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(item, Mapping) and ("role" in item or "from" in item) for item in value)


def messages_of(row: Row, column: str, flags: Sequence[bool | None] | None = None) -> list[Message]:
    """The messages of a column, at least one; RecipeError names the row and the message at fault.

    What makes one turn of the assistant is one message: its text, then its tool calls. A message that the
    row says something of has a flag `train`; flags: those that a column of its own gives.
    """
    items = _items(row, column)
    if flags is not None and len(flags) != len(items):
        fault = f"the mask beside {column} has {len(flags)} values for {len(items)} messages"
        raise bad_row(row, fault, "give one 0 or 1 for each message")
    messages: list[Message] = []
    for index, item in enumerate(items):
        place = f"{column}[{index}]"
        message, calls_alone = _message(row, place, item)
        flag = None if flags is None else flags[index]
        if flag is not None and message.setdefault(TRAIN, flag) is not flag:
            raise bad_row(row, f"{place} and the column beside {column} mask differently", "remove one")
        if calls_alone and messages and messages[-1]["role"] == "assistant":
            messages[-1] = _joined(row, place, messages[-1], message)
        else:
            messages.append(message)
    return messages


def _items(row: Row, column: str) -> Sequence[Any]:
    value = row.values.get(column)
    if isinstance(value, str):
        value = parsed_json(row, column, value)
    if isinstance(value, Mapping):  # one turn alone, as some preference files write their answers
        value = [value]
    if not isinstance(value, list | tuple):
        raise bad_row(
            row,
            f"column {column} holds {kind_of(value)}, expected a list of messages",
            _MESSAGE_HINT,
        )
    if not value:
        raise bad_row(row, f"column {column} holds no messages", "delete the row")
    return value


def _message(row: Row, place: str, item: Any) -> tuple[Message, bool]:
    """(the message, whether it is tool calls alone, which belong to the turn before them)."""
    if not isinstance(item, Mapping):
        raise bad_row(row, f"{place} is {kind_of(item)}, expected an object with role and content")
    role = _role(row, place, item)
    if "role" not in item:
        item = _spoken(row, place, item)
    # Templates ask `if message.tool_calls` or even `'tool_calls' in message`: what is not there must
    # not be there as None or [] either.
    message = {key: value for key, value in item.items() if value is not None and not is_mask_key(key)}
    for key, value in message.items():
        if is_media(plain_name(str(key))) and not is_empty(value):
            raise bad_row(row, f"{place} holds images, video or sound under {key}", _MEDIA)
    if (flag := train_flag(row, place, item)) is not None:
        message[TRAIN] = flag
    content, calls = item.get("content"), message.pop("tool_calls", None)
    if role in _CALLS:
        before, found = calls_of_message(row, f"{place}.content", content)
        return {**message, "role": "assistant", "content": before, "tool_calls": found}, True
    if "function_call" in message:  # OpenAI's form before tool_calls
        calls = [message.pop("function_call"), *(calls or ())]
    calls = tool_calls(row, f"{place}.tool_calls", calls) if calls else None
    message["role"] = role
    if calls:
        message["tool_calls"] = calls
    for key in REASONING:
        if not isinstance(message.get(key, ""), str):
            raise bad_row(row, f"{place}.{key} is {kind_of(message[key])}, expected text")
    if not calls and "content" not in item:
        held = listed([str(key) for key in item if key not in ("role", "from")])
        raise bad_row(row, f"{place} has no content; its keys beside the role: {held}", _MESSAGE_HINT)
    text, thought = _content(row, place, content, bool(calls))
    message["content"] = text
    return message if thought is None else {**message, "reasoning_content": thought}, False


def _spoken(row: Row, place: str, item: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message of ShareGPT's spelling with its text as `content`."""
    said = [item[key] for key in ("content", "value") if item.get(key) is not None]
    if len(said) == 2 and said[0] != said[1]:
        raise bad_row(row, f"{place} has both content and value, and they differ", "remove one of them")
    rest = {key: value for key, value in item.items() if key not in ("from", "value")}
    if not said and not {"content", "value"} & item.keys():
        return rest
    return {**rest, "content": said[0] if said else None}


def _role(row: Row, place: str, item: Mapping[str, Any]) -> str:
    if "role" not in item and "from" in item:
        speaker = item["from"]
        name = speaker.lower() if isinstance(speaker, str) else ""
        if name not in _SPEAKERS and name not in _CALLS:
            known = ", ".join([*_SPEAKERS, *sorted(_CALLS)])
            raise bad_row(row, f"{place} is from {speaker!r}; known are {known}", "rename the speaker")
        return _SPEAKERS.get(name, name)
    role = item.get("role")
    if not isinstance(role, str) or not role:
        fault = f"{place} has no role; it has {', '.join(map(str, item)) or 'no keys'}"
        raise bad_row(row, fault, _MESSAGE_HINT)
    name = role.lower()
    return name if name in _CALLS else _ROLES.get(name, role)


def _joined(row: Row, place: str, turn: Message, calls: Message) -> Message:
    """A turn of the assistant with the calls that the next message holds."""
    merged = {**turn, "tool_calls": [*turn.get("tool_calls", ()), *calls["tool_calls"]]}
    if (flag := merged_flag(row, place, [turn.get(TRAIN), calls.get(TRAIN)])) is not None:
        merged[TRAIN] = flag
    texts = [text for text in (turn["content"], calls["content"]) if text]
    return {**calls, **merged, "content": "\n".join(texts) or None}


def _content(row: Row, place: str, content: Any, has_calls: bool) -> tuple[str | None, str | None]:
    """(text, reasoning) of a message; parts of text are joined. No text only beside tool calls."""
    if isinstance(content, str):
        return content, None
    if isinstance(content, list | tuple) and content:
        parts = [_part(row, place, part) for part in content]
        texts, thoughts = (["".join(part[kind] for part in parts)] for kind in (0, 1))
        return texts[0], thoughts[0] or None
    if content is None or content == []:
        if has_calls:
            return None, None
        raise bad_row(row, f"{place} has neither content nor tool_calls", "delete the row or the message")
    raise bad_row(row, f"{place} has content that is {kind_of(content)}, expected text")


def _part(row: Row, place: str, part: Any) -> tuple[str, str]:
    """(text, reasoning) of a part of a message's content, of which one is empty."""
    if isinstance(part, str):
        return part, ""
    kind = part.get("type", "text") if isinstance(part, Mapping) else kind_of(part)
    if kind in _REASONING_PARTS:
        inner = part.get(kind, part.get("text"))
        inner = inner if isinstance(inner, list | tuple) else [{"text": inner}]
        return "", "".join(_part(row, place, one)[0] for one in inner)
    if kind != "text":
        message = f"{place} has content that is not text: a part of type {kind}"
        hint = _CALLED if kind in _CALL_PARTS else _MEDIA
        raise bad_row(row, message, "only parts of type text and thinking can be trained on; " + hint)
    text = part.get("text", part.get("value"))
    if not isinstance(text, str):
        held = ", ".join(map(str, part)) or "no keys"
        hint = 'a part is written {"type": "text", "text": "..."}'
        raise bad_row(row, f"{place} has a part of type text without the key text; it has {held}", hint)
    return text, ""


def tools_of(row: Row, column: str) -> list[dict[str, Any]] | None:
    """The tools that a conversation may call, as JSON schemas; None where there are none."""
    value = row.values.get(column)
    if isinstance(value, str) and value.strip():
        value = parsed_json(row, column, value)
    if not value:
        return None
    if isinstance(value, list | tuple):  # of JSON texts, where the schemas have no columns in common
        value = [parsed_json(row, column, tool) if isinstance(tool, str) else tool for tool in value]
    if not isinstance(value, list | tuple) or not all(isinstance(tool, dict) for tool in value):
        held = kind_of(value) if not isinstance(value, list) else "a list with something else"
        raise bad_row(row, f"column {column} holds {held}, expected a list of JSON schemas")
    return list(value)
