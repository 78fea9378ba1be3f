"""One data file to numbered rows: JSON lines, JSON, CSV, TSV, Parquet, Arrow, CoNLL and text, each also
compressed.

Files are read a line or a record batch at a time; only a `.json` file that holds one list is read into memory
completely. Every fault is a RecipeError with file and line.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launcher.errors import RecipeError
from launcher.recipe.suggestions import listed
from launcher.rows import conll
from launcher.rows.lines import (
    BROKEN_PACKING,
    BUFFER_BYTES,
    OPENERS,
    Numbered,
    fault,
    open_file,
    read_lines,
    refuse_pointer,
    unpacked_name,
)
from launcher.rows.tables import DELIMITERS, read_table

_READ_AS: Mapping[str, tuple[Any, Sequence[str]]] = {
    "quoting": ("minimal", tuple(DELIMITERS)),
    "header": (None, tuple(DELIMITERS)),
    "sample_by": ("line", (".txt",)),
}
"""Setting of a source -> its default, and the suffixes that it is for."""
_NO_ROWS = frozenset({"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"})
"""Files beside the rows in folders of data sets of the hub."""
TWICE_HINT = "which of the two values is meant? remove the other one"
_BATCH_ROWS = 256  # of Parquet and Arrow: a batch of images must fit in memory too
_ROW_KEYS = ("data", "rows")
_ROW_HINT = 'a row is written {"column": value, ...}'


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
    return unpacked_name(path).suffix.lower()


def rows_name(name: str) -> str:
    """A file's name without its suffixes: two files with the same one seem to hold the same rows."""
    return str(unpacked_name(Path(name)).with_suffix(""))


def rows_kind(path: Path) -> str:
    """What a data file is to the hub's `datasets` library, which takes one reader for a data set."""
    suffix = data_suffix(path)
    if suffix in DELIMITERS:
        return "csv"
    return "conll" if suffix in conll.SUFFIXES else _ALIKE.get(suffix, suffix[1:])


def is_data_file(path: Path) -> bool:
    return data_suffix(path) in KINDS


def holds_rows(path: Path) -> bool:
    """`is_data_file` for a file that a folder or a pattern gives."""
    return is_data_file(path) and path.name not in _NO_ROWS


def known_suffixes() -> str:
    """For messages: `.jsonl .ndjson ... , each also as .gz ...`."""
    return f"{' '.join(KINDS)}, each also as {' '.join(OPENERS)}"


def read_as(source: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a source that decide what a row of its files is, where they are not the defaults."""
    return {
        name: source[name] for name, (default, _) in _READ_AS.items() if source.get(name, default) != default
    }


def read_file(
    path: Path,
    scratch: Path | None = None,
    limit: int | None = None,
    source: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Numbered]:
    """Rows of a file whose `is_data_file` holds. `scratch` is where a packed Parquet file is unpacked.

    limit: bytes after which a file that is read by lines raises CutOffError. source: with the settings of
    `read_as`. RecipeError names file and line.
    """
    try:
        refuse_pointer(path)
        suffix = data_suffix(path)
        for name, value in read_as(source).items():
            if suffix not in _READ_AS[name][1]:
                hint = f"it is for {' and '.join(_READ_AS[name][1])} files: make these a source of their own"
                raise fault(path, None, f"is a {suffix} file, without meaning for `{name}: {value}`", hint)
        if suffix in DELIMITERS:
            yield from read_table(path, limit, DELIMITERS[suffix], source)
            return
        if suffix == ".txt":
            yield from _read_text(path, limit, source)
            return
        if reader := _LINE_READERS.get(suffix):
            yield from reader(path, limit)
            return
        with _unpacked_file(path, scratch) as plain:
            yield from _columnar_rows(plain, path)
    except BROKEN_PACKING as error:  # of opening; the line readers name the line themselves
        raise fault(path, None, f"cannot be read: {error}", "is the file complete?") from error


def _read_json_lines(path: Path, limit: int | None) -> Iterator[Numbered]:
    # The standard library and not datasets' Arrow reader: that one unifies the objects of a column
    # into one struct and fills the keys which a row lacks with None (so a tool call gets the
    # arguments of all other tools), and it does not report the line of a fault.
    decode = ROWS.decode
    for number, line in read_lines(path, limit):
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
    text = "".join(line for _, line in read_lines(path, limit))
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
    for _, line in read_lines(path, limit):
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


def _read_text(path: Path, limit: int | None, source: Mapping[str, Any]) -> Iterator[Numbered]:
    """A row for each line that is not blank, for each paragraph between blank lines, or for the file."""
    unit = source.get("sample_by", "line")
    start, lines = 0, list[str]()
    for number, line in read_lines(path, limit):
        text = line.rstrip("\r\n")
        if unit != "document" and lines and (unit == "line" or not text.strip()):
            yield start, {"text": "\n".join(lines)}
            lines = []
        if text.strip() or (unit == "document" and lines):
            start = start if lines else number
            lines.append(text)
    if lines:
        yield start, {"text": "\n".join(lines).rstrip("\n") if unit == "document" else "\n".join(lines)}


def _read_conll(path: Path, limit: int | None) -> Iterator[Numbered]:
    """A row for each sentence."""
    try:
        yield from conll.read_sentences(read_lines(path, limit))
    except conll.ColumnError as error:
        hint = "give each word a line with as many columns, and separate sentences by an empty line"
        raise fault(path, error.line, str(error), hint) from error


@contextlib.contextmanager
def _unpacked_file(path: Path, scratch: Path | None) -> Iterator[Path]:
    """The path of a columnar file, unpacked into a temporary folder where needed: it is read by seeking."""
    if path.suffix.lower() not in OPENERS:
        yield path
        return
    if scratch is not None:
        scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="effilaunch-", dir=scratch) as folder:
        plain = Path(folder) / path.stem
        with open_file(path) as packed, plain.open("wb") as target:
            shutil.copyfileobj(packed, target, BUFFER_BYTES)
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
        with parquet.ParquetFile(plain, pre_buffer=False, buffer_size=BUFFER_BYTES) as file:
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
    **dict.fromkeys(conll.SUFFIXES, _read_conll),
}
_ALIKE = {".jsonl": "json", ".ndjson": "json", ".txt": "text"}
KINDS = (*_LINE_READERS, *DELIMITERS, ".txt", ".parquet", ".arrow")
"""Suffixes of data files, without the packing."""
