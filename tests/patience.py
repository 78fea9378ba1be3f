"""Deadlines of tests that wait for something; a loaded machine gets more time.

Such a deadline only ends a test that would wait forever. It asserts nothing about speed: beside other work on
the same cores a test takes several times as long, and is right all the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

POLL_S = 0.05


def load_factor() -> float:
    """Runnable processes per core, averaged over the last minute; 1 on an idle machine."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def patience(seconds: float) -> float:
    """How long to wait now for what takes at most `seconds` on an idle machine; for timeouts passed on."""
    return seconds * load_factor()


class Deadline:
    """Passes after `seconds` of an idle machine; moves away when the load grows, and never comes nearer."""

    def __init__(self, seconds: float) -> None:
        self._began = time.monotonic()
        self._seconds = seconds
        self._factor = 1.0

    def left_s(self) -> float:
        """Seconds left under the highest load so far; negative: the deadline has passed."""
        self._factor = max(self._factor, load_factor())
        return self._began + self._seconds * self._factor - time.monotonic()

    def passed(self) -> bool:
        return self.left_s() < 0


def wait_until(condition: Callable[[], Any], seconds: float = 60.0, what: object = "the condition") -> Any:
    """The first true result of the condition; AssertionError with `what` is missing after the deadline.

    what: shown when it fails; a function is called only then.
    """
    deadline = Deadline(seconds)
    while not (found := condition()):
        if deadline.passed():
            raise AssertionError(
                f"not within {seconds:g} s of an idle machine: {what() if callable(what) else what}"
            )
        time.sleep(POLL_S)
    return found
