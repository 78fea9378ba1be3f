"""Conversations as files write them to the messages that chat templates take.

Files hold `role`/`content` (OpenAI) or `from`/`value` (ShareGPT), as objects or as JSON text. Roles, keys,
tool calls and masks of other tools become one form; train/data/rendered.py decides which of it a template
takes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.files.safe_files import parse_json
from launcher.recipe.suggestions import listed
from launcher.rows.sources import Row, bad_row, is_empty, is_media, kind_of, parsed_json, plain_name

Message = dict[str, Any]
REASONING = ("reasoning_content", "reasoning", "thinking", "thought")
"""Keys under which rows hold what the assistant thinks before it answers."""
TRAIN = "train"
"""The key under which a canonical message holds its flag; absent where the row has none."""

_LEARNS = frozenset({
    "train", "training", "trainable", "train_on_turn", "learn", "loss", "loss_weight", "loss_scale",
    "loss_mask", "step_loss_mask", "weight",
})  # fmt: skip
"""Keys of which 1 or true means that the message is learned: OpenAI, axolotl, ms-swift, LLaMA-Factory,
xtuner, slime, tinker."""
_WEIGHTS = frozenset({"weight", "loss_weight", "loss_scale"})
_LEAVES_OUT = frozenset({"masked", "disable_loss"})
"""Keys of which true means that it is not: torchtune and others."""
_PARTS = frozenset({
    "mask", "masks", "masked", "masking", "loss", "weight", "weights", "train", "training", "trainable",
    "learn",
})  # fmt: skip
OF_ROWS = ("message_loss_mask", "loss_mask", "train_mask", "mask", "loss_weight", "train", "weight")
"""Columns beside the messages that select which of them contribute to the loss."""
_WRITE = 'write "train": true (it contributes to the loss) or "train": false (it does not) into the message'
_HUMAN = ("human", "user")
_CALL_HINT = 'a call is written {"name": "...", "arguments": {...}}'
_ROLES: Mapping[str, str] = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "observation", "tool_response", "tool_result", "tool_output"), "tool"),
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


def train_flag(row: Row, place: str, item: Mapping[str, Any]) -> bool | None:
    """The loss mask of a raw message; None where it has none.

    RecipeError for a key whose meaning is not known, for weights other than 0 and 1, and for two keys that
    contradict each other.
    """
    found: dict[str, bool] = {}
    for key, value in item.items():
        if value is None or not is_mask_key(key):
            continue
        name = key.lower()
        if name not in _LEARNS and name not in _LEAVES_OUT:
            raise bad_row(row, f"{place} has {key}, which cannot be used as a mask here", _WRITE)
        flag = _flag(value)
        if flag is None:
            message = f"{place}.{key} is {value!r}; only 0, 1, true and false can be used"
            raise bad_row(row, message, _WRITE)
        found[key] = flag is (name in _LEARNS)
    if len(set(found.values())) > 1:
        raise bad_row(row, f"{place}: {' and '.join(found)} contradict each other", _WRITE)
    return next(iter(found.values()), None)


def is_mask_key(key: Any) -> bool:
    """Whether a key of a message is about the loss: `loss`, `train_detail`, `trainOnTurn`."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(key)).lower().split("_")
    return not _PARTS.isdisjoint(words)


def row_flags(row: Row) -> list[bool | None] | None:
    """The flags that a column beside the messages gives them; None where there is no such column.

    RecipeError for one that cannot be used.
    """
    given = {key: _parsed(row.values[key]) for key in OF_ROWS if row.values.get(key) is not None}
    given = {key: value for key, value in given.items() if not _says_nothing(key, value)}
    if not given:
        return None
    names = ", ".join(f"{key}: null" for key in given)
    hint = f"`columns: {{{names}}}` trains without it, or {_WRITE}"
    if len(given) > 1:
        raise bad_row(row, f"the columns {' and '.join(given)} both mask messages", hint)
    key, value = next(iter(given.items()))
    flags = [_flag(one) for one in value] if isinstance(value, list | tuple) else [None]
    if key in ("mask", "weight") or None in flags:
        message = f"column {key} holds {str(value)[:80]}, which cannot be used as a mask of the messages"
        raise bad_row(row, message, hint)
    return list(flags)


def masks_row(value: Any, column: str = "") -> bool:
    """Whether a column of a mask's name leaves something out: a false flag, a list of numbers up to 1, or a
    weight below 1 (`loss` with such a value is a measured one)."""
    value = _parsed(value)
    if column.lower() in _WEIGHTS and _is_weight(value) and value < 1:
        return True
    if isinstance(value, list | tuple):
        return any(one != 1 for one in value) and all(map(_is_weight, value))
    return _flag(value) is False


def refuse_masks(row: Row, sides: Mapping[str, Any]) -> None:
    """Take the flags out of a preference row's messages; RecipeError where an answer is not to be learned."""
    flags = row_flags(row)
    for name, messages in sides.items():
        masked = [message.pop(TRAIN, None) for message in messages if isinstance(message, dict)]
        if flags is not None or (name != "prompt" and False in masked):
            what = f"a message of {name} is masked" if flags is None else "a column masks messages"
            message = f"{what}, and preference tuning learns complete answers"
            raise bad_row(row, message, "remove the mask, or delete the row")


def _says_nothing(key: str, value: Any) -> bool:
    """Whether a column changes nothing: every message is a target, or, as in NeMo, the user is masked.

    `train` and `weight` that are neither a flag nor a list are data of another kind.
    """
    if key == "mask" and isinstance(value, str) and value.lower() in _HUMAN:
        return True
    if key in ("train", "weight") and _flag(value) is None and not isinstance(value, list | tuple):
        return key == "train" or isinstance(value, str)
    return key != "mask" and _flag(value) is True


