"""Folders that appear and vanish at once: a reader, or a run that starts again, never meets half of one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launcher.facts.checkpoint import FileFacts, sha256_of
from launcher.train.progress import LEAST_S, Progress

REMOVED = ".removed"
"""Beside the folders that go: what is being removed lies here, and no reader looks."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # linux/fs.h


def publish(aside: Path, final: Path) -> None:
    """Move a finished folder to its place, instead of one that may be there, and put that on the disk."""
    if not final.exists():
        aside.rename(final)
    else:
        replace_folder(aside, final)
    sync_folder(final.parent)


def replace_folder(aside: Path, final: Path) -> None:
    """Put `aside` in the place of `final`, which is removed: one of the two is there at any moment.

    On a filesystem that cannot exchange names (NFS), neither is for the time between two renames.
    """
    if _exchange(aside, final):
        remove_folder(aside)
        return
    old = _removed(final)
    final.rename(old)
    aside.rename(final)
    clean(final.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder, by another name first: a half-removed one must not look like a whole one."""
    if not folder.exists():
        return
    folder.rename(_removed(folder))
    clean(folder.parent)


def clean(folder: Path) -> None:
    """Remove from `folder` what removals have put aside, also one that was cut off."""
    shutil.rmtree(folder / REMOVED, ignore_errors=True)


def _removed(folder: Path) -> Path:
    place = folder.parent / REMOVED
    place.mkdir(exist_ok=True)
    gone = place / folder.name
    shutil.rmtree(gone, ignore_errors=True)
    return gone


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names at once; False where kernel or filesystem cannot."""
    try:
        call = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):  # an old C library
        return False
    names = os.fsencode(one), os.fsencode(other)
    return bool(call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)


def sync_folder(folder: Path) -> None:
    """Put a folder's entries on the disk; not every filesystem lets one."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def sync_tree(folder: Path) -> None:
    """Put all files below a folder on the disk. Raises OSError as `sync_file`."""
    places = [folder, *folder.rglob("*")]
    for path in places:
        if path.is_file():
            sync_file(path)
    for path in places:
        if path.is_dir():
            sync_folder(path)


def hash_and_sync(folder: Path, names: Collection[str]) -> dict[str, FileFacts]:
    """Files below a folder, hashed and put on the disk at the same time. Raises OSError where one fails."""
    size = sum((folder / name).stat().st_size for name in names)
    progress = Progress("Hashing what was saved", size, "B", least_s=LEAST_S)
    with progress, ThreadPoolExecutor(4) as pool:
        synced = [pool.submit(sync_file, folder / name) for name in names]
        hashes = sha256_of(folder, names, progress.add)
        for done in synced:
            done.result()
    found = {}
    for name, value in hashes.items():
        if isinstance(value, OSError):
            raise value
        found[name] = FileFacts((folder / name).stat().st_size, value)
    return found


def sync_file(path: Path) -> None:
    """Put a file on the disk. Raises OSError where that fails: what was written is not there then."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
