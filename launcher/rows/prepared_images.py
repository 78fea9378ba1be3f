"""Statistics of the images in prepared rows, kept for later plans of the same recipe.

One JSON file per recipe in the cache, named by a hash of the settings that decide the samples. It holds size
and modification time of every file that was read. Nothing is found once one of them has changed or the
recipe's sources resolve to other files, and nothing is kept for rows that are not in local files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.files.safe_files import read_json, write_json
from launcher.machine.probe import cache_root

LARGEST = 64
"""How many of the samples with the most pixels are listed."""
_VERSION = 1
_BESIDE = (
    "processor_config.json", "preprocessor_config.json", "tokenizer_config.json", "tokenizer.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Files of a model's folder that decide the tokens of an image, and which samples are too long."""


@dataclass(frozen=True, slots=True)
class PreparedImages:
    """Images of the training samples."""

    samples: int
    tokens: Mapping[str, float]
    """Image tokens per sample: {mean, p50, p95, max}."""
    images: Mapping[str, float]
    """Images per sample: {mean, p50, p95, max}."""
    pixels: tuple[int, ...]
    """Pixel values per sample of the LARGEST samples with the most, descending."""
    of_image: int
    """Pixel values of the largest image."""

    def to_json(self) -> dict[str, Any]:
        """The `images` object of `plan --json`."""
        return {
            "samples": self.samples,
            "tokens_per_sample": dict(self.tokens),
            "images_per_sample": dict(self.images),
        }


def keep(settings: Mapping[str, Any], files: Sequence[str], transformers: str, found: PreparedImages) -> None:
    """Write the statistics of the rows in these files; nothing for rows that are not in local files.

    OSError where the cache cannot be written.
    """
    if not files or not all(Path(file).is_absolute() and Path(file).is_file() for file in files):
        return
    path = _path(settings, transformers)
    path.parent.mkdir(parents=True, exist_ok=True)
    states = {file: _state(Path(file)) for file in (*files, *_others(settings))}
    write_json(path, {"schema_version": _VERSION, "files": states, "images": asdict(found)})


def find(settings: Mapping[str, Any], files: Sequence[str], transformers: str) -> PreparedImages | None:
    """What was kept for these settings and files of rows; None if there is nothing or a file has changed."""
    try:
        known = read_json(_path(settings, transformers))
        if known["schema_version"] != _VERSION or known["files"].keys() != {*files, *_others(settings)}:
            return None
        if any(_state(Path(file)) != state for file, state in known["files"].items()):
            return None
        images = known["images"]
        return PreparedImages(**{**images, "pixels": tuple(images["pixels"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _path(settings: Mapping[str, Any], transformers: str) -> Path:
    decided = json.dumps([dict(settings), transformers], sort_keys=True)
    return cache_root() / "prepared-images" / f"{hashlib.sha256(decided.encode()).hexdigest()[:32]}.json"


def _others(settings: Mapping[str, Any]) -> set[str]:
    """Files that decide the samples besides the rows: those of the model's folder, and the hook file."""
    folders, hooks = (settings["model.name_or_path"], settings["model.tokenizer"]), settings["python.file"]
    beside = [Path(folder) / name for folder in folders if folder for name in _BESIDE]
    return {str(path) for path in (*beside, *([Path(hooks)] if hooks else [])) if path.is_file()}


def _state(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]
