"""A shell script as the commands that it writes out, with the line of each word. Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PLACEHOLDER = re.compile(r"<[A-Za-z_][\w ./-]*>")
_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_WHOLE_ARRAY = re.compile(r"\{([A-Za-z_]\w*)\[[@*]\]\}")
_OPENS, _CLOSES = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")
_VARIABLE = re.compile(r"\{([A-Za-z_]\w*)(?::?-([^{}$`]*))?\}|([A-Za-z_]\w*)|[@*#?!0-9]")
_SPLITS = re.compile(r"^(?=.*\s)(?:[^$`<]|\$\{?\w+\}?)*$", re.DOTALL)
"""Several words, of which the unknown ones are plain variables: which flags these are is known."""
_LONGEST = 10_000
"""Letters of a variable, words of an array: one that holds others several times grows without end."""
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")
_REDIRECTION = re.compile(r"\d*(?:>>|>&|&>>|&>|>|<)\s*&?\d?")


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command."""

    text: str
    """With what could not be known as it is written: `$(…)`, `<your_path>`."""
    line: int
    open: bool = False
    """Whether a part of it is only known when the script runs."""


@dataclass(slots=True)
class Script:
    """What a text of shell says."""

    commands: list[list[Word]] = field(default_factory=list)
    variables: dict[str, Word] = field(default_factory=dict)
    """Assigned once; what is not known of the value stands in it as `$NAME`, within one word."""
    arrays: dict[str, list[Word]] = field(default_factory=dict)
    """Of NAME=(…), with what NAME+=(…) adds."""
    exported: list[tuple[str, Word]] = field(default_factory=list)
    sbatch: list[tuple[str, int]] = field(default_factory=list)
    """Text behind `#SBATCH`, and its line."""


def read_script(text: str) -> Script:
    """Read all commands of a text; variables that are assigned once are put in."""
    script = Script()
    often = _assigned_often(text)
    tokens = _Tokens(text, script)
    for words in tokens.commands():
        _take(script, words, often, certain=not (tokens.blocks or tokens.depends))
    return script


def _assigned_often(text: str) -> set[str]:
    """Variables with more than one assignment, whose value depends on the way that is gone."""
    names = re.findall(r"(?m)(?:^|[;&|]|\b(?:then|else|do|export|local)\b)\s*([A-Za-z_]\w*)\+?=", text)
    loops = re.findall(r"\b(?:for|read)\s+([A-Za-z_]\w*)", text)
    return {name for name in names if names.count(name) > 1} | set(loops)


def _take(script: Script, words: list[Word], often: set[str], *, certain: bool) -> None:
    """Keep a command; one that only assigns is kept as variables, and certain ones have a value."""
    start = 1 if words and words[0].text in ("export", "declare", "local", "readonly") else 0
    matches = [_ASSIGNMENT.fullmatch(word.text) for word in words[start:]]
    if not all(matches) or (not start and not words):
        script.commands.append(words)
        return
    for match, word in zip(matches, words[start:], strict=True):
        if match is None:
            continue
        value = Word(match[2], word.line, word.open)
        if (
            len(match[2]) <= _LONGEST
            and certain
            and match[1] not in often
            and (not word.open or _SPLITS.search(match[2]))
        ):
            script.variables[match[1]] = value
        if start:
            script.exported.append((match[1], value))


