"""A log that outlives a full disk: what cannot be written is left out with a word, and the run goes on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self


class LogFile:
    """Appends lines to a file. One that cannot be written is lost, the next one is tried again.

    say: told once when lines begin to be lost. How many they were is in the log, where it goes on.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path = path
        self._say = say
        self._descriptor: int | None = None
        self._lost = 0
        self._told = False
        self._torn = False
        """Whether the last line was cut off by the end of the disk."""

    def __enter__(self) -> Self:
        self._try(b"")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def line(self, text: str) -> None:
        """Append one line, at once: nothing waits in this process, which may be killed."""
        gap = f"==== {self._lost} lines are missing: the disk took none ====\n" if self._lost else ""
        if self._try(f"{gap}{text}\n".encode(errors="replace")):
            self._lost = 0
        else:
            self._lost += 1

    def _try(self, data: bytes) -> bool:
        """Whether all of it was written."""
        try:
            if self._descriptor is None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._descriptor = os.open(self.path, flags, 0o666)
            data = b"\n" + data if self._torn and data else data
            while data:
                written = os.write(self._descriptor, data)
                self._torn = data[written - 1 : written] != b"\n"
                data = data[written:]
        except OSError as error:
            if not self._told:
                self._told = True
                self._say(f"{self.path} cannot be written ({error.strerror}): the run goes on without it")
            return False
        return True


def unwritable_by(folder: Path) -> str | None:
    """Why no file can be written in a folder, in the system's words; None where one can."""
    probe = folder / ".probe"
    try:
        probe.write_bytes(bytes(_PROBE_BYTES))
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return None


_PROBE_BYTES = 4096
"""As much as the smallest file takes."""
