"""Addresses of rows in other tools' files as sources of `data`, and hooks for rows of their own formats."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from launcher.importing.conversions import as_number, listed
from launcher.importing.key_tables import Peer
from launcher.importing.reading import EVALUATED, Effect, Given, Reading, shown
from launcher.importing.row_shapes import Shape, hooks_text
from launcher.recipe.data_paths import is_glob, is_hub_id, is_package, is_url

BUILDERS = ("json", "csv", "parquet", "text", "arrow")
"""What `load_dataset` takes in the place of a name, for files that a recipe names themselves."""
NO_LIMIT = "all rows are used: a recipe has no limit of rows"
_LONGEST = 1_000_000
"""Bytes of the first row that are looked at."""
_HUB = re.compile(r"(?:https?://huggingface\.co/datasets/|hf://datasets/)([\w.-]+/[\w.-]+)/?$")
_SLICE = re.compile(r"([\w.-]+)\[(.*)\]$")
_ROWS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")


def source_at(
    reading: Reading, given: Given, *, name: Any = None, split: Any = None, revision: Any = None
) -> dict[str, Any] | None:
    """A source of `data` for an address; None, with the reason in the reading, where it cannot be one.

    name, split, revision: those of load_dataset, where the file sets them.
    """
    beside = {"name": name, "revision": revision, "split": split}
    asked = {key: str(value) for key, value in beside.items() if value not in (None, "")}
    if not isinstance(given.value, str) or not given.value.strip():
        reading.drop(given, Effect.NEEDED, "expected a path or the name of a data set")
        return None
    if reading.leaves_open("", given):
        return None
    path = given.value.strip()
    hub = _HUB.match(path)
    if hub:
        path = hub[1]
    given = Given(given.name, path, given.line)
    if is_url(path) and not hub:
        reading.drop(
            given, Effect.NEEDED, "rows are not read from an address", "download them, and name the file"
        )
        return None
    _cut_split(reading, given, asked)
    folder = Path(reading.file).parent
    if is_package(path):
        return {"path": path}
    if is_hub_id(path, folder) and not _is_here(path, folder):
        if asked.get("split") == "train":
            del asked["split"]
        return {"path": path, **asked}
    if not _is_here(path, folder) and _looks_like_name(path):
        more = "".join(f", {key}: {shown(value)}" for key, value in asked.items() if value != "train")
        hint = f"write data.train: [{{path: organisation/{shown(path)}{more}}}]"
        reading.drop(given, Effect.NEEDED, "a data set of the hub needs its full id", hint)
        return None
    return _local(reading, given, asked)


def rows_path(entry: Peer, key: str = "path") -> Given | None:
    """The path of a data set with its `data_files`; None, with the reason in the reading, if it has none."""
    path, files, given = entry.get(key), entry.get("data_files"), entry.given(key)
    names = listed(files)
    if not files:
        return given
    if len(names) != 1 or not isinstance(names[0], str):
        entry.drop("data_files", Effect.NEEDED, "one file for one source", "write a source for each file")
        return None
    folders = (Path(entry.reading.file).parent, Path())
    if path in BUILDERS or path is None:
        return Given(given.name, names[0], given.line)
    if isinstance(path, str) and any((base / path).is_dir() for base in folders):
        return Given(given.name, f"{path.rstrip('/')}/{names[0]}", given.line)
    reason, hint = "no file of a data set of the hub can be named", "download it, and name the file"
    entry.drop("data_files", Effect.NEEDED, reason, hint)
    return None


def weight_of(share: Any) -> dict[str, float]:
    """`weight` of a source, where a share is one."""
    number = as_number(share)
    return {} if number is None or number <= 0 or number == 1 else {"weight": float(number)}


def take_share(peer: Peer, key: str) -> None:
    """Take a share of the training rows to evaluate on; a number of rows must be set as their share."""
    if peer.get(key) is None:
        return
    given = peer.given(key)
    size, said = as_number(given.value), f"{given.name}: {shown(given.value)}"
    if size is None or size < 0:
        reason, hint = f"{said} is no share of the rows", "write data.eval: {split: SHARE}"
        peer.needs(EVALUATED, key, reason, hint)
    elif size >= 1:
        hint = f"write data.eval: {{split: SHARE}}, which is {shown(given.value)} / all rows"
        peer.needs(EVALUATED, key, f"{said} is a number of rows; a recipe has a share of them", hint)
    elif size > 0:
        peer.reading.take(EVALUATED, {"split": float(size)}, given, note="other rows of the same number")


def _is_here(path: str, folder: Path) -> bool:
    """Whether it is there, from the file's folder or from here."""
    try:
        return (folder / path).exists() or Path(path).exists()
    except OSError:
        return False


def _looks_like_name(path: str) -> bool:
    """Whether it is a name alone, such as imdb: neither a file's nor a folder's."""
    return "/" not in path and "\\" not in path and not is_glob(path) and not Path(path).suffix


def _cut_split(reading: Reading, given: Given, asked: dict[str, str]) -> None:
    """Leave one complete split of `train[:1%]` and of `a+b`."""
    split = asked.get("split", "")
    part = _SLICE.match(split)
    first = part[1] if part else split.split("+")[0].strip()
    if part or "+" in split:
        asked["split"] = first
        reason = f"the complete split {first} is read; {NO_LIMIT}"
        reason = reason if part else f"only {first} is read: write a source for each"
        reading.drop(Given(f"{given.name} split", split, given.line), Effect.TRAINING, reason)


