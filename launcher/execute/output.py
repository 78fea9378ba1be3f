"""What the processes of a run write to their pipe: kept whole in a log, shown until a process failed."""

from __future__ import annotations

import os
import re
import selectors
import time
from collections.abc import Callable
from typing import IO

from launcher.execute.log_file import LogFile

_CHUNK = 1 << 16
_TRACEBACK = "Traceback (most recent call last):"
# What the launchers say when a process of theirs ended: deepspeed/launcher/launch.py sigkill_handler,
# torch/distributed/elastic/multiprocessing/api.py and agent/server/api.py.
_LAUNCHER_ENDS = re.compile(
    r"\[launch\.py:\d+:sigkill_handler\]|"
    r"torch/distributed/elastic/\S+\.py:\d+\] "
    r"(?:Sending process \d+ closing signal|failed \(exitcode|Received \S+ death signal|Unable to shutdown)"
)


class Output:
    """Copies a pipe to a log and to `echo`, line by line, without waiting for more than it was told to.

    From the line on with which a launcher says that a process ended, `echo` gets nothing more: tables of the
    launcher and the other ranks' tracebacks would bury the one that tells the cause. A traceback waits for
    `release`, since it may only say that another rank is gone: `silence` drops it. The log has everything.
    hide: takes secrets out of a line; DeepSpeed's launcher writes every variable with NCCL in its name.
    """

    def __init__(
        self, stream: IO[bytes], log: LogFile, echo: Callable[[str], None], hide: Callable[[str], str] = str
    ) -> None:
        self._descriptor = stream.fileno()
        self._log, self._echo, self._hide = log, echo, hide
        self._rest = b""
        self._held: list[str] = []
        self._held_at = 0.0
        self._quiet = False
        self.ended = False
        """Whether nobody writes to the pipe any more."""
        os.set_blocking(self._descriptor, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._descriptor, selectors.EVENT_READ)

    def copy(self, wait_s: float) -> bool:
        """Copy what is there, after `wait_s` seconds at most; whether there was anything."""
        if self.ended or not self._selector.select(wait_s):
            return False
        chunk = os.read(self._descriptor, _CHUNK)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._line(line)
        # A bar draws for hours before its line ends; of that only what it shows last is kept.
        self._rest = self._rest[self._rest.rfind(b"\r", 0, len(self._rest) - 1) + 1 :]
        if not chunk:
            self.ended = True
            if self._rest:
                self._line(self._rest)
        return True

    def release(self, after_s: float) -> None:
        """Show a traceback that has waited so long."""
        if self._held and time.monotonic() - self._held_at >= after_s:
            held, self._held = self._held, []
            for line in held:
                self._echo(line)

    def silence(self, why: str) -> None:
        """Show nothing more, and nothing that still waits."""
        told = self._quiet and not self._held
        self._held, self._quiet = [], True
        if not told:
            self._echo(self._elsewhere(why))

    def _elsewhere(self, why: str) -> str:
        return f"{why}; what its launcher and the other ranks say is in {self._log.path}"

    def close(self) -> None:
        """Look at the pipe no more."""
        self._selector.close()

    def _line(self, raw: bytes) -> None:
        # A progress bar redraws itself after each \r; what it showed last is what is kept.
        line = self._hide(raw.decode("utf-8", errors="replace").rstrip("\r\n").rpartition("\r")[2])
        self._log.line(line)
        if self._quiet:
            return
        if _LAUNCHER_ENDS.search(line):
            self._quiet = True
            line = self._elsewhere("a process ended")
        if self._held or line.startswith(_TRACEBACK):
            self._held_at = self._held_at if self._held else time.monotonic()
            self._held.append(line)
        else:
            self._echo(line)