def _parsed(value: Any) -> Any:
    """A flag, number or list that is text, as in CSV files: `False`, `0`, `[0, 1]`. Others as they are."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value.lower())
    except ValueError:
        return value


def _is_weight(value: Any) -> bool:
    return isinstance(value, bool | int | float) and 0 <= value <= 1


def _flag(value: Any) -> bool | None:
    """0 and 1 in their spellings as a flag; None for everything else."""
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else None


def tool_calls(row: Row, place: str, calls: Any) -> list[Any]:
    """The value of `tool_calls`: a list of calls, or JSON text of one. RecipeError names the fault."""
    if isinstance(calls, str):
        calls = parsed_json(row, place, calls) if calls.strip() else []
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise bad_row(row, f"{place} is {kind_of(calls)}, expected a list of objects")
    return [_tool_call(row, f"{place}[{index}]", call) for index, call in enumerate(calls)]


def calls_of_message(row: Row, place: str, content: Any) -> tuple[str | None, list[Any]]:
    """(text before the calls, the calls) of a message that holds nothing else: ms-swift's `tool_call`,
    LLaMA-Factory's `function_call`. The content is one call or a list of them, as an object or JSON text."""
    before = None
    if isinstance(content, str):
        before, content = _split(row, place, content)
    calls = list(content) if isinstance(content, list | tuple) else [content]
    if not calls or not all(isinstance(call, Mapping) and _named(call) for call in calls):
        raise bad_row(row, f"{place} holds no tool call with a name", _CALL_HINT)
    return before, tool_calls(row, place, calls)


def _split(row: Row, place: str, text: str) -> tuple[str | None, Any]:
    """Text before the JSON of a call (a thought, as a rule), and what the JSON holds."""
    starts = [at for at in (text.rfind("</think>") + 1, 0) if at >= 0]
    for start in starts:
        opening = min((at for sign in "[{" if (at := text.find(sign, start)) >= 0), default=-1)
        if opening < 0:
            continue
        try:
            found = parse_json(text[opening:])
        except ValueError:
            continue
        return text[:opening].rstrip() or None, found
    return None, parsed_json(row, place, text)


def _named(call: Mapping[str, Any]) -> bool:
    inner = call.get("function", call)
    return isinstance(inner, Mapping) and isinstance(inner.get("name"), str) and bool(inner["name"])


def _tool_call(row: Row, place: str, call: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("name"), str) and "function" not in call:
        inner = {key: value for key, value in call.items() if key not in ("type", "id")}
        outer = {key: value for key, value in call.items() if key in ("id",)}
        return _tool_call(row, place, {"type": "function", **outer, "function": inner})
    function = call.get("function")
    if not isinstance(function, Mapping) or not _named(call):
        raise bad_row(row, f"{place} is no call of a function with a name", _CALL_HINT)
    name = "parameters" if "parameters" in function and "arguments" not in function else "arguments"
    arguments = function.get(name)
    if isinstance(arguments, str):
        where = f"{place}.function.{name}"
        arguments = parsed_json(row, where, arguments) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise bad_row(row, f"{place}.function.{name} holds {kind_of(arguments)}, expected an object")
    rest = {key: value for key, value in function.items() if key != name}
    return {**call, "function": {**rest, "arguments": arguments}}


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages, a message alone, or JSON text of a list."""
    if isinstance(value, str):
        try:
            value = parse_json(value) if value.lstrip().startswith("[") else None
        except ValueError:
            return False
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(item, Mapping) and ("role" in item or "from" in item) for item in value)


def messages_of(row: Row, column: str, flags: Sequence[bool | None] | None = None) -> list[Message]:
    """The messages of a column, at least one; RecipeError names the row and the message at fault.

    What makes one turn of the assistant is one message: its text, then its tool calls. A message with a mask
    has a flag `train`; flags: those that a column of its own gives.
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
    if isinstance(value, Mapping):  # one turn alone, as some files write their answers
        value = [value]
    if not isinstance(value, list | tuple):
        message = f"column {column} holds {kind_of(value)}, expected a list of messages"
        raise bad_row(row, message, _MESSAGE_HINT)
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
    flags = [message.get(TRAIN) for message in (turn, calls)]
    if len({flag is not False for flag in flags}) > 1:
        message = f"{place} continues the assistant's turn before it, of which only a part is a target"
        raise bad_row(row, message, "give all messages of the turn the same mask")
    if (flag := next((flag for flag in flags if flag is not None), None)) is not None:
        merged[TRAIN] = flag
    texts = [text for text in (turn["content"], calls["content"]) if text]
    return {**calls, **merged, "content": "\n".join(texts) or None}


def _content(row: Row, place: str, content: Any, has_calls: bool) -> tuple[str | None, str | None]:
    """(text, reasoning) of a message; parts of text are joined. No text only beside tool calls."""
    if isinstance(content, str):
        return content, None
    if isinstance(content, list | tuple) and content:
        if len(content) > 1 and any(isinstance(part, str) for part in content):
            message = f"{place} has a list of texts as content, and nothing says what stands between them"
            hint = 'write one text; parts {"type": "text", "text": "..."} are joined without a separator'
            raise bad_row(row, message, hint)
        texts, thoughts = zip(*(_part(row, place, part) for part in content), strict=True)
        return "".join(texts), "".join(thoughts) or None
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
