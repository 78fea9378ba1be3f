"""The commands of a shell file, read without running it.

Read are words, quotes, comments, and variables and arrays that the file assigns exactly once, to literals and
outside of any condition, loop or function. All else (`$(…)`, `${X:-y}`, `$1`, the environment) stays as it is
written, and its word is open.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from launcher.errors import Problem, RecipeError

_NAME = r"[A-Za-z_]\w*"
_VARIABLE = rf"\$(?P<name>{_NAME})|\$\{{(?P<braced>{_NAME})\}}|\$\{{(?P<array>{_NAME})\[@\]\}}"
_COMPUTED = (  # three brackets deep
    r"\$\((?:[^()]++|\((?:[^()]++|\([^()]*+\))*+\))*+\)|`[^`]*`"
    r"|\$\{(?:[^{}]++|\{(?:[^{}]++|\{[^{}]*+\})*+\})*+\}"
    r"|\$(?![({])[\w@*#?!$-]?"
)
_TOKEN = re.compile(
    r"(?P<blank>[ \t\r]+)|(?P<joined>\\\r?(?:\n|\Z))|(?P<comment>(?<![^\s;&|()])#[^\n]*)|(?P<newline>\n)"
    r"|(?P<heredoc><<-?[ \t]*(?P<q>['\"]?)(?P<end>\w+)(?P=q))|(?P<operator>&&|\|\||(?!&>)[;&|()])"
    rf"|{_VARIABLE}|(?P<open>{_COMPUTED}|<[A-Za-z_](?:[\w ./-]*[\w./-])?>)"
    r"|(?P<redirect>\d*(?:&>>?|>>?|<<<|<)(?:&[\d-])?)|'(?P<text>[^']*)'|\\(?P<escape>.)"
    rf"|(?P<double>\"(?:[^\"\\$`]++|\\.|{_COMPUTED})*+\")|(?P<plain>[^\s'\"\\$`;&|()<>]+)|(?P<bad>\$?.)",
    re.DOTALL,
)
_INSIDE = re.compile(
    rf"\\(?P<escape>[\"\\$`])|\\\n|{_VARIABLE}|(?P<open>{_COMPUTED})|(?P<plain>[^\\$`]+|\\)", re.DOTALL
)
_ASSIGNMENT = re.compile(rf"({_NAME})(\[[^]]*\]|\+)?=")
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_CHANGES = ("for", "select", "read", "unset", "mapfile", "readarray", "getopts")
_OPENS, _CLOSES = ("if", "for", "while", "until", "case", "select"), ("fi", "done", "esac", "}")
_BEFORE = ("then", "else", "elif", "do", "!", "time", "{")
_MOST = 1_000_000
"""Characters that variables may add in all: one that holds others several times grows without end."""


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command."""

    text: str
    """Unknown parts stay as they are written: `$(…)`, `<your_path>`."""
    line: int
    open: bool = False
    """Whether a part of it is only known when the script runs."""


@dataclass(slots=True)
class Script:
    """The commands of a text of shell, and its exported variables."""

    commands: list[list[Word]] = field(default_factory=list)
    exported: list[tuple[str, Word]] = field(default_factory=list)


@dataclass(slots=True)
class _Raw:
    """A word whose variables are not replaced yet."""

    line: int
    pieces: list[re.Match[str]] = field(default_factory=list)
    """Of `_TOKEN`, or of `_INSIDE` where they stand in double quotes."""
    items: list[_Raw] | None = None
    """Of `NAME=( … )`."""

    def plain(self) -> str:
        """The word, where it is one unquoted literal; else an empty text."""
        alone = len(self.pieces) == 1 and self.pieces[0].re is _TOKEN
        return (self.pieces[0]["plain"] or "") if alone else ""

    def assigned(self) -> re.Match[str] | None:
        bare = self.pieces and self.pieces[0].re is _TOKEN and self.pieces[0].lastgroup == "plain"
        return _ASSIGNMENT.match(self.pieces[0]["plain"]) if bare else None


def read_script(text: str, file: str = "") -> Script:
    """Read all commands of a text. RecipeError with the line of a quote or bracket that is not closed."""
    scanner = _Scanner(text, file)
    scanner.scan()
    known = _Known(Counter(name for words, _ in scanner.commands for name in _changed(words)))
    script = Script()
    for words, certain in scanner.commands:
        assignments = _assignments(words)
        assigned = [known.assign(raw, found, certain=certain) for raw, found in assignments]
        if words[0].plain() == "export":
            script.exported += assigned
        if not assignments and (made := [word for raw in words for word in known.expand(raw)]):
            script.commands.append(made)
    return script


def _assignments(words: list[_Raw]) -> list[tuple[_Raw, re.Match[str]]]:
    """The words of a command that only assigns, or declares."""
    declares = words[0].plain() in _DECLARES
    found = [(word, match) for word in words[declares:] if (match := word.assigned())]
    return found if declares or len(found) == len(words) else []


def _changed(words: list[_Raw]) -> Iterator[str]:
    """Variables that a command changes."""
    if any(word.plain() in _CHANGES for word in words[:3]):  # while IFS= read -r NAME
        yield from (word.plain() for word in words)
    yield from (found[1] for _, found in _assignments(words))


