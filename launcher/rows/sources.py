"""A source of a recipe to rows: a file, glob, folder, folder of images, package file or URL.

Data sets of the hub have neither files nor rows here: train/data/hub_rows.py streams them.

Memory is bounded: rows are yielded one by one as they are read.
"""

from __future__ import annotations

import difflib
import glob
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.files.safe_files import exists, expanded, is_dir, parse_json
from launcher.machine.probe import resolve_path
from launcher.recipe.data_paths import is_loaded_hub_id, is_url
from launcher.rows.conll import is_conll
from launcher.rows.files import (
    data_suffix,
    holds_rows,
    is_data_file,
    known_suffixes,
    read_file,
)
from launcher.rows.remote import name_of, remote_files
from launcher.rows.splits import ALL, TRAIN, SplitFiles, choose, split_lines

_IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
_HELD_BY_SAVE_TO_DISK = {"dataset_info.json", "state.json"}
_LISTED = 8
_MEDIA = frozenset({"image", "images", "video", "videos", "audio", "audios", "speech"})
_MEDIA_ENDINGS = ("_path", "_paths", "_url", "_urls", "_file", "_files", "_bytes")


@dataclass(frozen=True, slots=True)
class Detected:
    """The format of a source's rows."""

    format: str
    columns: Mapping[str, str]
    """Field of the format -> column of the file, also for optional fields that no row may have.

    A chat whose rows are a prompt and a completion, both messages, has these instead of `messages`.
    """
    left_out: frozenset[str] = frozenset()
    """Columns that may hold something and are not read: of the recipe's `null`."""
    judged: frozenset[str] | None = frozenset()
    """Columns that the first rows told apart from text; None: `format: text` is written, and takes all."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a source, as it was written."""

    values: dict[str, Any]
    """Column -> value."""
    file: str
    """Path of the file, or the hub id; for errors, and the place that relative image paths start from."""
    number: int
    """1-based line where the file has lines, else the row's number in the file."""

    def without(self, names: AbstractSet[str]) -> Row:
        """The row without these columns."""
        if names.isdisjoint(self.values):
            return self
        return Row(
            {name: self.values[name] for name in self.values if name not in names}, self.file, self.number
        )


def bad_row(
    row: Row, message: str, hint: str | None = None, *, code: str = "bad-row", path: str | None = None
) -> RecipeError:
    """A RecipeError about a row: its file and line. path: key of the recipe."""
    return RecipeError(Problem(code, message, file=row.file, line=row.number, path=path, hint=hint))


def kind_of(value: Any) -> str:
    """What a value is, for messages."""
    names = {type(None): "nothing", str: "text", list: "a list", tuple: "a list", dict: "an object"}
    names |= {int: "an integer", float: "a float", bool: "a boolean", bytes: "bytes"}
    return names.get(type(value), type(value).__name__)


def is_empty(value: Any) -> bool:
    """Whether a column holds nothing in this row."""
    return value is None or (isinstance(value, str | bytes | list | tuple | dict) and not value) or (
        isinstance(value, str) and value.strip() in ("", "[]", "{}", "null", "None")
    )  # fmt: skip


@cache
def plain_name(column: str) -> str:
    """A column's name in lower case, its words joined by `_`: `systemPrompt` is system_prompt."""
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])|[-. ]", "_", column.strip()).lower()


def is_content(value: Any) -> bool:
    return isinstance(value, str | list | tuple | dict)


def is_media(name: str) -> bool:
    """Whether a column of this name holds images, video or sound."""
    ending = next((end for end in _MEDIA_ENDINGS if name.endswith(end)), "")
    return name.removesuffix(ending) in _MEDIA


