"""The rows that a run adds to its metrics.jsonl, read while it grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.facts.user_files import parse_json


class NewRows:
    """Reads on where it stopped; a file that was written anew, as every start does, from its beginning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        """Device and inode."""
        self._read = 0
        """Bytes of it."""

    def read(self) -> list[dict[str, Any]]:
        """The rows since the last time; a half-written one comes with the next."""
        try:
            with self._path.open("rb") as stream:
                state = self._path.stat()
                if (state.st_dev, state.st_ino) != self._file:
                    self._file, self._read = (state.st_dev, state.st_ino), 0
                stream.seek(self._read)
                whole, end, _ = stream.read().rpartition(b"\n")
        except OSError:
            return []
        self._read += len(whole) + len(end)
        return [row for line in whole.splitlines() if (row := _row(line)) is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
