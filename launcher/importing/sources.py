"""Where rows lie, as other tools say it, and what of that a source in `data` can say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from launcher.importing.arguments import as_number
from launcher.importing.found import Effect, Reading, shown
from launcher.recipe.data_paths import is_glob, is_hub_id, is_package, is_url

BUILDERS = ("json", "csv", "parquet", "text", "arrow")
"""What `load_dataset` takes in the place of a name, for files that a recipe names themselves."""
NO_LIMIT = "all rows are used: a recipe has no limit of rows"
_HUB = re.compile(r"(?:https?://huggingface\.co/datasets/|hf://datasets/)([\w.-]+/[\w.-]+)/?$")
_SLICE = re.compile(r"([\w.-]+)\[(.*)\]$")
_ROWS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")


def source_at(
    reading: Reading, key: str, line: int | None, path: Any, given: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """A source of `data` for an address; None, with the reason in the reading, where it cannot be one.

    key: where the address stands in the file. given: what is said beside it, of name, split and revision.
    """
    asked = {name: str(value) for name, value in (given or {}).items() if value not in (None, "")}
    if not isinstance(path, str) or not path.strip():
        reading.drop(key, path, line, Effect.NEEDED, "expected a path or the name of a data set")
        return None
    path = path.strip()
    hub = _HUB.match(path)
    if hub:
        path = hub[1]
    elif is_url(path):
        reading.drop(
            key,
            path,
            line,
            Effect.NEEDED,
            "rows are not read from an address",
            "download them, and name the file",
        )
        return None
    asked = _whole_split(reading, key, line, asked)
    folder = Path(reading.file).parent
    if is_package(path):
        return {"path": path}
    if is_hub_id(path, folder) and not _is_here(path, folder):
        if asked.get("split") == "train":
            del asked["split"]
        return {"path": path, **asked}
    if not _is_here(path, folder) and _looks_like_name(path):
        beside = "".join(f", {name}: {shown(value)}" for name, value in asked.items() if value != "train")
        hint = f"write data.train: [{{path: organisation/{shown(path)}{beside}}}]"
        reading.drop(key, path, line, Effect.NEEDED, "a data set of the hub needs its full id", hint)
        return None
    return _local(reading, key, line, path, asked)


def evaluation_share(reading: Reading, key: str, line: int | None, value: Any) -> float | None:
    """A share of the training rows to evaluate on; None where it is 0 or cannot be said."""
    size = as_number(value)
    if size is None or size < 0:
        reading.drop(key, value, line, Effect.NEEDED, "expected a share of the rows")
    elif size >= 1:
        reading.drop(key, value, line, Effect.NEEDED, "a number of rows; a recipe says a share of them",
                     "write data.eval: {split: 0.05}")  # fmt: skip
    elif size > 0:
        return float(size)
    reading.know(key)
    return None


def _is_here(path: str, folder: Path) -> bool:
    """Whether it is there, from the file's folder or from here."""
    try:
        return (folder / path).exists() or Path(path).exists()
    except OSError:
        return False


def _looks_like_name(path: str) -> bool:
    """Whether it is a name alone, such as imdb: neither a file's nor a folder's."""
    return "/" not in path and "\\" not in path and not is_glob(path) and not Path(path).suffix


def _whole_split(reading: Reading, key: str, line: int | None, asked: dict[str, str]) -> dict[str, str]:
    """Without the slice of `train[:1%]`, which has no word here."""
    split = asked.get("split", "")
    part = _SLICE.match(split)
    if part:
        reading.drop(
            f"{key} split", split, line, Effect.TRAINING, f"the whole split {part[1]} is read; {NO_LIMIT}"
        )
        return {**asked, "split": part[1]}
    if "+" in split:
        first = split.split("+")[0].strip()
        reading.drop(
            f"{key} split", split, line, Effect.TRAINING, f"only {first} is read: write a source for each"
        )
        return {**asked, "split": first}
    return asked


def _local(
    reading: Reading, key: str, line: int | None, path: str, asked: dict[str, str]
) -> dict[str, Any] | None:
    split = asked.pop("split", "train")
    for name, value in asked.items():
        reading.drop(f"{key} {name}", value, line, Effect.NONE, "only a data set of the hub has it")
    found = _split_in(path, split, Path(reading.file).parent)
    if found is None:
        reason, hint = "which files of the folder are that split", "name them: {path: FILE}"
        reading.drop(key, f"{path}, split {split}", line, Effect.NEEDED, reason, hint)
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
