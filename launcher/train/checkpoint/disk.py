"""Files on a disk that may fail: folders appear complete or not at all, and errors are recognised."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launcher.errors import Problem, RunFailed
from launcher.files.checkpoint import FileFacts, sha256_of
from launcher.train.progress import LEAST_S, Progress

REMOVED = ".removed"
"""Folder for what is being removed, which no reader looks into; next to it."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # linux/fs.h


def publish(aside: Path, final: Path) -> None:
    """Move a finished folder to its place, replacing one that may be there, and sync that."""
    if not final.exists():
        aside.rename(final)
    elif _exchange(aside, final):
        remove_folder(aside)
    else:  # a filesystem that cannot exchange names (NFS): neither is there between two renames
        final.rename(_removed(final))
        aside.rename(final)
        clean(final.parent)
    sync_folder(final.parent)


def remove_folder(folder: Path) -> None:
    """Rename a folder, then remove it: a half-removed one must not look complete."""
    if not folder.exists():
        return
    folder.rename(_removed(folder))
    clean(folder.parent)


def clean(folder: Path) -> None:
    """Finish the removals of `folder`, also one that was interrupted."""
    shutil.rmtree(folder / REMOVED, ignore_errors=True)


def _removed(folder: Path) -> Path:
    place = folder.parent / REMOVED
    place.mkdir(exist_ok=True)
    gone = place / folder.name
    shutil.rmtree(gone, ignore_errors=True)
    return gone


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names atomically; False if kernel or filesystem cannot."""
    try:
        call = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):  # an old C library
        return False
    names = os.fsencode(one), os.fsencode(other)
    return bool(call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)


def sync_file(path: Path) -> None:
    """fsync a file. Raises OSError if what was written is not on the disk."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """fsync the entries of a folder, if the filesystem can."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def sync_tree(folder: Path) -> None:
    """fsync all files below a folder. Raises OSError as `sync_file`."""
    places = [folder, *folder.rglob("*")]
    for path in places:
        if path.is_file():
            sync_file(path)
    for path in places:
        if path.is_dir():
            sync_folder(path)


def hash_and_sync(folder: Path, names: Collection[str]) -> dict[str, FileFacts]:
    """Hash and fsync files below a folder at the same time. Raises OSError if one fails."""
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


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk of a folder, which need not exist."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(there).free


def mib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


_START_FILE = "environment.json"
"""Written at each start, with its port. A folder's inode is not enough: network and user-space filesystems
change it."""


class OwnRunDir:
    """Whether the run directory is still the one in which a rank began: it may be moved or replaced."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._began_there = run_dir.is_dir()
        try:
            self._start = self._read()
        except OSError:
            self._began_there = False

    def check(self) -> None:
        """FileNotFoundError if the folder is gone, or another run's folder has its name."""
        if not self._began_there:
            return
        try:
            if self._read() == self._start and self._run_dir.is_dir():
                return
        except OSError:  # the disk does not answer for a moment; the save itself will fail
            return
        why = "another folder has its name" if self._run_dir.is_dir() else "it was removed or moved"
        raise FileNotFoundError(
            errno.ENOENT, f"the run directory is no longer there: {why}", str(self._run_dir)
        )

    def _read(self) -> bytes | None:
        """None without such a file; OSError if it cannot be read."""
        try:
            return (self._run_dir / _START_FILE).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None


class SaveFailed(RunFailed):
    """A checkpoint or the result could not be written."""

    def __init__(self, problem: Problem, at: float) -> None:
        super().__init__(problem)
        self.at = at
        """Seconds since 1970, before the incomplete folder was removed: that may fail on other ranks."""


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Messages of writers that raise no OSError: safetensors (Rust), and torch.save, which does not ask why.
_FULL_TEXT = re.compile(
    r"No space left on device|Disk quota exceeded|File too large|StorageFull|os error (?:27|28|122)\b"
    r"|PytorchStreamWriter failed writing|unexpected pos \d+ vs \d+|iostream error"
)

_UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOENT, errno.ENOTDIR,
               errno.EEXIST, errno.ENOTEMPTY}  # fmt: skip
_UNWRITABLE_TEXT = re.compile(
    r"os error (?:1|2|5|13|20|30|116)\b|Parent directory .* does not exist|Permission denied"
    r"|Read-only file system|Stale file handle"
)


def is_full(error: BaseException) -> bool:
    """Whether an error is caused by a full disk, a quota or a limit of the file size."""
    return _is_caused_by(error, _FULL, _FULL_TEXT)


def is_unwritable(error: BaseException) -> bool:
    """Whether an error is caused by a folder that is gone or cannot be written to."""
    return _is_caused_by(error, _UNWRITABLE, _UNWRITABLE_TEXT)


def _is_caused_by(error: BaseException, numbers: set[int], texts: re.Pattern[str]) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in numbers:
            return True
        if texts.search(str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def save_problem(name: str, folder: Path, needed: int, last: int | None, error: BaseException) -> Problem:
    """The problem of a save that failed because of the disk: `is_full` or `is_unwritable`.

    name: of what was saved into `folder`. needed: its bytes. last: the last complete checkpoint.
    """
    text = f"{type(error).__name__}: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
    kept = "there is no earlier checkpoint" if last is None else f"checkpoint-{last} is complete"
    if is_full(error):
        return Problem(
            "checkpoint-disk",
            f"the disk is full: {name} could not be written: {text}; it takes about {mib(needed)}, "
            f"{mib(free_bytes(folder))} are free after the incomplete one was removed; {kept}",
            file=str(folder),
            path="trainer.save_total_limit",
            hint="free disk space, then continue with `effilaunch run RECIPE --resume auto`; or save less: "
            "trainer.save_total_limit: 1, trainer.save_only_model: true",
        )
    return Problem(
        "checkpoint-unwritable",
        f"{name} could not be written: {text}; {kept}",
        file=str(folder),
        hint="check that the folder exists, that this user may write to it and that nobody else removes "
        "files from it, then continue with `effilaunch run RECIPE --resume auto`",
    )
