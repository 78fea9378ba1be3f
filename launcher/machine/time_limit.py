"""A limit of time for calls of somebody else's code and files."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class TooSlow(BaseException):
    """A call took longer than its limit. Not an Exception: the code that is called may catch those."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooSlow after `seconds`, also in sleeps and regular expressions, but not within other C code.

    No limit where there is no timer (WebAssembly) and outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def end(*_: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