def parsed_json(row: Row, place: str, text: str) -> Any:
    """The value of JSON text that stands at `place` of a row."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise bad_row(row, f"the text in {place} is not JSON: {error}") from error


def iter_rows(source: Mapping[str, Any], cache_dir: Path | str | None = None) -> Iterator[Row]:
    """Rows of the files of a source, as `counted_rows`.

    `cache_dir` takes what has to be unpacked. RecipeError names the file and line of a fault; MachineError
    when the store of a URL cannot be reached.
    """
    files = source_files(source)
    scratch = None if cache_dir is None else Path(cache_dir)
    read = (row for file in files for row in _rows_of(file, scratch, source))
    yield from counted_rows(source, map(image_row, files) if is_image(files[0]) else read)


def counted_rows(source: Mapping[str, Any], rows: Iterator[Row]) -> Iterator[Row]:
    """The rows, at most `first` of the source. RecipeError where there are none."""
    row = None
    for row in itertools.islice(rows, source.get("first")):
        yield row
    if row is None:
        files = source_files(source)
        message = "is empty" if len(files) == 1 and files[0].stat().st_size == 0 else "holds no rows"
        raise RecipeError(Problem("no-rows", message, file=source["path"], hint="give a file with rows"))


def _rows_of(file: Path, scratch: Path | None, source: Mapping[str, Any]) -> Iterator[Row]:
    """Rows of one file; a copy of a URL is called by its URL."""
    name = name_of(file)
    try:
        for number, values in read_file(file, scratch, source=source):
            yield Row(values, name, number)
    except RecipeError as error:
        if name == str(file):
            raise
        raise RecipeError([replace(p, file=name) for p in error.problems]) from error


def source_files(source: Mapping[str, Any]) -> list[Path]:
    """The files that a source reads, sorted: data files of its split, or images alone. Empty for a hub id.

    Those of a URL are copied into the cache. RecipeError when there are none.
    """
    reference = source["path"]
    if is_url(reference):
        return list(remote_files(reference, source.get("split") or TRAIN))
    if is_loaded_hub_id(reference):
        return []
    folder, found = _found(source)
    return [folder / name for name in found.names]


def source_lines(source: Mapping[str, Any], *, offer: bool) -> list[str]:
    """For people: the files that a folder or a pattern gives, by split; empty for other sources.

    offer: with how to evaluate on a split that is not read.
    """
    reference = source["path"]
    if is_url(reference) or is_loaded_hub_id(reference):
        return []
    folder, found = _found(source)
    if [str(folder / name) for name in found.names] == [str(resolve_path(reference))]:
        return []
    return split_lines(reference, found, offer=offer)


def _found(source: Mapping[str, Any]) -> tuple[Path, SplitFiles]:
    """A folder, and the files below it that a local source reads."""
    reference, split = source["path"], source.get("split") or TRAIN
    path, pattern = _split_glob(reference)
    if pattern is None and not is_dir(path):
        return path.parent, choose([_checked_file(path).name], split, reference, is_pattern=True)
    if pattern is not None:
        folder, files = path, _matching(path, pattern, reference)
    else:
        if split != ALL and (path / "dataset_dict.json").is_file():  # of DatasetDict.save_to_disk
            path, split = path / split, TRAIN
            if not path.is_dir():
                raise _absent(path)
        folder, files = path, _files_below(path)
        if is_image(files[0]) and split in (ALL, TRAIN):  # the folders are labels
            return folder, SplitFiles([file.relative_to(folder).as_posix() for file in files])
    names = [file.relative_to(folder).as_posix() for file in files]
    return folder, choose(names, split, reference, is_pattern=pattern is not None)


def _checked_file(path: Path) -> Path:
    if not exists(path):
        raise _absent(path)
    if not is_data_file(path):
        raise _unknown_kind(path)
    if not path.is_file():
        message = "is a pipe or a device, and rows are read more than once"
        raise RecipeError(
            Problem("data-unreadable", message, file=str(path), hint="write the rows into a file")
        )
    return path


def source_bytes(source: Mapping[str, Any]) -> int | None:
    """Size of a source's files on the disk; None for a hub id."""
    if is_loaded_hub_id(source["path"]):
        return None
    return sum(file.stat().st_size for file in source_files(source))


