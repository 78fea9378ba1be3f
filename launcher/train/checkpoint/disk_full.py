"""A disk or folder that gives out while something is saved: how it shows, and what is said of it."""

from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path

from launcher.errors import Problem, RunFailed

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# What those writers say that raise no OSError: safetensors (Rust), and torch.save, which does not ask why.
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


class SaveFailed(RunFailed):
    """A checkpoint or the result could not be written."""

    def __init__(self, problem: Problem, at: float) -> None:
        super().__init__(problem)
        self.at = at
        """When (epoch, s): before the half-written folder was removed, which other ranks may stumble over."""


def is_full(error: BaseException) -> bool:
    """Whether a disk without room, a quota or a file-size limit is behind an error."""
    return _is_behind(error, _FULL, _FULL_TEXT)


def is_unwritable(error: BaseException) -> bool:
    """Whether a folder that is gone, is not ours or cannot be written to is behind an error."""
    return _is_behind(error, _UNWRITABLE, _UNWRITABLE_TEXT)


def _is_behind(error: BaseException, numbers: set[int], texts: re.Pattern[str]) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in numbers:
            return True
        if texts.search(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def full_problem(name: str, folder: Path, needed: int, good: int | None, error: Exception) -> Problem:
    return Problem(
        "checkpoint-disk",
        f"the disk gave out while {name} was written: {_said(error)}; it takes about {mib(needed)}, "
        f"{mib(free_bytes(folder))} are free without the half-written one; {_behind(good)}",
        file=str(folder),
        path="trainer.save_total_limit",
        hint="make room there, then go on with `effilaunch run RECIPE --resume auto`; or save less: "
        "trainer.save_total_limit: 1, trainer.save_only_model: true",
    )


def unwritable_problem(name: str, folder: Path, good: int | None, error: Exception) -> Problem:
    return Problem(
        "checkpoint-unwritable",
        f"{name} could not be written: {_said(error)}; {_behind(good)}",
        file=str(folder),
        hint="see that the folder is there, that this user may write to it and that nobody else removes from "
        "it, then go on with `effilaunch run RECIPE --resume auto`",
    )


def _said(error: Exception) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{type(error).__name__}: {text}"


def _behind(good: int | None) -> str:
    return "no earlier checkpoint is there" if good is None else f"checkpoint-{good} is complete"


def mib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def free_bytes(folder: Path) -> int:
    """Of the disk that a folder lies on, or would lie on if it were there."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(there).free
