"""Folders that a run writes to, and shared memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.facts.build_locks import extensions_root, on_network
from launcher.facts.hub import hub_cache, hub_home
from launcher.facts.probe import cache_root
from launcher.facts.user_files import exists, expanded

SHARED_MEMORY = Path("/dev/shm")
BUFFERS = "deepspeed_allreduce_buffer_*"
"""DeepSpeed's files of CPU runs; it never removes them (csrc/cpu/comm/shm.cpp)."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder, or the nearest existing one above it; bytes as statvfs tells them."""

    path: str
    free: int
    total: int
    writable: bool
    filesystem: int
    """The same number for folders of one filesystem."""
    on_network: bool


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """Folders by what they hold."""

    folders: Mapping[str, Folder]
    """run | hub | datasets | cache | extensions | temporary"""
    shared_memory: Folder | None
    leftovers: tuple[str, ...]
    """Names of DeepSpeed's buffers in shared memory that no process has open."""
    leftover_bytes: int


def read_disk(
    run_dir: Path, cache_dir: str | None, environ: Mapping[str, str], shared_memory: Path = SHARED_MEMORY
) -> DiskFacts:
    """Sizes and rights of every folder; cache_dir: the recipe's model.cache_dir."""
    home = hub_home(environ)
    paths = {
        "run": run_dir,
        "hub": Path(cache_dir) if cache_dir else hub_cache(environ),
        "datasets": Path(environ.get("HF_DATASETS_CACHE") or home / "datasets"),
        "cache": cache_root(),
        "extensions": extensions_root(environ),
        "temporary": Path(environ.get("TMPDIR") or "/tmp"),
    }
    dead = _dead_buffers(shared_memory)
    return DiskFacts(
        folders={name: read_folder(expanded(path)) for name, path in paths.items()},
        shared_memory=read_folder(shared_memory) if shared_memory.is_dir() else None,
        leftovers=tuple(path.name for path, _ in dead),
        leftover_bytes=sum(size for _, size in dead),
    )


def read_folder(path: Path) -> Folder:
    """Space and rights at a folder that need not exist yet."""
    there = path.absolute()
    while not exists(there) and there != there.parent:
        there = there.parent
    try:
        usage, device = shutil.disk_usage(there), there.stat().st_dev
    except OSError:  # a broken mount
        return Folder(str(path), 0, 0, False, 0, False)
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return Folder(str(path), usage.free, usage.total, writable, device, on_network(there))


def _dead_buffers(folder: Path) -> list[tuple[Path, int]]:
    """Buffers that no process of this machine maps, as far as this user may see."""
    found = []
    mapped: set[str] | None = None
    for path in sorted(folder.glob(BUFFERS)):
        mapped = mapped_files(folder) if mapped is None else mapped
        try:
            size = path.stat().st_blocks * 512
        except OSError:  # its owner removes it just now
            continue
        if str(path) not in mapped:
            found.append((path, size))
    return found


def mapped_files(folder: Path) -> set[str]:
    """Files of `folder` that living processes have mapped."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text("utf-8", errors="replace").splitlines()
        except OSError:  # it ended, or is somebody else's
            continue
        found |= {line.split(maxsplit=5)[-1] for line in lines if f" {folder}/" in line}
    return found
