"""Sentences of CoNLL files: a word per line with its labels in columns, an empty line after each sentence.

A row has the columns `tokens` (the first of the file), `labels` (the last) and `column_2`, `column_3`, …
between them, each a list of one text per word. Where the first column counts the words (1, 2, 3), `tokens` is
the second one, and lines of ranges (`3-4`) and empty nodes (`5.1`) are no words; the ten columns of CoNLL-U
have its names, and none is `labels`. Columns are separated by tabs where the first line of words has one,
else by spaces. `-DOCSTART-` and comments before the first word of a sentence (`# text = …`) are left out; `#`
with the columns of a word is a word.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import RecipeError
from launcher.rows.lines import CutOffError, read_lines

SUFFIXES = (".conll", ".conllu", ".conll03", ".bio", ".iob", ".iob2", ".bilou")
_UNIVERSAL = ("id", "tokens", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
"""https://universaldependencies.org/format.html, FORM as `tokens`."""
_METADATA = re.compile(r"#\s*([\w.]+\s*=|id\s|newdoc|newpar)")
_DOCUMENT = "-DOCSTART-"
_NO_WORD = re.compile(r"\d+[-.]\d+")
"""The number of a range of words or of an empty node."""
_PEEK = 1000
"""Lines, within which the first sentence shows the columns."""
_PEEK_BYTES = 1 << 20


class ColumnError(ValueError):
    """A line with another number of columns than the first one."""

    def __init__(self, line: int, found: int, expected: int) -> None:
        super().__init__(f"has {found} columns, the first line of words has {expected}")
        self.line = line


@dataclass(frozen=True, slots=True)
class _Layout:
    separator: str | None
    """None: spaces."""
    names: Sequence[str]
    numbered: bool
    """Whether the first column counts the words."""


def numbered_columns(count: int) -> list[str]:
    """Names of columns that have none: `column_1`, `column_2`, …"""
    return [f"column_{number}" for number in range(1, count + 1)]


def _column_names(count: int) -> list[str]:
    return ["tokens", *numbered_columns(count)[1:-1], "labels"]


def read_sentences(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line of the first word, row) of each sentence. Raises ColumnError.

    lines: (1-based number, text with its line end).
    """
    rest = iter(lines)
    before = list(itertools.islice(rest, _PEEK))
    layout = _layout([line for _, line in before])
    width, start, words = len(layout.names), 0, list[list[str]]()
    for number, line in itertools.chain(before, rest):
        text = line.rstrip("\r\n")
        if not text.strip():
            if words:
                yield start, _row(words, layout)
            words = []
            continue
        cells = text.split(layout.separator)
        if cells[0] == _DOCUMENT or (not words and _is_comment(text, layout.separator, width)):
            continue
        if len(cells) != width or width < 2:
            raise ColumnError(number, len(cells), max(width, 2))
        if layout.numbered and _NO_WORD.fullmatch(cells[0]):
            continue
        start = start if words else number
        words.append(cells)
    if words:
        yield start, _row(words, layout)


def is_conll(path: Path) -> bool:
    """Whether the first lines of a file, whatever its name, are those of several sentences: words without
    spaces, and as many columns everywhere. False for what is no text."""
    try:
        lines = [line for _, line in itertools.islice(read_lines(path, _PEEK_BYTES), _PEEK)]
    except (RecipeError, CutOffError, OSError):
        return False
    layout = _layout(lines)
    texts = [text for line in lines if not (text := line.strip()).startswith(("#", _DOCUMENT))]
    inner = "\n".join(texts).strip().split("\n")
    width, words = len(layout.names), [text.split() for text in inner if text]
    return "" in inner and width > 1 and all(len(cells) == width for cells in words)


def _layout(lines: Sequence[str]) -> _Layout:
    """The columns of the first sentence, from its first line that is surely one of a word."""
    texts = (line.rstrip("\r\n") for line in lines)
    words = itertools.dropwhile(lambda text: not text.strip() or text.startswith(("#", _DOCUMENT)), texts)
    sentence = list(itertools.takewhile(str.strip, words))
    separator = "\t" if sentence and "\t" in sentence[0] else None
    cells = [text.split(separator) for text in sentence] or [[]]
    width = len(cells[0])
    numbers = [row[0] for row in cells if row and not _NO_WORD.fullmatch(row[0])]
    if width > 2 and numbers == [str(number) for number in range(1, len(numbers) + 1)]:
        if width == len(_UNIVERSAL) and separator:
            return _Layout(separator, _UNIVERSAL, numbered=True)
        if len(numbers) > 1:
            return _Layout(separator, ["id", "tokens", *_column_names(width)[2:]], numbered=True)
    return _Layout(separator, _column_names(width) if width > 1 else [""] * width, numbered=False)


def _is_comment(text: str, separator: str | None, width: int) -> bool:
    """Whether a line before the first word of a sentence is a comment: not in the columns of words, or
    separated by spaces and written as metadata are (`# id …`, `# text = …`)."""
    if not text.startswith("#"):
        return False
    return len(text.split(separator)) != width or (separator is None and bool(_METADATA.match(text)))


def _row(words: list[list[str]], layout: _Layout) -> dict[str, Any]:
    columns = [list(column) for column in zip(*words, strict=True)]
    return dict(zip(layout.names, columns, strict=True))
