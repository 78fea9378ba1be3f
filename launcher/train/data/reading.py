"""Files to rows: JSONL, JSON, CSV, Parquet and text, each also gzipped, single or as a folder.

The readers are those of `datasets`; this module chooses among them and names the file at fault.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from launcher.errors import Problem, RecipeError

READERS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}


def read_rows(reference: str) -> Any:
    """Rows of a file or folder as a `datasets.Dataset`, at least one.

    RecipeError names the file (and the line at fault) that is missing, empty or unreadable.
    """
    from datasets import concatenate_datasets

    files = data_files(reference)
    parts = [_load(file) for file in files]
    try:
        rows = parts[0] if len(parts) == 1 else concatenate_datasets(parts)
    except (ValueError, TypeError) as error:
        raise RecipeError(
            Problem(
                "columns-differ",
                f"the files of the folder do not go together: {error}",
                file=reference,
            )
        ) from error
    if rows.num_rows == 0:
        raise RecipeError(Problem("no-rows", "holds no rows", file=reference))
    return rows


def data_files(reference: str) -> list[Path]:
    """The data files that a path names, sorted: itself, or all that lie in the folder below it."""
    from launcher.facts.probe import resolve_path

    path = resolve_path(reference)
    if not path.exists():
        raise RecipeError(Problem("data-missing", "no such file or folder", file=str(path)))
    known = " ".join(READERS)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and _suffix(file) in READERS)
        if not files:
            message = f"the folder holds no data files; known are {known}, each also as .gz"
            raise RecipeError(Problem("data-missing", message, file=str(path)))
        return files
    if _suffix(path) not in READERS:
        raise RecipeError(
            Problem(
                "data-suffix",
                f"unknown kind of file; known are {known}, each also as .gz",
                file=str(path),
            )
        )
    return [path]


def _suffix(path: Path) -> str:
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def _load(file: Path) -> Any:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    _refuse_empty(file)
    try:
        with _as_readers_take_it(file) as name:
            return load_dataset(READERS[_suffix(file)], data_files=name, split="train")
    except (DatasetsError, OSError, ValueError, TypeError, EOFError) as error:
        line, why = _find_fault(file)
        if why is None:
            cause = error.__cause__ or error
            details = str(cause).splitlines() or ["no details"]
            why = f"{type(cause).__name__}: {details[0]}"
        raise RecipeError(
            Problem("data-unreadable", f"cannot be read: {why}", file=str(file), line=line)
        ) from error


@contextlib.contextmanager
def _as_readers_take_it(file: Path) -> Iterator[str]:
    """The file's path; a gzipped Parquet file is unpacked first, which its reader does not do."""
    if not file.name.lower().endswith(".parquet.gz"):
        yield str(file)
        return
    with tempfile.TemporaryDirectory(prefix="effilaunch-") as folder:
        plain = Path(folder) / file.name[: -len(".gz")]
        with gzip.open(file, "rb") as packed, plain.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
        yield str(plain)


def _refuse_empty(file: Path) -> None:
    """An empty file is a mistake worth its own message; the readers' own ones do not name it."""
    try:
        with _open(file) as stream:
            empty = not stream.read(1)
    except (OSError, EOFError) as error:
        raise RecipeError(Problem("data-unreadable", f"cannot be read: {error}", file=str(file))) from error
    if empty:
        raise RecipeError(Problem("no-rows", "is empty", file=str(file)))


def _open(file: Path) -> IO[bytes] | gzip.GzipFile:
    if file.name.lower().endswith(".gz"):
        return gzip.open(file, "rb")
    return file.open("rb")


def _find_fault(file: Path) -> tuple[int | None, str | None]:
    """(line, reason) of a JSONL file's first line that is no JSON object; (None, None) if none."""
    if _suffix(file) != ".jsonl":
        return None, None
    with _open(file) as stream:
        return _first_bad_line(stream)


def _first_bad_line(lines: Iterable[bytes]) -> tuple[int | None, str | None]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            return number, f"not JSON: {error}"
        if not isinstance(row, dict):
            return number, "not a JSON object"
    return None, None
