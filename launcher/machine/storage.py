"""Free space and rights of the folders that a run writes to; stale locks and buffers left by dead
processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.files.safe_files import exists, expanded
from launcher.machine.hub_client import hub_cache, hub_home
from launcher.machine.interfaces import UNKNOWN, filesystem_of
from launcher.machine.probe import cache_root

SHARED_MEMORY = Path("/dev/shm")
BUFFERS = "deepspeed_allreduce_buffer_*"
"""DeepSpeed's shared memory of CPU runs, which it never removes (csrc/cpu/comm/shm.cpp)."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder, or its nearest existing parent; bytes from statvfs."""

    path: str
    free: int
    total: int
    writable: bool
    filesystem: int
    """Device number."""
    on_network: bool


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """Folders by what they hold."""

    folders: Mapping[str, Folder]
    """run | hub | datasets | cache | extensions | temporary"""
    shared_memory: Folder | None
    leftovers: tuple[str, ...]
    """Names of DeepSpeed's buffers in shared memory that no process has mapped."""
    leftover_bytes: int


def read_disk(
    run_dir: Path, cache_dir: str | None, environ: Mapping[str, str], shared_memory: Path = SHARED_MEMORY
) -> DiskFacts:
    """Space and rights of every folder; cache_dir: model.cache_dir of the recipe."""
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
    """Space and rights of a folder that need not exist yet."""
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
    """Buffers that no process has mapped, as far as this user can see."""
    found = []
    mapped: set[str] | None = None
    for path in sorted(folder.glob(BUFFERS)):
        mapped = mapped_files(folder) if mapped is None else mapped
        try:
            size = path.stat().st_blocks * 512
        except OSError:  # just removed
            continue
        if str(path) not in mapped:
            found.append((path, size))
    return found


def mapped_files(folder: Path) -> set[str]:
    """Files of `folder` that processes have mapped."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text("utf-8", errors="replace").splitlines()
        except OSError:  # it exited, or belongs to another user
            continue
        found |= {line.split(maxsplit=5)[-1] for line in lines if f" {folder}/" in line}
    return found


NETWORK_FILESYSTEMS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "afs", "fuse")
OLD_S = 1800.0
"""Longer than any DeepSpeed extension takes to build."""


def extensions_root(environ: Mapping[str, str]) -> Path:
    """The folder in which torch builds extensions."""
    named = environ.get("TORCH_EXTENSIONS_DIR")
    cache = environ.get("XDG_CACHE_HOME") or str(expanded(environ.get("HOME", "~")) / ".cache")
    return Path(named) if named else Path(cache) / "torch_extensions"


def stale_locks(environ: Mapping[str, str]) -> list[Path]:
    """Locks of torch's extension builds that killed builds left behind.

    torch waits for such a lock forever, without a message (torch/utils/file_baton.py). A builder holds its
    lock file open, so a lock that no process has open is stale. On a network filesystem, where the builder
    may be on another host, only old locks count.
    """
    root = extensions_root(environ)
    locks = sorted([*root.glob("*/lock"), *root.glob("*/*/lock")])
    if not locks:
        return []
    held = _open_files()
    stale = []
    for lock in locks:
        with contextlib.suppress(OSError):  # just removed
            old = time.time() - lock.stat().st_mtime > OLD_S
            if lock.resolve() not in held and (old or not on_network(lock)):
                stale.append(lock)
    return stale


def _open_files() -> set[Path]:
    """Every file named `lock` that a process has open."""
    found: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process exited, or belongs to another user
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # just closed
                    found |= {target for target in [link.readlink()] if target.name == "lock"}
    return found


def on_network(path: Path) -> bool:
    """Whether `path` is on a network filesystem; True where unknown."""
    return filesystem_of(path).startswith((*NETWORK_FILESYSTEMS, UNKNOWN))
