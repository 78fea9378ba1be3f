"""Images in the rows that `prepare` wrote, as later plans of the same recipe read them.

One JSON file for each recipe below the cache, named by the settings that decide the samples. It has the state
of every file that was read; where one of them has changed, or was never on this disk, or the recipe's sources
name other files now, nothing is found.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.facts.probe import cache_root
from launcher.facts.safe_files import read_json, write_json

DECIDE = (
    "task", "model.name_or_path", "model.revision", "model.tokenizer", "model.chat_template",
    "model.add_tokens", "model.image_sizes", "data.train", "data.max_length", "data.overlong", "data.loss_on",
    "data.loss_on_inserted", "python.file",
)  # fmt: skip
"""Settings of a plan that decide the samples; a recipe has the same values."""
LARGEST = 64
"""Samples whose pixels are kept one by one."""
_VERSION = 1
_BESIDE = (
    "processor_config.json", "preprocessor_config.json", "tokenizer_config.json", "tokenizer.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Files of a model's folder that decide the tokens of an image, and which samples are too long."""


@dataclass(frozen=True, slots=True)
class PreparedImages:
    """Images of the training samples. Spreads are {mean, p50, p95, max} of a sample."""

    samples: int
    tokens: Mapping[str, float]
    """Of images."""
    images: Mapping[str, float]
    pixels: tuple[int, ...]
    """Pixel values of the samples with the most, descending; at most LARGEST."""
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
    """Write what was found of rows in these files. OSError where the cache cannot be written; nothing is
    written for rows that are not in files of this machine."""
    if not files or not all(Path(file).is_absolute() and Path(file).is_file() for file in files):
        return
    path = _path(settings, transformers)
    path.parent.mkdir(parents=True, exist_ok=True)
    states = {file: _state(Path(file)) for file in (*files, *_others(settings))}
    write_json(path, {"schema_version": _VERSION, "files": states, "images": asdict(found)})


def find(settings: Mapping[str, Any], files: Sequence[str], transformers: str) -> PreparedImages | None:
    """What was kept for these settings and files of rows; None where nothing was, or a file is another one
    now."""
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
    decided = json.dumps([{name: settings[name] for name in DECIDE}, transformers], sort_keys=True)
    return cache_root() / "prepared-images" / f"{hashlib.sha256(decided.encode()).hexdigest()[:32]}.json"


def _others(settings: Mapping[str, Any]) -> set[str]:
    """Files that decide the samples besides the rows: of the model's folder, and the recipe's functions."""
    folders, hooks = (settings["model.name_or_path"], settings["model.tokenizer"]), settings["python.file"]
    beside = [Path(folder) / name for folder in folders if folder for name in _BESIDE]
    return {str(path) for path in (*beside, *([Path(hooks)] if hooks else [])) if path.is_file()}


def _state(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]
