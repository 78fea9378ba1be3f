"""Whether the rendered text of a conversation holds everything that the row holds.

Templates leave out what they do not know without an error: roles, tool calls, reasoning. So the texts of the
messages are replaced by marks, each of which must come out of the template; and the texts themselves must be
in the text of the row. The marks are rendered once for each kind of conversation.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from launcher.errors import RecipeError
from launcher.files.safe_files import parse_json
from launcher.rows.messages import REASONING, Message
from launcher.rows.sources import Row, bad_row, is_content, is_empty
from launcher.train.data.template import Span, Template, assistant_turns, find_spans, render_errors

Place = tuple[int, str, int]
"""(turn, kind, call) of a piece."""
_KNOWN = frozenset({"role", "content", "tool_calls", "tool_call_id", "id", *REASONING})
_TOOL_KEYS = frozenset({"tools", "functions", "function_calls", "tool_call"})
"""Keys of messages that hold descriptions of tools, or calls, in the ways of some models."""
_COMMON = frozenset({"system", "user", "assistant"})
_TOOL = ("tool", "ipython", "function", "observation", "tool_response")
_SAME: Mapping[str, tuple[str, ...]] = {**dict.fromkeys(_TOOL, _TOOL), "developer": ("system",)}
"""Role -> roles that mean the same, for templates that do not know it."""
_STRANGER = "qzrolezq"
_OUTLINES = 4096
"""Kinds of conversations that are remembered."""
_ASK: Message = {"role": "user", "content": "qzASKzq"}
_ANSWER: Message = {"role": "assistant", "content": "qzANSWERzq"}
_THOUGHT = "qzTHOUGHTzq"
_TAGGED: Message = {**_ANSWER, "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER['content']}"}
_TOOL_KEYS_HINT = (
    "put descriptions of tools into a column `tools`, and calls into `tool_calls` of the message; "
    "or give a template that renders the key"
)
TOOLS_HINT = "give a template that renders it, describe tools in a system message, or leave such rows out"


@dataclass(frozen=True, slots=True)
class Piece:
    """A text of a message, by the place where it stands."""

    turn: int
    kind: str
    """content | thought (ahead of the content, in <think> tags) | call | argument | a key of REASONING"""
    text: str
    call: int = 0

    @property
    def place(self) -> Place:
        return self.turn, self.kind, self.call


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
        if piece.place not in marks:
            marks[piece.place] = mark(len(marks))
            marked[piece.turn] = _with(marked[piece.turn], piece, marks[piece.place])
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


@dataclass(slots=True)
class Outline:
    """What a template does with conversations of one kind."""

    lost: frozenset[Place] | None
    """What does not come out; None where the template refuses the marks."""
    inserted: dict[int, str] = field(default_factory=dict)
    """Turn of the assistant -> text that the template writes ahead of the row's own."""
    tools_lost: bool = False
    """Whether descriptions of tools do not come out, or cannot be marked."""


