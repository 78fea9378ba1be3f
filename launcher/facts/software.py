"""Versions of the libraries that a run depends on, from package metadata, without an import."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Collection, Iterable
from importlib import metadata

from launcher.errors import MachineError, Problem

PACKAGES = (
    "transformers",
    "torch",
    "accelerate",
    "deepspeed",
    "peft",
    "bitsandbytes",
    "datasets",
    "trl",
    "flash_attn",
    "liger-kernel",
    "wandb",
)

OF_NO_EXTRA = {
    "flash_attn": "pip install flash-attn --no-build-isolation",  # built against the torch that is here
}
"""Module -> what installs it."""
EXTRAS = {"trl": "dpo", "liger_kernel": "liger"}
"""Module -> our extra that brings it; all others come with `train`."""


def installed_versions() -> dict[str, str]:
    """Package name -> version, with `python`; packages that are not installed are left out."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def require_modules(names: Iterable[str]) -> None:
    """MachineError when a module that a command needs is not installed."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    if absent:
        message = f"not installed: {', '.join(absent)}"
        raise MachineError(Problem("package-missing", message, hint=install_hint(absent)))


def install_hint(absent: Collection[str]) -> str:
    """The commands that install packages of ours and of no extra."""
    hints = [OF_NO_EXTRA[name] for name in absent if name in OF_NO_EXTRA]
    ours = set(absent) - OF_NO_EXTRA.keys()
    extras = ["train"] if ours - {"liger_kernel"} else []
    extras += [extra for name, extra in EXTRAS.items() if name in ours]
    if extras:
        hints.insert(0, f"pip install 'effilaunch[{','.join(extras)}]'")
    return "; ".join(hints)
