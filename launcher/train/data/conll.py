"""Sentences of CoNLL files: a word per line with its labels in columns, an empty line after each sentence.

A row has the columns `tokens` (the first of the file), `labels` (the last) and `column_2`, `column_3`, …
between them, each a list of one text per word. Columns are separated by tabs where a file's first line of
words has one, else by spaces. `-DOCSTART-` and comments before the first word of a sentence (`# text = …`)
are left out; `#` with the columns of a word is a word.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

SUFFIXES = (".conll", ".conll03", ".bio", ".iob", ".iob2", ".bilou")
_METADATA = re.compile(r"#\s*([\w.]+\s*=|id\s|newdoc|newpar)")
_DOCUMENT = "-DOCSTART-"


class ColumnError(ValueError):
    """A line with another number of columns than the first one."""

    def __init__(self, line: int, found: int, expected: int) -> None:
        super().__init__(f"has {found} columns, the first line of words has {expected}")
        self.line = line


def column_names(count: int) -> list[str]:
    return ["tokens", *(f"column_{number}" for number in range(2, count)), "labels"]


def read_sentences(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line of the first word, row) of each sentence. Raises ColumnError.

    lines: (1-based number, text with its line end).
    """
    separator, width, lines = _layout(lines)
    start, words = 0, list[list[str]]()
    for number, line in lines:
        text = line.rstrip("\r\n")
        if not text.strip():
            if words:
                yield start, _row(words)
            words = []
            continue
        cells = text.split(separator)
        if cells[0] == _DOCUMENT or (not words and _is_comment(text, separator, width)):
            continue
        if len(cells) != width or width < 2:
            raise ColumnError(number, len(cells), max(width, 2))
        start = start if words else number
        words.append(cells)
    if words:
        yield start, _row(words)


def _layout(lines: Iterable[tuple[int, str]]) -> tuple[str | None, int, Iterator[tuple[int, str]]]:
    """Separator and number of columns of the first line that is surely one of a word, and all lines."""
    rest, before = iter(lines), list[tuple[int, str]]()
    for number, line in rest:
        before.append((number, line))
        text = line.rstrip("\r\n")
        if text.strip() and not text.startswith(("#", _DOCUMENT)):
            separator = "\t" if "\t" in text else None
            return separator, len(text.split(separator)), itertools.chain(before, rest)
    return None, 0, iter(before)


def _is_comment(text: str, separator: str | None, width: int) -> bool:
    """Whether a line before the first word of a sentence is a comment: not in the columns of words, or
    separated by spaces and written as metadata are (`# id …`, `# text = …`)."""
    if not text.startswith("#"):
        return False
    return len(text.split(separator)) != width or (separator is None and bool(_METADATA.match(text)))


def _row(words: list[list[str]]) -> dict[str, Any]:
    columns = [list(column) for column in zip(*words, strict=True)]
    return dict(zip(column_names(len(columns)), columns, strict=True))