class _Tokens:
    """Goes through the text once."""

    def __init__(self, text: str, script: Script) -> None:
        self.text, self.script = text, script
        self.at, self.line = 0, 1
        self.words: list[Word] = []
        self.letters: list[str] | None = None
        self.started, self.open = 1, False
        self.heredocs: list[str] = []
        self.depends = False
        """Whether what stands here is run only if the command before it succeeds, or fails."""
        self.blocks = 0
        """How many `if` and loops are around: what is assigned there may not be run."""

    def commands(self) -> Iterator[list[Word]]:
        """The commands in their order."""
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter == "\n":
                yield from self._finish()
                self.depends = False
                self._step()
                self._skip_heredocs()
            elif letter == "(" and self._begins_array():
                self._array()
            elif letter in ";()" or (letter in "&|" and not self.text.startswith("&>", self.at)):
                yield from self._finish()
                self.depends = self.text[self.at : self.at + 2] in ("&&", "||")
                self._step(2 if self.depends else 1)
            elif letter in " \t\r":
                self._end_word()
                self._step()
            else:
                self._letter(letter)
        yield from self._finish()

    def _begins_array(self) -> bool:
        text = "".join(self.letters or ())
        return _ARRAY.fullmatch(text) is not None and all(
            word.text in ("local", "declare", "readonly", "export", "then", "else", "do", "-a")
            for word in self.words
        )

    def _array(self) -> None:
        """`NAME=(a b)`, `NAME+=(c)`: its words, which are no command."""
        match = _ARRAY.fullmatch("".join(self.letters or ()))
        self.letters, self.words = None, []
        self._step()
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] in " \t\r\n":
                self._end_word()
                self._step()
            else:
                self._letter(self.text[self.at])
        self._end_word()
        self._step()
        if match is not None:
            self._keep_array(match[1], self.words, added=bool(match[2]))
        self.words = []

    def _keep_array(self, name: str, words: list[Word], *, added: bool) -> None:
        before = self.script.arrays.get(name, [])
        if self.blocks or self.depends or len(words) > _LONGEST:
            words = [*before, Word(f"${{{name}[@]}}", self.line, open=True)]
        elif added:
            words = [*before, *words]
        self.script.arrays[name] = words

    def _step(self, count: int = 1) -> str:
        taken = self.text[self.at : self.at + count]
        self.line += taken.count("\n")
        self.at += count
        return taken

    def _letter(self, letter: str) -> None:
        if letter == "\\":
            self._step()
            after = self._step()
            if after == "\r" and self.text[self.at : self.at + 1] == "\n":
                after = self._step()
            if after != "\n":
                self._add(after)
        elif letter == "#" and self.letters is None:
            end = self.text.find("\n", self.at)
            comment = self._step((len(self.text) if end < 0 else end) - self.at)
            if comment.startswith("#SBATCH"):
                self.script.sbatch.append((comment[len("#SBATCH") :].strip(), self.line))
        elif letter == "'":
            end = self.text.find("'", self.at + 1)
            self._add(self._step((len(self.text) if end < 0 else end + 1) - self.at).strip("'"))
        elif letter == '"':
            self._quoted()
        elif letter in "$`":
            self._expand(split=True)
        elif letter in "<>" or (letter == "&"):
            self._redirect()
        else:
            self._add(self._step())

    def _add(self, text: str) -> None:
        if self.letters is None:
            self.letters, self.started, self.open = [], self.line, False
        self.letters.append(text)

    def _quoted(self) -> None:
        self._step()
        self._add("")
        while self.at < len(self.text) and self.text[self.at] != '"':
            if self.text[self.at] == "\\":
                self._step()
                after = self._step()
                self._add("" if after == "\n" else after if after in '"\\$`' else f"\\{after}")
            elif self.text[self.at] in "$`":
                self._expand(split=False)
            else:
                self._add(self._step())
        self._step()

    def _expand(self, *, split: bool) -> None:
        """A variable, or what is only known when the script runs."""
        if self.text[self.at] == "`" or self.text.startswith("$(", self.at):
            self._unknown(self._substitution())
            return
        whole = _WHOLE_ARRAY.match(self.text, self.at + 1)
        if whole is not None and whole[1] in self.script.arrays:
            self._step(whole.end() - self.at)
            self._expand_array(self.script.arrays[whole[1]])
            return
        match = _VARIABLE.match(self.text, self.at + 1)
        if match is None:
            closing = self.text.find("}", self.at) if self.text.startswith("${", self.at) else -1
            self._unknown(self._step(closing + 1 - self.at if closing > 0 else 1))
            return
        name, default = match[1] or match[3], match[2]
        value = self.script.variables.get(name or "")
        written = self._step(match.end() - self.at)
        if value is None and default is None:
            self._unknown(written)
            return
        text = value.text if value is not None else default
        is_open = value is not None and value.open
        if not split or not re.search(r"\s", text):
            self._add(text)
            self.open = self.open or is_open
            return
        parts = text.split()
        for part in parts:
            self._add(part)
            self.open = self.open or (is_open and "$" in part)
            if part is not parts[-1]:
                self._end_word()

    def _expand_array(self, words: list[Word]) -> None:
        """Each word of it as a word; none leaves nothing."""
        for word in words:
            self._add(word.text)
            self.open = self.open or word.open
            if word is not words[-1]:
                self._end_word()
        if not words and not any(self.letters or ()):
            self.letters = None

    def _substitution(self) -> str:
        if self.text[self.at] == "`":
            end = self.text.find("`", self.at + 1)
            return self._step((len(self.text) if end < 0 else end + 1) - self.at)
        depth, end = 0, self.at
        while end < len(self.text):
            depth += {"(": 1, ")": -1}.get(self.text[end], 0)
            end += 1
            if depth == 0 and self.text[end - 1] == ")":
                break
        return self._step(end - self.at)

    def _unknown(self, text: str) -> None:
        self._add(text)
        self.open = True

    def _redirect(self) -> None:
        placeholder = _PLACEHOLDER.match(self.text, self.at)
        if placeholder is not None:
            self._unknown(self._step(placeholder.end() - self.at))
            return
        heredoc = _HEREDOC.match(self.text, self.at)
        if heredoc is not None:
            self.heredocs.append(heredoc[1])
            self._step(heredoc.end() - self.at)
            return
        if self.letters is not None and "".join(self.letters).isdecimal():
            self.letters = None
        self._end_word()
        match = _REDIRECTION.match(self.text, self.at)
        taken = self._step(match.end() - self.at if match else 1)
        if not re.search(r"&\d$", taken):  # its file, which is no word of the command
            rest = re.compile(r"[^\s;&|]*").match(self.text, self.at)
            self._step(rest.end() - self.at if rest else 0)

    def _skip_heredocs(self) -> None:
        for word in self.heredocs:
            end = re.compile(rf"(?m)^\s*{re.escape(word)}\s*$").search(self.text, self.at)
            self._step((end.end() if end else len(self.text)) - self.at)
        self.heredocs = []

    def _end_word(self) -> None:
        if self.letters is not None:
            self.words.append(Word("".join(self.letters), self.started, self.open))
        self.letters, self.open = None, False

    def _finish(self) -> Iterator[list[Word]]:
        self._end_word()
        if self.words:
            first = self.words[0].text
            self.blocks = max(0, self.blocks + (first in _OPENS) - (first in _CLOSES))
            yield self.words
        self.words = []
