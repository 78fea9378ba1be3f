"""A disk that gives out while something is saved: how it shows, and what is said of it."""

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


class SaveFailed(RunFailed):
    """A checkpoint or the result could not be written."""

    def __init__(self, problem: Problem, at: float) -> None:
        super().__init__(problem)
        self.at = at
        """When (epoch, s): before the half-written folder was removed, which other ranks may stumble over."""


def is_full(error: BaseException) -> bool:
    """Whether a disk without room, a quota or a file-size limit is behind an error."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _FULL:
            return True
        if _FULL_TEXT.search(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def full_problem(name: str, folder: Path, needed: int, good: int | None, error: Exception) -> Problem:
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    behind = "no earlier checkpoint is there" if good is None else f"checkpoint-{good} is complete"
    return Problem(
        "checkpoint-disk",
        f"the disk gave out while {name} was written: {type(error).__name__}: {said}; it takes about "
        f"{mib(needed)}, {mib(free_bytes(folder))} are free without the half-written one; {behind}",
        file=str(folder),
        path="trainer.save_total_limit",
        hint="make room there, then go on with `effilaunch run RECIPE --resume auto`; or save less: "
        "trainer.save_total_limit: 1, trainer.save_only_model: true",
    )


def mib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free
