"""Whether a run directory is still the one that the run began in: it may be removed, moved or replaced."""

from __future__ import annotations

import errno
from pathlib import Path

_OWN = "environment.json"
"""Written anew at each start, with the port of it. A folder's inode would not do: network and user-space file
systems give other ones to the same folder."""


class OwnRunDir:
    """A run directory as it is when a rank begins."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._began_there = run_dir.is_dir()
        try:
            self._own = self._read()
        except OSError:
            self._began_there = False

    def check(self) -> None:
        """FileNotFoundError where the folder is gone, or another run's has its name."""
        if not self._began_there:
            return
        try:
            if self._read() == self._own and self._run_dir.is_dir():
                return
        except OSError:  # the disk does not answer for a moment; the save itself finds out
            return
        why = "another folder has its name" if self._run_dir.is_dir() else "it was removed or moved"
        raise FileNotFoundError(
            errno.ENOENT, f"the run directory is no longer there: {why}", str(self._run_dir)
        )

    def _read(self) -> bytes | None:
        """None where there is no such file; OSError where it cannot be read."""
        try:
            return (self._run_dir / _OWN).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