class _Scanner:
    """Cuts the text into commands and words, in one pass."""

    def __init__(self, text: str, file: str) -> None:
        self.text, self.file, self.line = text, file, 1
        self.commands: list[tuple[list[_Raw], bool]] = []  # and whether it is run once, whatever happens
        self.words: list[_Raw] = []
        self.word: _Raw | None = None
        self.array: tuple[_Raw, list[_Raw]] | None = None  # that is read, and the words before it
        self.heredocs: list[str] = []
        self.blocks = self.brackets = 0  # compound commands and subshells that are open
        self.depends = False  # whether the command is run only if the one before it succeeds, or fails
        self.redirected = False  # whether the next word is the file of a redirection

    def scan(self) -> None:
        at = 0
        while found := _TOKEN.match(self.text, at):
            self.take(found.lastgroup or "", found)
            end = found.end()
            while found.lastgroup == "newline" and self.heredocs:
                last = re.compile(rf"(?m)^[ \t]*{self.heredocs.pop(0)}[ \t\r]*$").search(self.text, end)
                end = last.end() if last else len(self.text)
            self.line += self.text.count("\n", at, end)
            at = end
        if self.array is not None:
            raise self.unclosed("(", self.array[0].line)
        self.finish("")

    def unclosed(self, token: str, line: int) -> RecipeError:
        message = f"{token} is not closed, or what is in it is nested too deep to be read"
        return RecipeError(Problem("import-unreadable", message, self.file, line))

    def take(self, kind: str, found: re.Match[str]) -> None:
        token = found[0]
        if kind == "bad":
            raise self.unclosed(token, self.line)
        if kind in ("blank", "redirect") or (kind == "newline" and self.array is not None):
            self.end_word()
            self.redirected = self.redirected if kind != "redirect" else "&" not in token[1:]
        elif kind == "newline":
            self.finish(token)
        elif kind == "heredoc":
            self.heredocs.append(found["end"])
        elif kind == "operator":
            self.operator(token)
        elif kind not in ("comment", "joined"):
            self.word = self.word or _Raw(self.line)
            self.word.pieces += _INSIDE.finditer(token[1:-1]) if kind == "double" else [found]

    def operator(self, token: str) -> None:
        begun = self.word
        if self.array is not None:
            self.end_word()
            if token == ")":
                (array, before), self.array = self.array, None
                array.items, self.words = self.words, [*before, array]
        elif token == "(" and begun is not None and begun.plain().endswith("=") and begun.assigned():
            self.array, self.word, self.words = (begun, self.words), None, []
        else:
            self.finish(token)
            self.brackets = max(0, self.brackets + (token == "(") - (token == ")"))

    def end_word(self) -> None:
        word, self.word = self.word, None
        if word is not None and not self.words and self.array is None and word.plain() in _BEFORE:
            self.blocks += word.plain() == "{"
        elif word is not None:
            self.words += [] if self.redirected else [word]
            self.redirected = False

    def finish(self, token: str) -> None:
        """End a command, and note what the next one depends on."""
        self.end_word()
        if self.words:
            first = self.words[0].plain()
            self.blocks += first in _OPENS or (first == "function" and self.words[-1].plain() == "{")
            self.commands.append((self.words, not (self.blocks or self.brackets or self.depends)))
            self.blocks = max(0, self.blocks - (first in _CLOSES))
            self.depends = token in ("&&", "||")
        self.words, self.redirected = [], False


class _Known:
    """The variables and arrays that are assigned once."""

    def __init__(self, often: Counter[str]) -> None:
        self.often, self.left = often, _MOST
        self.values: dict[str, str] = {}
        self.arrays: dict[str, list[Word]] = {}

    def assign(self, raw: _Raw, found: re.Match[str], *, certain: bool) -> tuple[str, Word]:
        """Keep a value where it is certain; the name and the value."""
        name, certain = found[1], certain and self.often[found[1]] == 1 and not found[2]
        parts = [self.part(piece) for piece in raw.pieces]
        is_open = raw.items is not None or not certain or any(unknown for _, unknown in parts)
        word = Word("".join(text for text, _ in parts)[found.end() :], raw.line, is_open)
        if not is_open:
            self.values[name] = word.text
        elif certain and raw.items is not None:
            self.arrays[name] = [word for item in raw.items for word in self.expand(item)]
        return name, word

    def part(self, piece: re.Match[str]) -> tuple[str, bool]:
        """The text of a piece, and whether it is only known when the script runs."""
        kind = piece.lastgroup or "escape"
        value = self.values.get(piece[kind] or "") if kind in ("name", "braced") else None
        if value is not None and self.left > len(value):
            self.left -= len(value) + 1
            return value, False
        is_open = kind in ("name", "braced", "array", "open")
        return (piece[0] if is_open else piece[kind] or ""), is_open

    def expand(self, raw: _Raw) -> Iterator[Word]:
        """The words that a shell makes of one."""
        array = self.arrays.get(raw.pieces[0]["array"] or "") if len(raw.pieces) == 1 else None
        if array is not None and self.left > (size := sum(len(word.text) + 1 for word in array)):
            self.left -= size
            yield from (Word(word.text, raw.line, word.open) for word in array)
            return
        letters: list[str] = []
        is_open, started = False, not raw.pieces
        for piece in raw.pieces:
            text, unknown = self.part(piece)
            splits = piece.lastgroup in ("name", "braced") and piece.re is _TOKEN and not unknown
            for at, part in enumerate(re.split(r"\s+", text) if splits else [text]):
                if at and started:
                    yield Word("".join(letters), raw.line, is_open)
                    letters, is_open, started = [], False, False
                letters.append(part)
                is_open, started = is_open or unknown, started or bool(part) or not splits
        if started:
            yield Word("".join(letters), raw.line, is_open)