def _local(reading: Reading, given: Given, asked: dict[str, str]) -> dict[str, Any] | None:
    split = asked.pop("split", "train")
    for name, value in asked.items():
        other = Given(f"{given.name} {name}", value, given.line)
        reading.drop(other, Effect.NONE, "only a data set of the hub has it")
    found = _split_in(given.value, split, Path(reading.file).parent)
    if found is None:
        reason, hint = "which files of the folder are that split", "name them: {path: FILE}"
        other = Given(given.name, f"{given.value}, split {split}", given.line)
        reading.drop(other, Effect.NEEDED, reason, hint)
    return None if found is None else {"path": found}


def _split_in(path: str, split: str, folder: Path) -> str | None:
    """The file or folder of a split below a local path; the path itself where it holds no splits."""
    for base in (folder, Path()):
        root = base / path
        if not root.is_dir():
            continue
        inner = [name for name in (split, *(split + end for end in _ROWS)) if (root / name).exists()]
        if len(inner) == 1:
            return f"{path.rstrip('/')}/{inner[0]}"
        return path if split == "train" else None
    return path if split == "train" else None


def first_row(path: str, reading: Reading) -> dict[str, Any] | None:
    """The first row of a .jsonl that is here, or of a .json with a list or with rows in lines."""
    for base in (Path(reading.file).parent, Path()):
        file = base / path
        try:
            if file.suffix in (".jsonl", ".json") and file.is_file():
                with file.open("rb") as rows:
                    text = rows.read(_LONGEST).decode("utf-8-sig", "ignore").strip()
                first = text.removeprefix("[").lstrip()
                row, end = json.JSONDecoder().raw_decode(first)
                alone = file.suffix == ".json" and end == len(text)  # an object that may hold the rows
                return row if isinstance(row, dict) and not alone else None
        except (OSError, ValueError, RecursionError):
            return None
    return None


def leave_columns(path: str, reading: Reading, read: Collection[str]) -> dict[str, None]:
    """`columns` that leave out what the other tool does not read of rows that are here: texts and lists.

    A recipe's rows with such columns are refused otherwise, because something of them would be lost.
    """
    row = first_row(path, reading) or {}
    held = {name for name, value in row.items() if value and isinstance(value, str | list | dict | bool)}
    return {name: None for name in row if name in held and name not in read}


SUFFIX = "_hooks.py"
"""Ending of the file's name, after the recipe's name."""


class Rows(NamedTuple):
    """How the rows of a source are read."""

    form: str
    """`format` of the source."""
    columns: Mapping[str, str] = {}
    """Field -> column, where these differ."""
    hook: Shape | None = None

    @classmethod
    def renamed(cls, form: str, names: Mapping[str, str]) -> Rows:
        """Without a hook. names: field -> column."""
        return cls(form, {field: column for field, column in names.items() if field != column})


def _clashing(shapes: Mapping[str, Shape]) -> tuple[str, str] | None:
    """Two sources (by their path) with the same columns and different shapes."""
    seen: list[tuple[str, Shape]] = []
    for path, shape in shapes.items():
        for other, before in seen:
            columns = set(shape.columns()), set(before.columns())
            if shape != before and (columns[0] <= columns[1] or columns[1] <= columns[0]):
                return other, path
        seen.append((path, shape))
    return None


@dataclass(slots=True)
class Sources:
    """Sources of `data` with the shapes of their rows, while a file is read."""

    shapes: dict[str, Shape] = field(default_factory=dict)
    """Path of a source -> what the hook makes of its rows."""
    plain: list[str] = field(default_factory=list)
    """Paths of sources without a hook."""
    formats: list[str] = field(default_factory=list)

    def add(
        self, reading: Reading, source: Mapping[str, Any], rows: Rows, read: Collection[str] = ()
    ) -> dict[str, Any]:
        """A source with the shape of its rows.

        read: columns that the other tool reads; others are left out of rows that are here.
        """
        path = source["path"]
        self.formats.append(rows.form)
        if rows.hook is not None:
            self.shapes[path] = rows.hook
        else:
            self.plain.append(path)
        left = leave_columns(path, reading, read) if read and rows.hook is None else {}
        columns = {**rows.columns, **left}
        return {**source, "format": rows.form, **({"columns": columns} if columns else {})}

    def take_hooks(self, reading: Reading, key: str, line: int | None) -> None:
        """Write the file of hooks and name it in `python`; key: where the file names the sources."""
        if not self.shapes:
            return
        pair = _clashing(self.shapes)
        if pair is not None:
            both = f"rows of {shown(pair[0])} and of {shown(pair[1])}"
            reason = f"{both} have the same columns and different prompts"
            reading.needs("python", line, reason, "write a format_row that distinguishes them")
            return
        each = list(dict.fromkeys(self.shapes.values()))
        reading.texts[SUFFIX] = hooks_text(reading.tool.removesuffix(" recipe"), each)
        note = f"makes of a row what {reading.tool.partition(' ')[0]} makes of it"
        reading.take("python", SUFFIX, Given(key, None, line), said=key, note=note)
        if self.plain:
            columns = " or ".join(" and ".join(shape.columns()) for shape in each)
            reason = f"format_row gets all rows: it also changes those here that have {columns}"
            hint = "look with `effilaunch prepare RECIPE --show 3`"
            reading.drop(Given(key, ", ".join(self.plain), line), Effect.TRAINING, reason, hint)
