"""One data file to numbered rows: JSON lines, JSON, CSV, TSV, Parquet, Arrow, CoNLL and text, each also
compressed.

Files are read a line or a record batch at a time; only a `.json` file that holds one list is read into memory
completely. Every fault is a RecipeError with file and line.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import csv
import gzip
import io
import json
import lzma
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from launcher.errors import Problem, RecipeError
from launcher.recipe.suggestions import listed
from launcher.train.data import conll

TWICE_HINT = "which of the two values is meant? remove the other one"
Numbered = tuple[int, dict[str, Any]]
"""(1-based physical line, or row where the file has no lines; the row's values)."""
_BUFFER_BYTES = 1 << 20
_BATCH_ROWS = 256  # of Parquet and Arrow: a batch of images must fit in memory too
_CELL_CHARACTERS = 1 << 26  # of CSV: an unclosed quote must not swallow a whole file
_ROW_KEYS = ("data", "rows")
_ROW_HINT = 'a row is written {"column": value, ...}'
_BROKEN_PACKING = (EOFError, OSError, zlib.error, lzma.LZMAError)


class KeyTwiceError(ValueError):
    """An object has a key twice, of which Python's json keeps the last."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise KeyTwiceError(f"an object has the key {twice!r} twice")
    return found


ROWS = json.JSONDecoder(object_pairs_hook=_object)
"""Raises KeyTwiceError, JSONDecodeError and RecursionError."""


def keys_alike(value: Any, rows: list[Any]) -> list[str]:
    """Keys of an object that hold rows with a column of `rows`, those of `rows` included."""
    return [
        key
        for key, other in (value.items() if isinstance(value, dict) else ())
        if isinstance(other, list)
        and any(isinstance(row, dict) and row.keys() & rows[0].keys() for row in other[:1])
    ]


def data_suffix(path: Path) -> str:
    """The suffix of what a file holds, in lower case: `.jsonl` for `a.JSONL.gz`."""
    name = path.name.lower()
    for packing in _OPENERS:
        name = name.removesuffix(packing)
    return Path(name).suffix


def is_data_file(path: Path) -> bool:
    return data_suffix(path) in KINDS


def known_suffixes() -> str:
    """For messages: `.jsonl .ndjson ... , each also as .gz ...`."""
    return f"{' '.join(KINDS)}, each also as {' '.join(_OPENERS)}"


class CutOffError(Exception):
    """The bytes that were to be read are used up, and the file is not."""


def read_file(path: Path, scratch: Path | None = None, limit: int | None = None) -> Iterator[Numbered]:
    """Rows of a file whose `is_data_file` holds. `scratch` is where a packed Parquet file is unpacked.

    limit: bytes after which a file that is read by lines raises CutOffError. RecipeError names file and line.
    """
    try:
        if reader := _LINE_READERS.get(data_suffix(path)):
            yield from reader(path, limit)
            return
        with _unpacked(path, scratch) as plain:
            yield from _columnar_rows(plain, path)
    except _BROKEN_PACKING as error:  # of opening; the line readers name the line themselves
        raise fault(path, None, f"cannot be read: {error}", "is the file complete?") from error


def fault(path: Path, line: int | None, message: str, hint: str | None = None) -> RecipeError:
    """A RecipeError about a place in a data file."""
    return RecipeError(Problem("data-unreadable", message, file=str(path), line=line, hint=hint))


def _open(path: Path) -> IO[bytes]:
    """The file's bytes, unpacked on the way."""
    opener = _OPENERS.get(path.suffix.lower())
    return io.BufferedReader(opener(path), _BUFFER_BYTES) if opener else path.open("rb", _BUFFER_BYTES)


def _open_zst(path: Path) -> Any:
    import pyarrow  # comes with datasets; the standard library reads zstd from Python 3.14 on

    return pyarrow.input_stream(str(path), compression="zstd")


_OPENERS: Mapping[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zst,
}


def _lines(path: Path, limit: int | None) -> Iterator[tuple[int, str]]:
    """Numbered lines with their line ends, only `\\n` counting as one (JSON text may hold U+2028)."""
    number = 0
    try:
        with _open(path) as stream:
            lines = stream if limit is None else _first_lines(stream, limit)
            for number, raw in enumerate(lines, start=1):
                if number == 1:
                    raw = _without_mark(path, raw)
                yield number, raw.decode("utf-8")
    except UnicodeDecodeError as error:
        why = f"not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start + 1} of the line"
        hint = "convert it, for example with `iconv -f latin1 -t utf-8`"
        raise fault(path, number, why, hint) from error
    except _BROKEN_PACKING as error:
        hint = "the file is cut off or damaged; copy it anew"
        raise fault(path, number or None, f"cannot be read further: {error}", hint) from error


def _first_lines(stream: IO[bytes], limit: int) -> Iterator[bytes]:
    while raw := stream.readline(limit + 1):
        limit -= len(raw)
        if limit < 0:
            raise CutOffError
        yield raw


def _without_mark(path: Path, first: bytes) -> bytes:
    """The first line without UTF-8's byte order mark; UTF-16 is named as what it is."""
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise fault(path, 1, "is UTF-16, expected UTF-8", "convert it: `iconv -f utf-16 -t utf-8`")
    return first.removeprefix(codecs.BOM_UTF8)


def _read_json_lines(path: Path, limit: int | None) -> Iterator[Numbered]:
    # The standard library and not datasets' Arrow reader: that one unifies the objects of a column
    # into one struct and fills the keys which a row lacks with None (so a tool call gets the
    # arguments of all other tools), and it does not report the line of a fault.
    decode = ROWS.decode
    for number, line in _lines(path, limit):
        try:
            row = decode(line)
        except KeyTwiceError as error:
            raise fault(path, number, str(error), TWICE_HINT) from error
        except (ValueError, RecursionError) as error:
            if not line.strip():
                continue
            raise _bad_json(path, number, line, error) from error
        if type(row) is not dict:
            raise fault(path, number, f"holds a JSON {_json_kind(row)}, expected an object", _ROW_HINT)
        if "\\ud" in line or "\\uD" in line:
            _refuse_half_characters(path, number, row)
        yield number, row


def _bad_json(path: Path, line: int, text: str, error: Exception) -> RecipeError:
    shown = text.strip()
    shown = f"{shown[:60]}..." if len(shown) > 60 else shown
    why = str(error)
    if isinstance(error, json.JSONDecodeError):  # which counts the line break as a line more
        why = f"{error.msg} at column {min(error.pos, len(text.rstrip())) + 1}"
    hint = "fix or delete the line; each line must be one JSON object"
    return fault(path, line, f"is not JSON: {why}; the line reads {shown!r}", hint)


def _json_kind(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _refuse_half_characters(path: Path, line: int, row: Any) -> None:
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        message = "holds half of a surrogate pair, which is no character (no tokenizer takes it)"
        raise fault(path, line, message, "remove the lone \\ud800 to \\udfff escape") from error


def _read_json(path: Path, limit: int | None) -> Iterator[Numbered]:
    """A list of rows, an object with the list under `data` or `rows`, or JSON lines by another name."""
    if _looks_like_lines(path, limit):
        yield from _read_json_lines(path, limit)
        return
    text = "".join(line for _, line in _lines(path, limit))
    if not text.strip():
        return
    try:
        value = ROWS.decode(text)
    except KeyTwiceError as error:
        raise fault(path, None, str(error), TWICE_HINT) from error
    except (ValueError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else None
        hint = "expected a list of objects, or one object per line"
        raise fault(path, line, f"is not JSON: {error}", hint) from error
    rows = value if isinstance(value, list) else _listed_rows(value)
    if rows is not None and len(alike := keys_alike(value, rows)) > 1:
        hint = "put the rows of each key into a file of their own, and name the files to train on as sources"
        raise fault(path, None, f"holds rows under the keys {listed(alike)}", hint)
    if rows is None:
        message = f"holds one JSON {'object' if isinstance(value, dict) else _json_kind(value)}"
        hint = "give a list of objects, alone or under the key `data` or `rows`, or one object per line"
        raise fault(path, None, f"{message}, expected a list of rows", hint)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            message = f"row {number} is a JSON {_json_kind(row)}, expected an object"
            raise fault(path, None, message, _ROW_HINT)
        yield number, row


def _looks_like_lines(path: Path, limit: int | None) -> bool:
    """Whether the first line that is not blank is a whole row."""
    for _, line in _lines(path, limit):
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            return False
        try:
            return _listed_rows(json.loads(line)) is None
        except (ValueError, RecursionError):
            return line.rstrip().endswith("}")  # a broken row is named as a line, an open `{` is no row
    return False


def _listed_rows(value: Any) -> list[Any] | None:
    """The rows of `{"data": [{...}]}`, None for any other object."""
    if isinstance(value, Mapping):
        for key in _ROW_KEYS:
            rows = value.get(key)
            if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
                return rows
    return None


def _read_csv(path: Path, limit: int | None, delimiter: str = ",") -> Iterator[Numbered]:
    csv.field_size_limit(_CELL_CHARACTERS)
    reader = csv.reader((line for _, line in _lines(path, limit)), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    start = 1
    while True:
        start = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            hint = "is a quote left open? a quote inside a quoted cell is written twice"
            raise fault(path, start, f"is not CSV: {error}", hint) from error
        if cells is None:
            return
        if not cells:
            continue
        if header is None:
            header = _checked_header(path, cells, delimiter, start)
            continue
        if len(cells) != len(header):
            message = f"has {len(cells)} cells, but the header has {len(header)} ({listed(header)})"
            hint = "put quotes around a cell that holds the separator or a line break"
            raise fault(path, start, message, hint)
        yield start, dict(zip(header, cells, strict=True))


def _read_tsv(path: Path, limit: int | None) -> Iterator[Numbered]:
    """As CSV with tabs. A cell with a tab after a line break is refused: a single quote that begins a cell
    takes the rows up to the next quote into it."""
    for line, row in _read_csv(path, limit, "\t"):
        for name, cell in row.items():
            if "\t" in cell.partition("\n")[2]:
                message = f"column {name} holds a line break and a tab after it: are these several rows?"
                hint = "quote a cell that holds quotes and write each inner one twice, or use .jsonl"
                raise fault(path, line, message, hint)
        yield line, row


def _checked_header(path: Path, header: list[str], delimiter: str, line: int) -> list[str]:
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        message = f"the header names {listed(map(repr, twice))} twice"
        raise fault(path, line, message, "rename or delete one of them")
    others = [mark for mark in (",", ";", "\t") if mark != delimiter and mark in header[0]]
    if len(header) == 1 and others:
        hint = "save it with commas as .csv, or with tabs as .tsv"
        raise fault(path, line, f"the cells seem to be separated by {others[0]!r}", hint)
    return header


def _read_text(path: Path, limit: int | None) -> Iterator[Numbered]:
    """A row for each line that is not blank."""
    for number, line in _lines(path, limit):
        text = line.rstrip("\r\n")
        if text.strip():
            yield number, {"text": text}


def _read_conll(path: Path, limit: int | None) -> Iterator[Numbered]:
    """A row for each sentence."""
    try:
        yield from conll.read_sentences(_lines(path, limit))
    except conll.ColumnError as error:
        hint = "give each word a line with as many columns, and separate sentences by an empty line"
        raise fault(path, error.line, str(error), hint) from error


@contextlib.contextmanager
def _unpacked(path: Path, scratch: Path | None) -> Iterator[Path]:
    """The path of a columnar file, unpacked into a temporary folder where needed: it is read by seeking."""
    if path.suffix.lower() not in _OPENERS:
        yield path
        return
    if scratch is not None:
        scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="effilaunch-", dir=scratch) as folder:
        plain = Path(folder) / path.stem
        with _open(path) as packed, plain.open("wb") as target:
            shutil.copyfileobj(packed, target, _BUFFER_BYTES)
        yield plain


def _columnar_rows(plain: Path, path: Path) -> Iterator[Numbered]:
    """Rows of a Parquet or Arrow file; `path` is the name that the user knows."""
    import pyarrow

    number = 0
    try:
        for batch in _batches(plain):
            columns = dict(_columns(batch))
            for values in zip(*columns.values(), strict=True):
                number += 1
                yield number, dict(zip(columns, values, strict=True))
    except (pyarrow.ArrowException, OSError) as error:
        details = (str(error).splitlines() or [type(error).__name__])[0]
        message = f"is not {data_suffix(path)[1:].title()}, or damaged: {details}"
        raise fault(path, number or None, message, "copy or write the file anew") from error


def file_schema(path: Path) -> Any | None:
    """The Arrow schema of a Parquet or Arrow file; None for other files, and for packed ones."""
    import pyarrow
    from pyarrow import parquet

    kind = path.suffix.lower()
    try:
        if kind == ".parquet":
            return parquet.read_schema(path)
        if kind != ".arrow":
            return None
        with pyarrow.OSFile(str(path)) as file:
            is_file_format = file.read(6) == b"ARROW1"
            file.seek(0)
            return (pyarrow.ipc.open_file if is_file_format else pyarrow.ipc.open_stream)(file).schema
    except (pyarrow.ArrowException, OSError):
        return None  # reading its rows reports it


def _batches(plain: Path) -> Iterator[Any]:
    """Record batches of at most `_BATCH_ROWS` rows."""
    import pyarrow
    from pyarrow import parquet

    if plain.suffix.lower() == ".parquet":
        # Buffered instead of pre-buffered: one row group may be as large as the file.
        with parquet.ParquetFile(plain, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
            yield from file.iter_batches(batch_size=_BATCH_ROWS)
        return
    with pyarrow.OSFile(str(plain)) as file:
        is_file_format = file.read(6) == b"ARROW1"
        file.seek(0)
        if is_file_format:
            reader = pyarrow.ipc.open_file(file)
            whole = (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:  # what datasets writes
            whole = iter(pyarrow.ipc.open_stream(file))
        for batch in whole:
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                yield batch.slice(start, _BATCH_ROWS)


def _columns(batch: Any) -> Iterator[tuple[str, Sequence[Any]]]:
    for field, column in zip(batch.schema, batch.columns, strict=True):
        values = column.to_pylist()
        # A column of objects has one struct for all rows: keys that an object lacks came back as None.
        yield field.name, list(map(without_none, values)) if "struct<" in str(field.type) else values


def without_none(value: Any) -> Any:
    """A nested value without the keys that are None."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value]
    return value


_LINE_READERS: Mapping[str, Callable[[Path, int | None], Iterator[Numbered]]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".txt": _read_text,
    **dict.fromkeys(conll.SUFFIXES, _read_conll),
}
KINDS = (*_LINE_READERS, ".parquet", ".arrow")
"""Suffixes of data files, without the packing."""
