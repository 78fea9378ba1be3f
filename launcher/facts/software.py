"""Versions of the libraries that a run depends on, from package metadata, without an import."""

from __future__ import annotations

import platform
from importlib import metadata

PACKAGES = (
    "transformers",
    "torch",
    "accelerate",
    "deepspeed",
    "peft",
    "bitsandbytes",
    "datasets",
    "wandb",
)


def installed_versions() -> dict[str, str]:
    """Package name -> version, with `python`; packages that are not installed are left out."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
