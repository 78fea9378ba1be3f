"""Paths of the files shipped with the package, in a checkout and in a wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def _shipped(name: str) -> Path:
    """`launcher/_data/NAME` in a wheel, else the folder next to the package in a checkout."""
    packed = _PACKAGE / "_data" / name
    return packed if packed.is_dir() else _PACKAGE.parent / name


def recipes_dir() -> Path:
    """Folder of the shipped recipes."""
    return _shipped("recipes")


def shipped_names() -> list[str]:
    """Names of the shipped recipes, without suffix, bases as `_base/name`."""
    folder = recipes_dir()
    return sorted(str(file.relative_to(folder).with_suffix("")) for file in folder.rglob("*.yaml"))


def ds_configs_dir() -> Path:
    """Folder of the shipped DeepSpeed configurations."""
    return _shipped("ds_configs")


def facts_file(name: str) -> Path:
    """A data file of `launcher/models/`, e.g. `models.json`."""
    return _PACKAGE / "models" / "data" / name
