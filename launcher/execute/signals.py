"""The signals by which a user or a scheduler stops a run: noted while it goes on, acted on by its loop."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Self

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Stops:
    """While this is entered, SIGTERM, SIGINT and SIGUSR1 are noted. For the main thread."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        """The one that asked to stop."""
        self.at_once = False
        """Whether somebody who does not want to wait sent SIGINT or SIGTERM after it."""
        self._old: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in STOPPING:
            self._old[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.first is None:
            self.first = signal.Signals(number)
        elif number != signal.SIGUSR1:  # schedulers repeat it
            self.at_once = True


def pause(seconds: float) -> signal.Signals | None:
    """Wait, unless a signal asks to stop; that signal."""
    deadline = time.monotonic() + seconds
    with Stops() as stops:
        while stops.first is None and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))
    return stops.first
