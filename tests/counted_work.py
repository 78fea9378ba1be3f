"""How much work a function does, in what a loaded machine does not change: calls, and CPU time for an input
against CPU time for a smaller one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

TIMES = 4
LINEAR = 2 * TIMES
"""An input TIMES as large takes TIMES the CPU time where time is linear, and TIMES squared where it is
quadratic: `cpu_growth` is below this for the first and above it for the second."""


def function_calls(work: Callable[[], Any]) -> int:
    """Calls of functions, builtin ones included, that this thread makes for `work`."""
    count = 0

    def called(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def cpu_seconds(work: Callable[[], Any]) -> float:
    """CPU time of this thread for `work`; says something only next to that of other work."""
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


def cpu_growth(work: Callable[[Any], Any], make: Callable[[int], Any], size: int) -> float:
    """CPU time of `work(make(TIMES * size))` divided by that of `work(make(size))`.

    Each is the least of up to three measurements; a growth that is linear at once is not measured again.
    """
    small, large = make(size), make(TIMES * size)
    work(small)  # what is built once, such as compiled patterns, is of neither
    least = [float("inf"), float("inf")]
    for _ in range(3):
        for at, given in enumerate((small, large)):
            least[at] = min(least[at], cpu_seconds(partial(work, given)))
        if least[1] / least[0] < LINEAR:
            break
    return least[1] / least[0]
