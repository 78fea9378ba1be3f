"""Locks of torch's extension builds: a killed build leaves one, and later ones wait forever.

The failure is silent: torch polls the lock file without a message (torch/utils/file_baton.py). The builder
holds the file open, so a lock that no process has open was left by a dead one. On a network filesystem the
builder may be on another machine; there only an old lock counts as stale.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

from launcher.facts.user_files import expanded

NETWORK_FILESYSTEMS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "afs", "fuse")
OLD_S = 1800.0
"""No extension that DeepSpeed builds takes half an hour."""


def extensions_root(environ: Mapping[str, str]) -> Path:
    """The folder in which torch builds extensions."""
    named = environ.get("TORCH_EXTENSIONS_DIR")
    cache = environ.get("XDG_CACHE_HOME") or str(expanded(environ.get("HOME", "~")) / ".cache")
    return Path(named) if named else Path(cache) / "torch_extensions"


def stale_locks(environ: Mapping[str, str]) -> list[Path]:
    """The locks of dead builds in the folder that torch will use."""
    root = extensions_root(environ)
    locks = sorted([*root.glob("*/lock"), *root.glob("*/*/lock")])
    if not locks:
        return []
    held = _open_files()
    stale = []
    for lock in locks:
        with contextlib.suppress(OSError):  # its builder may remove it meanwhile
            old = time.time() - lock.stat().st_mtime > OLD_S
            if lock.resolve() not in held and (old or not on_network(lock)):
                stale.append(lock)
    return stale


def _open_files() -> set[Path]:
    """Every file named `lock` that a process of this machine has open."""
    found: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process ended while it was looked at, or is somebody else's
            for link in (process / "fd").iterdir():
                found |= _locks_behind(link)
    return found


def _locks_behind(link: Path) -> set[Path]:
    with contextlib.suppress(OSError):  # it was closed meanwhile
        target = link.readlink()
        return {target} if target.name == "lock" else set()
    return set()


def on_network(path: Path) -> bool:
    """Whether the filesystem of `path` is shared with other machines; True where that is not known."""
    best, kind = "", "fuse"
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text("utf-8").splitlines():
            _, mount, filesystem, *_ = line.split(" ")
            if str(path.resolve()).startswith(mount) and len(mount) >= len(best):
                best, kind = mount, filesystem
    return kind.startswith(NETWORK_FILESYSTEMS)
