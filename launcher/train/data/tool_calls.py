"""Tool calls as rows write them to the form that chat templates take.

{"type": "function", "function": {"name": ..., "arguments": {...}}}, arguments as an object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.facts.safe_files import parse_json
from launcher.train.data.sources import Row, bad_row, kind_of, parsed_json

_CALL_HINT = 'a call is written {"name": "...", "arguments": {...}}'


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
