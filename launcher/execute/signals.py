"""Signals by which a user or a scheduler stops a run: recorded by a handler, acted on by the loop."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Self

from launcher.errors import Interrupted, Problem

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
ECHO_S = 1.0
"""A signal repeated within this time is an echo: `timeout` signals a process and its group, `uv run`
forwards the Ctrl-C that the terminal has sent to all already."""


def stopping_signals() -> list[signal.Signals]:
    """Those that ask this process to stop; without SIGHUP if it is ignored, as under `nohup`."""
    return [s for s in STOPPING if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]


class Stops:
    """Records the signals that ask to stop while this is entered. For the main thread."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.at_once = False
        """Whether a second signal asks to stop without saving."""
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
        for handler in self._old.values():
            outer = getattr(handler, "__self__", None)  # the Stops around this one
            if isinstance(outer, Stops) and outer.first is None:  # an echo is no new signal there
                outer.first, outer._first_at = self.first, self._first_at

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self._first_at = signal.Signals(number), now
        elif now - self._first_at >= ECHO_S and self._is_impatient(number):
            self.at_once = True

    def _is_impatient(self, number: int) -> bool:
        """Whether it asks to stop without saving: Ctrl-C does, and SIGTERM after Ctrl-C or another SIGTERM.

        After a warning (SIGUSR1) or SIGHUP, SIGTERM is the scheduler's or the session's end, which leaves
        time to save.
        """
        asked = (signal.SIGTERM, signal.SIGINT)
        return number == signal.SIGINT or (number == signal.SIGTERM and self.first in asked)


class StopSignal(KeyboardInterrupt):
    """A signal that asks to stop, raised like Ctrl-C in whatever the main thread does."""


class _Raising(Stops):
    """Raises Asked in the main thread, for the first signal and for an impatient one after it."""

    def _note(self, number: int, frame: FrameType | None) -> None:
        before = self.first, self.at_once
        super()._note(number, frame)
        if (self.first, self.at_once) != before:
            raise StopSignal(signal.Signals(number).name)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """A signal that asks to stop ends the command within this with Interrupted (130). For the main thread.

    A Stops within it handles the signals instead, as long as it is entered.
    """
    with _Raising() as stops:
        try:
            yield
        except StopSignal as asked:
            if isinstance(asked.__context__, Interrupted):  # the command was ending already
                raise asked.__context__ from None
            raise Interrupted(stopped_between(stops)) from asked


def stopped_between(stops: Stops) -> Problem:
    """The problem of a command that was stopped while no rank was running."""
    name = "a signal" if stops.first is None else stops.first.name
    hint = "start it again; a run that has started continues with --resume auto"
    return Problem("interrupted", f"{name}: stopped while no rank was running", hint=hint)


def pause(seconds: float, check: Callable[[], None] = lambda: None) -> signal.Signals | None:
    """Wait, or return the signal that asks to stop. check: called meanwhile; what it raises ends this."""
    deadline = time.monotonic() + seconds
    with Stops() as stops:
        while stops.first is None and (left := deadline - time.monotonic()) > 0:
            check()
            time.sleep(min(left, 0.2))
    return stops.first
