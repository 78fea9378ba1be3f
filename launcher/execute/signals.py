"""The signals by which a user or a scheduler stops a run: noted while it goes on, acted on by its loop."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
ECHO_S = 1.0
"""What repeats a signal within this time is its echo, and nobody's impatience: `timeout` sends it to a
process and to its group, `uv run` passes on the Ctrl-C that the terminal has sent to all already."""


def stopping_signals() -> list[signal.Signals]:
    """Those that ask this process to stop. SIGHUP is none where it is ignored: `nohup` says so."""
    return [s for s in STOPPING if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]


class Stops:
    """While this is entered, the signals that ask to stop are noted. For the main thread."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        """The one that asked to stop."""
        self.at_once = False
        """Whether somebody who does not want to wait has asked once more."""
        self._first_at = 0.0
        self._old: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in stopping_signals():
            self._old[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self._first_at = signal.Signals(number), now
        elif now - self._first_at >= ECHO_S and self._is_impatient(number):
            self.at_once = True

    def _is_impatient(self, number: int) -> bool:
        """Ctrl-C is. SIGTERM is behind another one, or behind Ctrl-C: behind a warning (SIGUSR1) or a closed
        terminal, it is the scheduler's or the session's end, which leaves some time to save."""
        asked = (signal.SIGTERM, signal.SIGINT)
        return number == signal.SIGINT or (number == signal.SIGTERM and self.first in asked)


def pause(seconds: float, check: Callable[[], None] = lambda: None) -> signal.Signals | None:
    """Wait, unless a signal asks to stop; that signal. check: called meanwhile; what it raises ends this."""
    deadline = time.monotonic() + seconds
    with Stops() as stops:
        while stops.first is None and (left := deadline - time.monotonic()) > 0:
            check()
            time.sleep(min(left, 0.2))
    return stops.first
