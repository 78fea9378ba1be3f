"""Installed packages beside the tested and the least versions."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from launcher.facts.software import OF_NO_EXTRA

TESTED: Mapping[str, str] = {
    "packaging": "26.3",
    "pydantic": "2.14.3",
    "pyyaml": "6.0.3",
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "datasets": "5.2.0",
    "accelerate": "1.15.0",
    "deepspeed": "0.19.8",
    "peft": "0.21.2",
    "bitsandbytes": "0.50.2",
    "wandb": "0.31.0",
    "tensorboard": "2.21.0",
    "trackio": "0.43.0",
    "gguf": "0.19.0",
    "pillow": "12.3.0",
    "trl": "1.16.0",
    "huggingface_hub": "2.4.0",
    "tokenizers": "0.23.3",
    "safetensors": "0.8.0",
    "numpy": "2.4.6",
}
"""The versions of constraints.txt, which is not part of an installed package (a test compares them)."""
RANGES: Mapping[str, str] = {
    "packaging": ">=23",
    "pydantic": ">=2.7",
    "pyyaml": ">=6",
    "torch": ">=2.8",
    "transformers": ">=5.20,<6",
    "datasets": ">=4",
    "accelerate": ">=1.10",
    "deepspeed": ">=0.18",
    "peft": ">=0.18",
    "bitsandbytes": ">=0.48",
    "wandb": ">=0.20",
    "tensorboard": ">=2.19",
    "trackio": ">=0.40",
    "gguf": ">=0.17",
    "pillow": ">=10",
    "trl": ">=1.10",
}
"""The ranges of pyproject.toml (likewise), which an old installation's metadata may not have."""
PROGRAMS = ("pdsh", "ssh")
"""What starts processes on other machines."""


@dataclass(frozen=True, slots=True)
class SoftwareFacts:
    """Versions by package."""

    system: str
    """Kernel and C library, e.g. `Linux 6.8 x86_64, glibc 2.39`."""
    python: str
    installed: Mapping[str, str]
    """Of TESTED's packages and those of no extra; one that is not installed is left out."""
    programs: tuple[str, ...]
    """Those of PROGRAMS that are on PATH or beside the interpreter."""
    mpi4py: bool


def read_software(environ: Mapping[str, str]) -> SoftwareFacts:
    """Package metadata only: nothing is imported."""
    installed = {}
    for package in (*TESTED, *OF_NO_EXTRA):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    beside = str(Path(sys.executable).parent)
    path = f"{beside}:{environ.get('PATH', '')}"
    return SoftwareFacts(
        system=" ".join((platform.system(), platform.release(), platform.machine(), *platform.libc_ver())),
        python=platform.python_version(),
        installed=installed,
        programs=tuple(program for program in PROGRAMS if shutil.which(program, path=path)),
        mpi4py=importlib.util.find_spec("mpi4py") is not None,
    )


def outside_range(package: str, version: str) -> str | None:
    """The supported range that a version misses, or None."""
    wanted = RANGES.get(package, "")
    try:
        requirement = Requirement(f"{package}{wanted}")
        return None if requirement.specifier.contains(version, prereleases=True) else wanted
    except InvalidRequirement:  # a range of another form says nothing
        return None
