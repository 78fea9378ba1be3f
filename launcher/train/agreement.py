"""When the ranks agree whether to stop: at the end of steps that they have fixed together, never by a clock.

The agreement is a collective, so all ranks must enter it at the same step, and it costs tens of milliseconds
at hundreds of ranks. It therefore comes about every AGREE_S seconds instead of at each step. Each agreement
fixes the step of the next one from the slowest rank's step time, which the collective itself brings to all:
ranks that asked their own clocks would choose different steps, and wait for each other for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from launcher.files.rank_status import AGREE_S

MOST = 64
"""Steps between two agreements at most: steps may become slower after their number is fixed."""


class Agreement:
    """This rank's count of the steps until the next agreement. Every rank must make the same calls."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kind = ""
        self._between = self._left = 0
        self._since: float | None = None
        """When the step began that ends next; None: it cannot be timed."""
        self.slowest = 0.0
        """Seconds of this rank's slowest step since the last agreement; 0 without one."""

    def is_due(self, kind: str) -> bool:
        """Count the end of a step; whether the ranks agree now, after which `fix_next` must be called.

        kind: of the step. The first one after another kind is always an agreement: the time between was none
        of such a step, such as that of an evaluation or of a save.
        """
        if kind != self._kind:
            self._kind, self._between, self._left, self._since, self.slowest = kind, 0, 0, None, 0.0
        now = self._clock()
        if self._since is not None:
            self.slowest = max(self.slowest, now - self._since)
        self._since = now
        self._left -= 1
        return self._left <= 0

    def fix_next(self, slowest: float) -> None:
        """Fix the step of the next agreement. slowest: the largest value of any rank, the same on all.

        The steps between two agreements at most double, so that a slow step is not forgotten at once.
        """
        fitting = int(AGREE_S / slowest) if slowest > 0.0 else MOST
        self._between = self._left = max(1, min(2 * self._between, fitting, MOST))
        self._since, self.slowest = self._clock(), 0.0  # without the wait for the other ranks