def _split_glob(reference: str) -> tuple[Path, str | None]:
    """(path, None), or (folder, pattern) where the path has glob characters and no file is called so."""
    parts = reference.split("/")
    magic = [index for index, part in enumerate(parts) if glob.has_magic(part)]
    if not magic or exists(expanded(reference)):
        return resolve_path(reference), None
    folder = "/".join(parts[: magic[0]]) or ("/" if reference.startswith("/") else ".")
    return resolve_path(folder), "/".join(parts[magic[0] :])


def _matching(folder: Path, pattern: str, reference: str) -> list[Path]:
    """Data files that a glob matches, and those below a folder that it matches."""
    # Path.glob takes a final `**` for folders only.
    found = [folder / name for name in glob.glob(pattern, root_dir=folder, recursive=True)]  # noqa: PTH207
    if not found:
        raise RecipeError(
            Problem("data-missing", "the pattern matches nothing", file=reference, hint=_what_is_near(folder))
        )
    files = {file for file in found if file.is_file() and holds_rows(file)}
    files.update(file for match in found if match.is_dir() for file in _visible_files(match)[0])
    if not files:
        raise _unknown_kind(min(found))
    return sorted(files)


def _files_below(folder: Path) -> list[Path]:
    data, images = _visible_files(folder)
    # Notes such as labels.txt beside folders of images are no rows.
    if data and not (images and all(data_suffix(file) == ".txt" for file in data)):
        return data
    if images:
        return [_checked_image(folder, file) for file in images]
    message = (
        f"the folder holds no data files; known are {known_suffixes()}, and images in one folder per label"
    )
    raise RecipeError(Problem("data-missing", message, file=str(folder), hint=_what_is_near(folder)))


def _visible_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """(data files, images) below a folder, sorted, without hidden ones and save_to_disk's own."""
    data, images = [], []
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        if set(names) >= _HELD_BY_SAVE_TO_DISK:
            names = _saved_files(Path(place))  # next to them are the caches of later map() calls
        for name in names:
            file = Path(place, name)
            if name.startswith("."):
                continue
            if holds_rows(file) and file.is_file():
                data.append(file)
            elif is_image(file):
                images.append(file)
    return sorted(data), sorted(images)


def _saved_files(folder: Path) -> list[str]:
    """Names of the files that `Dataset.save_to_disk` wrote."""
    state = parse_json((folder / "state.json").read_text(encoding="utf-8"))
    return [str(entry["filename"]) for entry in state["_data_files"]]


def is_image(file: Path) -> bool:
    return file.suffix.lower() in _IMAGE_SUFFIXES


def _checked_image(folder: Path, image: Path) -> Path:
    if len(image.relative_to(folder).parts) == 2:
        return image
    message = f"expected one sub-folder per label below {folder}, with the images in it"
    hint = "name the folder of one split, for example `path: pictures/train`"
    raise RecipeError(Problem("picture-folders", message, file=str(image), hint=hint))


def image_row(image: Path) -> Row:
    return Row({"image": str(image.absolute()), "label": image.parent.name}, str(image), 1)


def _absent(path: Path) -> RecipeError:
    names = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, 1)
    hint = f"did you mean {path.parent / near[0]}?" if near else _what_is_near(path.parent)
    return RecipeError(Problem("data-missing", "no such file or folder", file=str(path), hint=hint))


def _unknown_kind(path: Path) -> RecipeError:
    message = f"unknown kind of file; known are {known_suffixes()}"
    words = path.is_file() and is_conll(path)
    hint = f"convert it, for example to .jsonl{'; it seems to be CoNLL: rename it to end in .conll' * words}"
    return RecipeError(Problem("data-suffix", message, file=str(path), hint=hint))


def _what_is_near(folder: Path) -> str:
    """The nearest folder above that exists, and what it holds."""
    folder = folder.absolute()
    while not is_dir(folder):
        folder = folder.parent
    names = sorted(file.name for file in folder.iterdir())
    held = ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
    return f"the nearest folder is {folder}, it holds {held or 'nothing'}"
