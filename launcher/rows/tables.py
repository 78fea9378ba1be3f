"""CSV and TSV files to numbered rows."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import RecipeError
from launcher.recipe.suggestions import listed
from launcher.rows.conll import is_conll, numbered_columns
from launcher.rows.lines import CutOffError, Numbered, fault, read_lines
from launcher.tasks import FORMATS

DELIMITERS: Mapping[str, str] = {".csv": ",", ".tsv": "\t"}
_CELL_CHARACTERS = 1 << 26  # an unclosed quote must not swallow a whole file
_COMPARED_ROWS = 50
_LONG_WORDS = 8
_NAME_WORDS = 2
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
NO_HEADER = (
    "set `header: false` beside `path`, and name columns by their number: `columns: {FIELD: column_1}`"
)
_FIELDS = frozenset(field for one in FORMATS.values() for field in one.fields)


def read_table(
    path: Path, limit: int | None, delimiter: str, source: Mapping[str, Any]
) -> Iterator[Numbered]:
    """A row for each line below the header, or for each line where the source has `header: false`.

    A cell of a TSV file with a tab after a line break is refused: a single quote that begins a cell takes the
    rows up to the next quote into it.
    """
    if delimiter == "\t" and is_conll(path):
        message = "holds a word per line and an empty line between sentences (CoNLL)"
        raise fault(path, None, message, "rename it to end in .conll")
    header: Sequence[str] = ()
    compared = 0
    for line, cells in _cells(path, limit, delimiter, source):
        if not header:
            if source.get("header") is False:
                header = numbered_columns(len(cells))
            else:
                header = _checked_header(path, cells, delimiter, line)
                if source.get("header") is None:
                    _refuse_row(path, header, line)
                continue
        if len(cells) != len(header):
            message = f"has {len(cells)} cells, but the header has {len(header)} ({listed(header)})"
            hint = "put quotes around a cell that holds the separator or a line break"
            raise fault(path, line, message, hint + _unquoted(path, limit, delimiter, len(header)))
        if delimiter == "\t" and (wide := next((c for c in cells if "\t" in c.partition("\n")[2]), None)):
            name = header[cells.index(wide)]
            message = f"column {name} holds a line break and a tab after it: are these several rows?"
            hint = "quote a cell that holds quotes and write each inner one twice, or use .jsonl"
            raise fault(path, line, message, hint + _unquoted(path, limit, delimiter, len(header)))
        if source.get("header") is None and compared < _COMPARED_ROWS:
            compared += 1
            _refuse_repeated(path, header, cells)
        yield line, dict(zip(header, cells, strict=True))


def _cells(
    path: Path, limit: int | None, delimiter: str, source: Mapping[str, Any]
) -> Iterator[tuple[int, list[str]]]:
    """(first line, cells) of each record."""
    csv.field_size_limit(_CELL_CHARACTERS)
    plain = source.get("quoting") == "none"
    lines = (line for _, line in read_lines(path, limit))
    reader = csv.reader(
        lines, delimiter=delimiter, quoting=csv.QUOTE_NONE if plain else csv.QUOTE_MINIMAL, strict=True
    )
    width = None
    while True:
        start = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            hint = "is a quote left open? a quote inside a quoted cell is written twice"
            hint += _unquoted(path, limit, delimiter, width)
            raise fault(path, start, f"is not CSV: {error}", hint) from error
        if cells is None:
            return
        if cells:
            width = width or len(cells)
            yield start, cells


def _unquoted(path: Path, limit: int | None, delimiter: str, width: int | None) -> str:
    """The hint to read quotes as text; empty where a line then has another number of cells."""
    try:
        for _, line in read_lines(path, limit):
            if line.strip("\r\n") and line.count(delimiter) + 1 != width:
                return ""
    except CutOffError:
        pass
    return "; or, if quotes are text, set `quoting: none` beside `path`"


def _checked_header(path: Path, header: list[str], delimiter: str, line: int) -> list[str]:
    others = [mark for mark in (",", ";", "\t") if mark != delimiter and mark in header[0]]
    if len(header) == 1 and others and len(header[0].split()) < _LONG_WORDS:
        hint = "save it with commas as .csv, or with tabs as .tsv"
        raise fault(path, line, f"the cells seem to be separated by {others[0]!r}", hint)
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        message = f"the header names {listed(map(repr, twice))} twice"
        hint = "rename or delete one of them; if the first line is a row, set `header: false` beside `path`"
        raise fault(path, line, message, hint)
    return header


def _refuse_row(path: Path, header: list[str], line: int) -> None:
    for cell in header:
        if len(cell.split()) >= _LONG_WORDS or _is_fraction(cell):
            raise _no_header(path, line, f"{cell[:60]!r} in the first line is an odd name of a column")


def _is_fraction(cell: str) -> bool:
    """Whether a cell is a number that is not whole; whole ones name columns in files of pandas."""
    return _NUMBER.fullmatch(cell.strip()) is not None and not cell.strip().isdigit()


def _refuse_repeated(path: Path, header: Sequence[str], cells: Sequence[str]) -> None:
    same = [name for name, cell in zip(header, cells, strict=True) if cell == name and name.strip()]
    # Beside the name of a field, it is one value that is alike.
    is_header = 2 * len(same) <= len(header) and not _FIELDS.isdisjoint(set(header) - set(same))
    if same and not is_header and not all(name.isdigit() for name in same):
        message = f"the column {same[0]!r} holds its own name as a value: is the first line a row?"
        raise _no_header(path, 1, message)


def _no_header(path: Path, line: int, message: str) -> RecipeError:
    return fault(path, line, message, f"{NO_HEADER}; or `header: true`, if the line names the columns")


def may_lack_header(file: str, names: Iterable[str]) -> bool:
    """Whether the names of a table's columns may be values: a whole number or a text of several words."""
    is_table = not DELIMITERS.keys().isdisjoint(Path(file).suffixes)
    return is_table and any(name.isdigit() or len(name.split()) > _NAME_WORDS for name in names)