class _Probes:
    """What a template does with small conversations; each is rendered once."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self.roles: dict[str, str] = {}
        """Role -> the role under which the template takes it."""
        self.unread_keys: dict[tuple[str, str], bool] = {}
        """(role, key of a message) -> whether the template leaves it out."""
        self.outlines: dict[Any, Outline] = {}

    @cached_property
    def reasoning_keys(self) -> tuple[str, ...]:
        """The keys of REASONING that the template renders in a last answer."""
        shown = {key: self._template.attempt([_ASK, {**_ANSWER, key: _THOUGHT}]) for key in REASONING}
        return tuple(key for key, text in shown.items() if _THOUGHT in (text or ""))

    @cached_property
    def parses_thoughts(self) -> bool:
        """Whether a thought in <think> tags is rendered like one under the first of `reasoning_keys`."""
        tagged = self._template.attempt([_ASK, _TAGGED])
        keyed = self._template.attempt([_ASK, {**_ANSWER, self.reasoning_keys[0]: _THOUGHT}])
        return squeezed(tagged or "") == squeezed(keyed or "")

    @cached_property
    def frame(self) -> str | None:
        """What the template writes around reasoning, without spaces; None where it knows none."""
        known = self.reasoning_keys
        answer = {**_ANSWER, known[0]: _THOUGHT} if known else _TAGGED
        try:
            text, spans = find_spans(self._template, [_ASK, answer], [1])
        except render_errors():
            return None
        if not spans or _ANSWER["content"] not in text:
            return None
        around = text[spans[0][0] : text.index(_ANSWER["content"])]
        return squeezed(around.replace(_THOUGHT, "")) if _THOUGHT in around else None

    @cached_property
    def header(self) -> str:
        """What asks the assistant for an answer; empty where the template does not know it."""
        before, asked = self._template.attempt([_ASK]), self._template.attempt([_ASK], prompt=True)
        return asked[len(before) :] if before is not None and asked and asked.startswith(before) else ""


class RenderCheck:
    """Refuses rows of which the template leaves something out."""

    def __init__(self, origin: str, *, masked: bool) -> None:
        """origin: the template's, for errors; masked: whether tokens of a turn can be masked."""
        self.origin = origin
        self._masked = masked
        self._probes: dict[str, _Probes] = {}

    def _of(self, template: Template) -> _Probes:
        if template.source not in self._probes:
            self._probes[template.source] = _Probes(template)
        return self._probes[template.source]

    def adapted(self, template: Template, messages: Sequence[Message], row: Row) -> list[Message]:
        """The messages with roles and reasoning as this template takes them. RecipeError where it cannot."""
        taken = [self._with_reasoning(template, message, row) for message in messages]
        for role in dict.fromkeys(str(message["role"]) for message in taken):
            if role in _COMMON:
                continue
            name = self._of(template).roles.get(role) or self._role(template, taken, role, row)
            taken = [{**message, "role": name} if message["role"] == role else message for message in taken]
        return taken

    def check(
        self, template: Template, messages: Sequence[Message], text: str, row: Row, notes: Counter[str]
    ) -> Outline:
        """RecipeError when `text` lacks something of the messages; what is left out by design is counted."""
        pieces = list(pieces_of(messages))
        outline = self._outline(template, messages, pieces)
        last = max(assistant_turns(messages), default=-1)
        for piece in pieces:
            found = piece.text in text
            lost = outline.lost is None or piece.place in outline.lost
            if found and not lost:
                continue
            missing = lost and template.attempt(replaced(messages, piece)) == text
            if not missing and (found or is_in_other_words(piece.text, text)):
                continue
            if piece.turn < last and is_thought(piece.kind):
                notes["reasoning-left-out"] += 1
            else:
                raise self._left_out(piece, messages[piece.turn], row, partly=not missing)
        self._check_arguments(messages, text, row)
        self._count_keys(template, messages, text, row, notes)
        self._check_tools(template, messages, text, outline.tools_lost, row)
        return outline

    def inserted(
        self, template: Template, outline: Outline, turn: int, own: str, text: str, start: int
    ) -> int:
        """Characters at the start of a target turn that the template wrote and the row does not hold."""
        added = outline.inserted.get(turn, "")
        held = squeezed(own).startswith(squeezed(added))
        return 0 if held or not text.startswith(added, start) else len(added)

    def _role(self, template: Template, messages: Sequence[Message], role: str, row: Row) -> str:
        """The role under which the template takes the messages of `role`, remembered where that is certain.

        RecipeError where it knows none.
        """
        stranger = template.attempt(_renamed(messages, role, _STRANGER))
        shown = {
            name: template.attempt(_renamed(messages, role, name)) for name in (role, *_SAME.get(role, ()))
        }
        known = [
            name
            for name, text in shown.items()
            if text is not None
            and (name in _COMMON or stranger is None or stranger.replace(_STRANGER, name) != text)
        ]
        if shown.get("tool") and _STRANGER in (stranger or ""):
            known.append("tool")  # the template writes each role's name, and this one is common
        if role not in _SAME and re.search(rf"""['"]{re.escape(role)}['"]""", template.source):
            known.append(role)
        if known:
            self._of(template).roles[role] = known[0]
            return known[0]
        without = [message for message in messages if message["role"] != role]
        if not any(shown.values()) and template.attempt(without) is None:
            return _SAME.get(role, (role,))[
                0
            ]  # the template refuses it for another reason, which is reported
        message = f"{self.origin} does not know the role {role}"
        hint = (
            "rename the role (system, user, assistant, tool), leave such rows out, or give a template that "
        )
        hint += "renders it"
        raise bad_row(row, message, hint, code="chat-template-role", path="model.chat_template")

    def _with_reasoning(self, template: Template, message: Message, row: Row) -> Message:
        """The message with its reasoning where the template looks for it."""
        if message["role"] != "assistant":
            return message
        held = [key for key in REASONING if isinstance(message.get(key), str) and message[key].strip()]
        if not held:
            return self._with_parsed_thought(template, message)
        known = self._of(template).reasoning_keys
        if (len(held) == 1 and held[0] in known) or len({message[key].strip() for key in held}) > 1:
            return message
        rest = {key: value for key, value in message.items() if key not in held}
        if known:
            return {**rest, (held[0] if held[0] in known else known[0]): message[held[0]]}
        if "</think>" in template.source:
            thought = f"<think>\n{message[held[0]].strip()}\n</think>\n\n"
            return {**rest, "content": thought + (message.get("content") or "")}
        raise self._left_out(Piece(0, held[0], ""), message, row)

    def _with_parsed_thought(self, template: Template, message: Message) -> Message:
        """A thought in <think> tags as the template's own reasoning, if it takes the tags for common text."""
        content = message.get("content")
        if not content or "</think>" not in content or not (known := self._of(template).reasoning_keys):
            return message
        _, thought, _, rest = split_thought(content)
        if not thought.strip() or self._of(template).parses_thoughts:
            return message
        return {**message, "content": rest.lstrip(), known[0]: thought}

    def _outline(self, template: Template, messages: Sequence[Message], pieces: Sequence[Piece]) -> Outline:
        """What the template does with conversations that have texts in the same places."""
        roles = tuple((m["role"], frozenset(m) if len(m) > 2 else None) for m in messages)
        places = tuple(piece.place for piece in pieces)
        outlines = self._of(template).outlines
        key = (bool(template.tools), roles, places)
        if key not in outlines:
            if len(outlines) >= _OUTLINES:
                outlines.clear()
            outlines[key] = self._drawn(template, messages)
        return outlines[key]

    def _drawn(self, template: Template, messages: Sequence[Message]) -> Outline:
        for extra in (True, False):
            marked, marks = marked_messages(messages, extra=extra)
            text = template.attempt(marked)
            if text is None:
                continue
            lost = frozenset(
                place for place, sign in marks.items() if sign not in text and place[1] != "extra"
            )
            inserted = self._insertions(template, marked, text, marks) if self._masked else {}
            return Outline(lost, inserted, tools_lost=self._tools_lost(template, marked))
        return Outline(None)

    def _insertions(
        self, template: Template, marked: Sequence[Message], text: str, marks: Mapping[Place, str]
    ) -> dict[int, str]:
        """Turn -> text between its header and its content that is no part of how the row's own is written."""
        everyone = assistant_turns(marked)
        header = "" if template.has_generation else self._of(template).header
        found: dict[int, str] = {}
        spans: list[Span] | None = None
        for turn in everyone:
            place = _content_place(turn, text, marks)
            if place is None:
                continue
            start = text.rfind(header, 0, place) + len(header)
            if not header or start < len(header) or any(sign in text[start:place] for sign in marks.values()):
                if spans is None:  # the header is not that of the prompt
                    spans = find_spans(template, marked, everyone)[1] or []
                start = spans[everyone.index(turn)][0] if len(spans) == len(everyone) else place
            if self._is_insertion(template, text[start:place]):
                found[turn] = text[start:place]
        return found

    def _is_insertion(self, template: Template, added: str) -> bool:
        """Whether text ahead of an answer is no syntax: words without special tokens, or empty reasoning."""
        special = any(token in added for token in template.special)
        return bool(re.search(r"\w", added) and not special) or (
            bool(added.strip()) and squeezed(added) == self._of(template).frame
        )

    def _count_keys(
        self, template: Template, messages: Sequence[Message], text: str, row: Row, notes: Counter[str]
    ) -> None:
        """Count keys of messages that the template does not read; their text is lost.

        RecipeError where they hold tools or calls.
        """
        for turn, message in enumerate(messages):
            if len(message) < 3:
                continue
            for key, value in message.items():
                if key in _KNOWN or not (is_content(value) or value is True) or is_empty(value):
                    continue
                known, place = self._of(template).unread_keys, (str(message["role"]), key)
                if place not in known:
                    other = [{**m, key: mark(0)} if n == turn else m for n, m in enumerate(messages)]
                    known[place] = template.attempt(other) == text
                if known[place] and not (message["role"] in _TOOL and str(value) in text):
                    if key in _TOOL_KEYS:
                        what = f"leaves out {key} of message {turn + 1} (role {message['role']})"
                        raise self._error("chat-template-tools", what, row, _TOOL_KEYS_HINT)
                    notes[f"field-not-rendered: {key}"] += 1

    def _check_arguments(self, messages: Sequence[Message], text: str, row: Row) -> None:
        """RecipeError where the template writes the arguments of a call as Python and not as JSON."""
        contents = [str(message.get("content")) for message in messages]
        for message in messages:
            for call in message.get("tool_calls") or ():
                inner = call.get("function", call)
                arguments = inner.get("arguments")
                if not arguments or not isinstance(arguments, Mapping):
                    continue
                written = repr(arguments)
                if text.count(written) > sum(content.count(written) for content in contents):
                    what = f"writes the arguments of the tool call {inner.get('name')} as Python, not as JSON"
                    hint = "give a template that writes them with `tojson`"
                    raise self._error("chat-template-tools", what, row, hint)

    def _check_tools(
        self, template: Template, messages: Sequence[Message], text: str, lost: bool, row: Row
    ) -> None:
        """RecipeError where the template leaves out the description of a tool."""
        lost = lost and Template(template.tokenizer, None).attempt(messages) == text
        for item in template.tools or ():
            name = _tool(item).get("name")
            if isinstance(name, str) and (lost or name not in text):
                raise self._error("chat-template-tools", f"leaves out the tool {name}", row, TOOLS_HINT)

    def _tools_lost(self, template: Template, messages: Sequence[Message]) -> bool:
        """Whether the template leaves out a tool whose name is a mark."""
        if not template.tools or not isinstance(_tool(template.tools[0]).get("name"), str):
            return False
        first = dict(template.tools[0])
        name = mark(-1)
        if "function" in first:
            first["function"] = {**first["function"], "name": name}
        else:
            first["name"] = name
        shown = Template(template.tokenizer, [first, *template.tools[1:]]).attempt(messages)
        return shown is None or name not in shown

    def _left_out(self, piece: Piece, message: Message, row: Row, *, partly: bool = False) -> RecipeError:
        if piece.kind in ("call", "argument"):
            calls = message["tool_calls"][piece.call]
            name = calls.get("function", calls).get("name")
            what = f"the tool call {name}" if piece.kind == "call" else f"an argument of the tool call {name}"
            return self._error("chat-template-tools", f"leaves out {what}", row, TOOLS_HINT)
        if is_thought(piece.kind):
            hint = "give a template that keeps the reasoning of the last answer, or take it out of the rows"
            return self._error("chat-template-reasoning", "leaves out the assistant's reasoning", row, hint)
        role = message["role"]
        what = f"{'a part of ' if partly else ''}message {piece.turn + 1} (role {role})"
        hint = "give a template that renders it, or leave such rows out"
        return self._error("chat-template-message", f"leaves out {what}", row, hint)

    def _error(self, code: str, what: str, row: Row, hint: str) -> RecipeError:
        return bad_row(row, f"{self.origin} {what}", hint, code=code, path="model.chat_template")


def _renamed(messages: Sequence[Message], role: str, name: str) -> list[Message]:
    return [{**message, "role": name} if message["role"] == role else message for message in messages]


def _tool(item: Any) -> Mapping[str, Any]:
    inner = item.get("function", item) if isinstance(item, Mapping) else {}
    return inner if isinstance(inner, Mapping) else {}


def _content_place(turn: int, text: str, marks: Mapping[Place, str]) -> int | None:
    """Where a turn's content begins; None where its reasoning or a call comes first, or it is left out."""
    found = {
        kind: text.find(sign) for (place, kind, _), sign in reversed(list(marks.items())) if place == turn
    }
    places = {kind: at for kind, at in found.items() if at >= 0}
    first = min(places, key=lambda kind: places[kind], default="")
    return places[first] if first in ("content", "extra") else None
