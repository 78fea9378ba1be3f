"""JSON with the position of every key and value, and findings at a position.

DeepSpeed reads Hjson (comments, trailing commas, unquoted words), the Trainer and accelerate strict JSON.
"""

from __future__ import annotations

import json
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from launcher.errors import printable
from launcher.files.redaction import SECRET
from launcher.files.secrets import looks_secret

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class TextEdit:
    """Replace the characters from `start` up to `end` of the text."""

    start: int
    end: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class LintFinding:
    """One problem of a ds_config."""

    file: str
    line: int
    """From 1."""
    column: int
    """In characters, from 1."""
    path: str
    """Dotted path of the key, "" for the file."""
    code: str
    message: str
    hint: str | None = None
    severity: Severity = "error"
    """error: the run stops or trains differently from what is written. warning: no effect, or accepted only
    because DeepSpeed converts it."""
    edits: tuple[TextEdit, ...] = ()

    def to_json(self) -> dict[str, Any]:
        names = ("file", "line", "column", "path", "code", "message", "hint", "severity")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        text = f"{printable(self.file)}:{self.line}:{self.column}: {self.code}: {self.message}"
        return f"{text} ({self.hint})" if self.hint else text


DEEPEST = 64
MOST = 500
"""Most findings about syntax that is not strict JSON."""
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?(?![\w.+-])")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"')
_QUOTED = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"|' + r"'(?:[^'\\\x00-\x1f]|\\.)*'")
"""A string in one line that JSON does not have."""
_UNREAD = re.compile(r"(?:\$\{[^}\r\n]*\}|[^,{}\[\]\r\n])*")
"""Up to where the next key or the end of an object may be."""
_BLANK = re.compile(r"[ \t\r\n]*")
_COMMENT = re.compile(r"//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
# No two neighbours of it match the same digits: a long text is refused in one pass.
PYTHON_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_WORD = re.compile(r"[-+]?[A-Za-z_][\w.]*")
_WORDS = {"true": True, "false": False, "null": None}
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_NOT_NUMBERS = ("NaN", "Infinity", "-Infinity")


@dataclass(slots=True)
class Node:
    """A value and its position: `start` up to `end`, in characters of the text."""

    start: int
    end: int
    value: Any
    """A scalar; None for an object or a list."""
    members: list[Member] | None = None
    """Those of an object, in order, duplicates included."""
    items: list[Node] | None = None
    unread: bool = False
    """Whether the text is no value; what is not known counts as "auto"."""

    @property
    def kind(self) -> str:
        """dict | list | bool | int | float | str | null"""
        if self.members is not None:
            return "dict"
        if self.items is not None:
            return "list"
        return "null" if self.value is None else type(self.value).__name__

    def plain(self) -> Any:
        """The value as json.load returns it: of equal keys, the last counts."""
        if self.members is not None:
            return {member.key: member.node.plain() for member in self.members}
        if self.items is not None:
            return [item.plain() for item in self.items]
        return self.value

    def get(self, key: str) -> Member | None:
        """The member of an object that counts."""
        return next((m for m in reversed(self.members or ()) if m.key == key), None)


@dataclass(slots=True)
class Member:
    """A key of an object, with its value."""

    key: str
    start: int
    end: int
    node: Node


@dataclass(slots=True)
class Document:
    """A text that was read. `root` is None where nothing could be read; then there is a finding.

    After a mistake the reader continues, if it can: `is_broken` where the text is not JSON and no edit
    makes it so, `is_cut` where the rest of the text was not read.
    """

    file: str
    text: str
    root: Node | None = None
    findings: list[LintFinding] = field(default_factory=list)
    is_broken: bool = False
    is_cut: bool = False
    _starts: list[int] = field(default_factory=list)

    def place(self, offset: int) -> tuple[int, int]:
        """Line and column of a character, both from 1."""
        if not self._starts:
            self._starts = [0, *(match.end() for match in re.finditer("\n", self.text))]
        line = bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1

    def found(
        self,
        offset: int,
        path: str,
        code: str,
        message: str,
        hint: str | None = None,
        *,
        severity: Severity = "error",
        edits: tuple[TextEdit, ...] = (),
    ) -> LintFinding:
        """A finding at this character."""
        line, column = self.place(offset)
        path, message, hint = printable(path), printable(message), None if hint is None else printable(hint)
        return LintFinding(self.file, line, column, path, code, message, hint, severity, edits)

    def report(
        self,
        where: str,
        code: str,
        message: str,
        hint: str | None = None,
        *,
        member: Member | None = None,
        at_value: bool = False,
        severity: Severity = "error",
        remove: bool = False,
        new: str | None = None,
    ) -> LintFinding:
        """A finding at a dotted key, or at its value; at the beginning of the file where the key is missing.

        member: the key's, where it is known. Fixes: `remove` the key, or write `new` for its value.
        """
        member = member or self.member(where)
        edits: tuple[TextEdit, ...] = ()
        offset = 0 if self.root is None else self.root.start
        if member is not None:
            offset = member.node.start if at_value else member.start
            edits = () if new is None else (TextEdit(member.node.start, member.node.end, new),)
        if remove:
            edits = self.removal(where)
        return self.found(offset, where, code, message, hint, severity=severity, edits=edits)

    def value(self, dotted: str) -> Any:
        """The value at a dotted path; None where there is none."""
        member = self.member(dotted)
        return None if member is None else member.node.plain()

    def member(self, dotted: str) -> Member | None:
        """The member at a dotted path, None where there is none."""
        node, member = self.root, None
        for key in dotted.split("."):
            member = None if node is None else node.get(key)
            if member is None:
                return None
            node = member.node
        return member

    def source(self, dotted: str) -> str:
        """The text of the value at a dotted path; empty where there is none."""
        member = self.member(dotted)
        return "" if member is None else self.text[member.node.start : member.node.end]

    def removal(self, dotted: str) -> tuple[TextEdit, ...]:
        """The edit that removes a member and one of the commas next to it."""
        parent, _, key = dotted.rpartition(".")
        outer = self.member(parent) if parent else None
        holder = self.root if not parent else None if outer is None else outer.node
        member = None if holder is None else holder.get(key)
        return () if holder is None or member is None else removal(holder, member)


def removal(holder: Node, member: Member) -> tuple[TextEdit, ...]:
    """The edit that removes `member` from its object."""
    members = holder.members or []
    at = next(index for index, other in enumerate(members) if other is member)
    if at + 1 < len(members):
        return (TextEdit(member.start, members[at + 1].start),)
    if at > 0:
        return (TextEdit(members[at - 1].node.end, member.node.end),)
    return (TextEdit(member.start, member.node.end),)


def read_json(text: str, file: str, *, in_part: bool = False) -> Document:
    """Read a text; never raises. The findings report what is not strict JSON.

    in_part: of a text that is not JSON, keep what could be read as `root`, for more findings.
    """
    document = Document(file, text)
    document.root = _Reader(document).read()
    if document.is_broken and not in_part:
        wrong = (one for one in document.findings if one.code == "ds-json-syntax" and not one.edits)
        document.root, document.findings = None, [next(wrong)]
    if document.root is not None:
        document.findings += islice(_duplicates(document, document.root, ""), MOST)
    return document


def _duplicates(document: Document, node: Node, path: str) -> Iterator[LintFinding]:
    seen: dict[str, Member] = {}
    values: dict[str, set[str]] = {}
    for member in node.members or ():
        values.setdefault(member.key, set()).add(repr(member.node.plain()))
    for member in node.members or ():
        where = join(path, member.key)
        first = seen.setdefault(member.key, member)
        if first is not member:
            message = (
                f"duplicate key `{member.key}`, first in line {document.place(first.start)[0]}: DeepSpeed "
            )
            message += "refuses it, the Trainer uses the last one"
            # All of them: of 8, 16, 8, the last one is the value that is read.
            same = len(values[member.key]) == 1
            edits, hint = removal(node, member) if same else (), "keep one of them"
            yield document.found(member.start, where, "ds-duplicate-keys", message, hint, edits=edits)
        yield from _duplicates(document, member.node, where)
    for index, item in enumerate(node.items or ()):
        yield from _duplicates(document, item, f"{path}[{index}]")


def join(path: str, key: str) -> str:
    """Dotted path of a child."""
    return f"{path}.{key}" if path else key


def _json_number(text: str) -> str:
    """A number of Python (`+8`, `.5`, `5.e8`, `5_000`, `02`) as JSON writes it."""
    text = re.sub(r"^(-?)0+(?=\d)", r"\1", text.replace("_", "").lstrip("+"))
    return re.sub(r"\.(?=$|[eE])", "", re.sub(r"^(-?)\.", r"\g<1>0.", text))


class _Reader:
    """A recursive reader of one text; at most DEEPEST levels deep."""

    def __init__(self, into: Document) -> None:
        self.into, self.text, self.at = into, into.text, 0

    def read(self) -> Node | None:
        """Read the complete text, or as much of it as can be read; None where that is nothing."""
        if self.text.startswith("\ufeff"):
            message = "starts with a byte order mark, which the Trainer cannot read"
            self.note(0, "", "ds-json-syntax", message, TextEdit(0, 1))
            self.at = 1
        self.skip("")
        if self.at == len(self.text):
            self.stop("the file is empty", 0)
            return None
        root = self.value("", 0)
        self.skip("")
        if self.at < len(self.text):
            self.stop(
                "expected nothing after the end" if root.unread else "extra text after the end", self.at
            )
        return None if root.unread else root

    def note(self, offset: int, path: str, code: str, message: str, *edits: TextEdit) -> None:
        if len(self.into.findings) < MOST:
            self.into.findings.append(self.into.found(offset, path, code, message, edits=edits))

    def wrong(self, message: str, offset: int, hint: str | None = None) -> None:
        """A mistake after which the text can still be read."""
        if len(self.into.findings) < MOST or not self.into.is_broken:
            message = f"not valid JSON: {message}"
            self.into.findings.append(self.into.found(offset, "", "ds-json-syntax", message, hint))
        self.into.is_broken = True

    def stop(self, message: str, offset: int, hint: str | None = None) -> None:
        """A mistake after which only more mistakes would follow: the rest is not read."""
        if not self.into.is_cut:
            self.wrong(message, offset, hint)
        self.into.is_cut, self.at = True, len(self.text)

    def skip(self, path: str) -> None:
        """Skip blanks, and comments with a finding each."""
        while True:
            blank = _BLANK.match(self.text, self.at)
            self.at = self.at if blank is None else blank.end()
            comment = _COMMENT.match(self.text, self.at)
            if comment is None:
                return
            message = "comment: only DeepSpeed accepts it, the Trainer reads strict JSON"
            self.note(self.at, path, "ds-json-comments", message, TextEdit(self.at, comment.end()))
            self.at = comment.end()

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def value(self, path: str, depth: int) -> Node:
        """The value that starts here."""
        if depth > DEEPEST:
            self.stop(f"nested more than {DEEPEST} levels deep", self.at)
        match self.peek():
            case "{":
                return self.object(path, depth)
            case "[":
                return self.list(path, depth)
            case '"' | "'":
                return self.string()
        number = _NUMBER.match(self.text, self.at)
        if number is None:
            return self.word(path)
        start, self.at = self.at, number.end()
        try:
            return Node(start, self.at, json.loads(number[0]))
        except ValueError:  # more digits than Python turns into a number
            self.wrong("a number with too many digits", start)
            return Node(start, self.at, "auto", unread=True)

    def string(self) -> Node:
        """A string; one in single quotes, or with an escape that JSON does not have, is `unread`."""
        start, found = self.at, _STRING.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
            return Node(start, self.at, json.loads(found[0]))
        quoted = _QUOTED.match(self.text, self.at)
        if quoted is None:
            self.stop("unterminated string", start)
        elif quoted[0][0] == "'":
            self.wrong("string in single quotes", start, 'use double quotes: "…"')
        else:
            self.wrong("invalid escape in a string", start)
        self.at = self.at if quoted is None else quoted.end()
        return Node(start, self.at, quoted[0][1:-1] if quoted else "auto", unread=True)

    def word(self, path: str) -> Node:
        """true, false, null, and their spellings in Python and JavaScript."""
        start, found = self.at, _WORD.match(self.text, self.at)
        word = found[0] if found else ""
        self.at += len(word)
        if word in _WORDS:
            return Node(start, self.at, _WORDS[word])
        if word in _PYTHON:
            right = _PYTHON[word]
            message = f"{word} is Python, in JSON it is {right}: the Trainer refuses it, and DeepSpeed reads "
            message += "the rest of the line as a string"
            self.note(start, path, "ds-json-word", message, TextEdit(start, self.at, right))
            return Node(start, self.at, _WORDS[right])
        if word in _NOT_NUMBERS:
            self.note(start, path, "ds-json-number", f"{word} is not a valid number")
            return Node(start, self.at, float(word))
        self.at = start
        self.unexpected("expected a value", stop=not path)
        rest = _UNREAD.match(self.text, self.at)
        self.at = self.at if rest is None else rest.end()
        return Node(start, self.at, "auto", unread=True)

    def unexpected(self, expected: str, hint: str | None = None, *, stop: bool = True) -> None:
        """A mistake, for what is here instead."""
        here, word = self.peek(), _WORD.match(self.text, self.at)
        if not here:
            self.stop(f"unexpected end of file, {expected}", self.at)
            return
        message = f"{expected}, not {here!r}"
        if word is not None:
            shown = SECRET if looks_secret(word[0]) else word[0][:40]
            message, hint = f"{expected}, not the unquoted word {shown}", hint or 'write strings in "…"'
        elif (number := PYTHON_NUMBER.match(self.text, self.at)) is not None:
            shown = number[0][:40]
            message, hint = f"{expected}, not {shown}", hint or f"write {_json_number(shown)}"
        elif not here.isprintable():
            name = unicodedata.name(here, "a control character").lower()
            message, hint = f"{expected}, not U+{ord(here):04X} ({name})", hint or "remove it"
        (self.stop if stop else self.wrong)(message, self.at, hint)

    def list(self, path: str, depth: int) -> Node:
        node = Node(self.at, self.at, None, items=[])
        assert node.items is not None
        while self.next_item(path, "]", bool(node.items)):
            node.items.append(self.value(f"{path}[{len(node.items)}]", depth + 1))
        node.end = self.at
        return node

    def object(self, path: str, depth: int) -> Node:
        node = Node(self.at, self.at, None, members=[])
        assert node.members is not None
        while self.next_item(path, "}", bool(node.members)):
            if self.peek() not in ('"', "'"):
                self.unexpected('expected a key in "…"')
                break
            key = self.string()
            where = join(path, key.value)
            self.skip(where)
            if self.peek() == ":":
                self.at += 1
                self.skip(where)
            elif not self.into.is_cut:
                self.unexpected("expected `:`", stop=self.peek() in ",}]")
            if self.into.is_cut:
                break
            node.members.append(Member(key.value, key.start, key.end, self.value(where, depth + 1)))
        node.end = self.at
        return node

    def next_item(self, path: str, close: str, some: bool) -> bool:
        """Go to the next item; False after the end of the list or object."""
        if not some:
            self.at += 1
        self.skip(path)
        if self.into.is_cut:
            return False
        comma = self.at
        if some and self.peek() == ",":
            self.at += 1
            self.skip(path)
        elif some and self.peek() != close:
            is_next = self.peek() == '"'
            hint = "add a comma to the line before" if is_next else None
            self.unexpected(f"expected `,` or `{close}`", hint, stop=not is_next)
            return is_next
        if self.peek() != close:
            return True
        if comma != self.at and self.text[comma] == ",":
            message = "trailing comma: only DeepSpeed accepts it, the Trainer reads strict JSON"
            self.note(comma, path, "ds-json-comma", message, TextEdit(comma, comma + 1))
        self.at += 1
        return False
