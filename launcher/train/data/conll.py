"""Sentences of CoNLL files: a word per line with its labels in columns, an empty line after each sentence.

A row has the columns `tokens` (the first of the file), `labels` (the last) and `column_2`, `column_3`, …
between them, each a list of one text per word. Columns are separated by tabs where a file's first line of
words has one, else by spaces. `-DOCSTART-` and comments (`# text = …`) are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

SUFFIXES = (".conll", ".conll03", ".bio", ".iob", ".iob2", ".bilou")
_COMMENT = re.compile(r"#\s*([\w.]+\s*=|id\s|newdoc|newpar)")
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
    separator: str | None = None
    width = 0
    start, words = 0, list[list[str]]()
    for number, line in lines:
        text = line.rstrip("\r\n")
        if not text.strip():
            if words:
                yield start, _row(words)
            words = []
            continue
        if not width and not text.startswith("#"):
            separator = "\t" if "\t" in text else None
        cells = text.split(separator)
        if text.startswith("#") and (_COMMENT.match(text) or not width or len(cells) != width):
            continue
        if cells[0] == _DOCUMENT:
            continue
        width = width or len(cells)
        if len(cells) != width or width < 2:
            raise ColumnError(number, len(cells), max(width, 2))
        start = start if words else number
        words.append(cells)
    if words:
        yield start, _row(words)


def _row(words: list[list[str]]) -> dict[str, Any]:
    columns = [list(column) for column in zip(*words, strict=True)]
    return dict(zip(column_names(len(columns)), columns, strict=True))
