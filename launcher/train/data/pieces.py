"""The texts of a conversation's messages one by one, and the messages with marks in their place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.facts.safe_files import parse_json
from launcher.train.data.turns import Message, assistant_turns

REASONING = ("reasoning_content", "reasoning", "thinking", "thought")
"""Keys under which rows hold what the assistant thinks before it answers."""


Place = tuple[int, str, int]
"""(turn, kind, call) of a piece."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A text of a message, by the place where it stands."""

    turn: int
    kind: str
    """content | thought (ahead of the content, in <think> tags) | call | argument | a key of REASONING"""
    text: str
    call: int = 0


def mark(number: int) -> str:
    """A text that no trimming or escaping changes."""
    return f"qzTEXT{number}zq"


def split_thought(content: str) -> tuple[str, str, str, str]:
    """(opening tag, thought, closing tag, the rest) of a content that begins with a thought in <think> tags.

    All but the rest are empty where there is none. The opening tag may be missing, the thought be blank.
    """
    if "</think>" not in content:
        return "", "", "", content
    match = re.match(r"(\s*(?:<think>\s*)?)(.*?)(\s*</think>)(.*)", content, re.DOTALL)
    assert match is not None, "the closing tag is there"
    return match[1], match[2], match[3], match[4]


def pieces_of(messages: Sequence[Message]) -> Iterator[Piece]:
    """All texts of the messages that must come out of the template."""
    for turn, message in enumerate(messages):
        content = message.get("content")
        if content:
            _, thought, _, rest = split_thought(content)
            if thought:
                yield Piece(turn, "thought", thought)
            if rest := rest.strip():
                yield Piece(turn, "content", rest)
        if content and len(message) == 2:
            continue
        for key in REASONING:
            if isinstance(message.get(key), str) and message[key].strip():
                yield Piece(turn, key, message[key].strip())
        for number, call in enumerate(message.get("tool_calls") or ()):
            inner = call.get("function", call)
            yield Piece(turn, "call", str(inner.get("name", "")), number)
            for text in _leaves(_arguments(inner)):
                yield Piece(turn, "argument", text, number)


def _arguments(call: Mapping[str, Any]) -> Any:
    arguments = call.get("arguments")
    try:
        return parse_json(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _leaves(value: Any) -> Iterator[str]:
    """Names and values in arguments, without those that templates spell in several ways."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str) and value.strip():
        yield value.strip()
    elif isinstance(value, int) and not isinstance(value, bool):
        yield str(value)


def marked_messages(messages: Sequence[Message], *, extra: bool) -> tuple[list[Message], dict[Place, str]]:
    """(the messages with marks for their texts, (turn, kind, call) -> mark).

    extra: with a content where the assistant only calls tools, to see what stands ahead of the calls.
    """
    marks: dict[Place, str] = {}
    marked = list(messages)
    for piece in pieces_of(messages):
        place = (piece.turn, piece.kind, piece.call)
        if place not in marks:
            marks[place] = mark(len(marks))
            marked[piece.turn] = _with(marked[piece.turn], piece, marks[place])
    for turn in assistant_turns(messages) if extra else ():
        if not messages[turn].get("content") and (turn, "call", 0) in marks:
            marks[turn, "extra", 0] = mark(len(marks))
            marked[turn] = {**marked[turn], "content": marks[turn, "extra", 0]}
    return marked, marks


def replaced(messages: Sequence[Message], piece: Piece) -> list[Message]:
    return [_with(m, piece, mark(0)) if n == piece.turn else m for n, m in enumerate(messages)]


def _with(message: Message, piece: Piece, mark: str) -> Message:
    """The message with a mark for one of its texts."""
    if piece.kind in ("content", "thought"):
        opening, thought, closing, rest = split_thought(message["content"])
        if piece.kind == "thought":
            return {**message, "content": opening + mark + closing + rest}
        # Without outer spaces and an empty thought, which are this row's own: others of its kind have none.
        return {**message, "content": (opening + thought + closing if thought else "") + mark}
    if piece.kind in REASONING:
        return {**message, piece.kind: mark}
    calls = list(message["tool_calls"])
    call = dict(calls[piece.call])
    inner = dict(call["function"]) if isinstance(call.get("function"), dict) else call
    if piece.kind == "call":
        inner["name"] = mark
    else:
        arguments = {mark: mark}
        inner["arguments"] = json.dumps(arguments) if isinstance(inner["arguments"], str) else arguments
    calls[piece.call] = {**call, "function": inner} if inner is not call else inner
    return {**message, "tool_calls": calls}


def is_in_other_words(words: str, text: str) -> bool:
    """Whether a text has the words as JSON, or with other spaces, or, where they are JSON, their values."""
    for form in (json.dumps(words)[1:-1], json.dumps(words, ensure_ascii=False)[1:-1], repr(words)[1:-1]):
        if form in text:
            return True
    if squeezed(words) in squeezed(text):
        return True
    try:
        found = parse_json(words)
    except ValueError:
        return False
    return isinstance(found, dict | list) and all(
        leaf in text or json.dumps(leaf)[1:-1] in text or json.dumps(leaf, ensure_ascii=False)[1:-1] in text
        for leaf in _leaves(found)
    )


def is_thought(kind: str) -> bool:
    return kind == "thought" or kind in REASONING


def squeezed(text: str) -> str:
    return "".join(text.split())
