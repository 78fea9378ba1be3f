"""Installed, tested and supported versions of packages, read from metadata without importing them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from launcher.errors import MachineError, Problem
from launcher.tasks import TASKS

PACKAGES = (
    "transformers", "torch", "accelerate", "deepspeed", "peft", "bitsandbytes", "datasets", "trl",
    "sentence-transformers", "flash_attn", "liger-kernel", "wandb", "tensorboard", "trackio",
)  # fmt: skip

OF_NO_EXTRA = {
    "flash_attn": "pip install flash-attn --no-build-isolation",  # built against the installed torch
    "vllm": "pip install vllm, or use generation.backend: transformers",
    "mlflow": "pip install mlflow",
    "comet_ml": "pip install comet-ml",
    "clearml": "pip install clearml",
    "swanlab": "pip install swanlab",
    "adlfs": "pip install adlfs",
    "aiohttp": "pip install aiohttp",
}
"""Packages in no extra -> how to install them."""
EXTRAS = {
    "s3fs": "s3", "gcsfs": "gcs",
    "lm_eval": "eval", "liger_kernel": "liger", "tensorboard": "trackers", "trackio": "trackers",
    **{package: task.extra for task in TASKS for package in task.packages if task.extra},
}  # fmt: skip
"""Module -> extra that installs it; default: `train`."""
_BESIDE_TRAIN = ("liger", "trackers", "s3", "gcs", "eval")
"""Extras that do not imply a missing `train`."""


def installed_versions() -> dict[str, str]:
    """Installed package -> version, and `python`."""
    found = {package: installed_version(package) for package in PACKAGES}
    return {"python": sys.version.split()[0]} | {name: said for name, said in found.items() if said}


def installed_version(package: str) -> str | None:
    """The version of a package, without importing it; None where it is not installed."""
    return _named_by_folders(tuple(sys.path)).get(_normal(package)) or _by_metadata(package)


@cache
def _named_by_folders(path: tuple[str, ...]) -> dict[str, str]:
    """Normalised name -> version, from `NAME-VERSION.dist-info` folders; the first on the path wins.

    importlib.metadata does the same, but importing it takes as long as starting Python.
    """
    found: dict[str, str] = {}
    for folder in path:
        try:
            entries = os.listdir(folder or ".")  # noqa: PTH208 - a Path for each of many is slow
        except OSError:  # an archive, or nothing
            continue
        for entry in entries:
            name, dash, version = entry.removesuffix(".dist-info").partition("-")
            if dash and entry.endswith(".dist-info"):
                found.setdefault(_normal(name), version)
    return found


def _normal(name: str) -> str:
    """A normalised distribution name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _by_metadata(package: str) -> str | None:
    """The version of a package without a dist-info folder."""
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        return None
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def require_modules(names: Iterable[str]) -> None:
    """MachineError when a module that a command needs is not installed."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    if absent:
        message = f"not installed: {', '.join(absent)}"
        raise MachineError(Problem("package-missing", message, hint=install_hint(absent)))


def install_hint(absent: Collection[str]) -> str:
    """The commands that install the given modules."""
    hints = [OF_NO_EXTRA[name] for name in absent if name in OF_NO_EXTRA]
    ours = set(absent) - OF_NO_EXTRA.keys()
    extras = ["train"] if any(EXTRAS.get(name) not in _BESIDE_TRAIN for name in ours) else []
    extras += [extra for name, extra in EXTRAS.items() if name in ours]
    if extras:
        hints.insert(0, f"pip install 'effilaunch[{','.join(dict.fromkeys(extras))}]'")
    return "; ".join(hints)


_VERSIONS = {
    "argcomplete": ("3.7.2", ">=3.6"),
    "packaging": ("26.3", ">=23"),
    "pydantic": ("2.14.3", ">=2.7"),
    "pyyaml": ("6.0.3", ">=6"),
    "torch": ("2.13.0", ">=2.8"),
    "transformers": ("5.23.0", ">=5.23,<6"),
    "datasets": ("5.2.0", ">=4.7"),
    "accelerate": ("1.15.0", ">=1.13"),
    "deepspeed": ("0.19.8", ">=0.19.8"),
    "peft": ("0.21.2", ">=0.21.2"),
    "bitsandbytes": ("0.50.2", ">=0.48"),
    "wandb": ("0.31.0", ">=0.20"),
    "tensorboard": ("2.21.0", ">=2.19"),
    "trackio": ("0.43.0", ">=0.40"),
    "gguf": ("0.19.0", ">=0.17"),
    "pillow": ("12.3.0", ">=10"),
    "trl": ("1.16.0", ">=1.16"),
    "huggingface_hub": ("2.4.0", ""),
    "tokenizers": ("0.23.3", ""),
    "safetensors": ("0.8.0", ""),
    "numpy": ("2.4.6", ""),
}
"""Package -> the version in constraints.txt, and the range in pyproject.toml, "" where another package
sets it. Neither file is part of an installed package; a test compares them."""
TESTED: Mapping[str, str] = {name: tested for name, (tested, _) in _VERSIONS.items()}
RANGES: Mapping[str, str] = {name: limits for name, (_, limits) in _VERSIONS.items() if limits}
PROGRAMS = ("pdsh", "ssh")
"""Programs that start processes on other hosts."""


@dataclass(frozen=True, slots=True)
class SoftwareFacts:
    """Versions by package."""

    system: str
    """Kernel and C library, e.g. `Linux 6.8 x86_64, glibc 2.39`."""
    python: str
    installed: Mapping[str, str]
    """Package -> version, of TESTED and OF_NO_EXTRA."""
    programs: tuple[str, ...]
    """Those of PROGRAMS on PATH or next to the interpreter."""
    mpi4py: bool


def read_software(environ: Mapping[str, str]) -> SoftwareFacts:
    """Package metadata only: nothing is imported."""
    import platform
    from importlib import metadata

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
    """The supported range, where the version is outside of it, else None."""
    from packaging.requirements import InvalidRequirement, Requirement

    wanted = RANGES.get(package, "")
    try:
        requirement = Requirement(f"{package}{wanted}")
        return None if requirement.specifier.contains(version, prereleases=True) else wanted
    except InvalidRequirement:  # no PEP 440 range
        return None
