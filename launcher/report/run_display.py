"""Show a running run: permanent lines, and in a terminal a status line at the bottom."""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from launcher.execute.following import Look
from launcher.execute.record import NewRows
from launcher.facts.rank_status import RankStatus, is_passing
from launcher.plan.plan import Plan
from launcher.report.live import Memory, Moment, live_line, row_line
from launcher.report.outcome import note
from launcher.report.page import Page, page_of
from launcher.report.screen import Screen


@dataclass(slots=True)
class Showing:
    """Shows the preparation of a run and its attempts."""

    speak: Callable[[str], None]
    """Prints a permanent line."""
    screen: Screen | None = None
    """Where the status line is drawn; None: rows are printed instead."""
    says_rows: bool = True
    """Whether to print each row of metrics.jsonl if there is no status line."""

    def say(self, line: str) -> None:
        """Print a line, unless the status line shows it already."""
        if not (self._draws and is_passing(line)):
            self.speak(line)

    @property
    def _draws(self) -> bool:
        return self.screen is not None and self.screen.is_live

    @property
    def page(self) -> Page:
        """The width and colours of text."""
        return page_of(sys.stdout) if self._draws else Page()

    def look(self, statuses: Mapping[int, RankStatus]) -> None:
        """Show the status of a process that is no rank."""
        if self.screen is not None:
            now = Moment(**_bar(statuses[min(statuses)])) if statuses else Moment("ended")
            self.screen.draw(partial(live_line, now))

    def looking(self, run_dir: Path) -> Callable[[Plan], Look]:
        """The function that `run_attempts` calls as each attempt starts."""
        attempts = itertools.count()
        return lambda plan: self.begin(plan, run_dir, next(attempts))

    def begin(self, plan: Plan, run_dir: Path, restarts: int = 0) -> Look:
        """Start showing an attempt."""
        return _Try(self, plan, NewRows(run_dir / "metrics.jsonl"), restarts).look


@contextlib.contextmanager
def showing(*, as_json: bool, on_stderr: bool = False, says_rows: bool = True) -> Iterator[Showing]:
    """The display of a command. Lines go to stderr if stdout is for the result.

    on_stderr: stdout is for the result alone. says_rows: see Showing.
    """
    with Screen(sys.stderr, note, draws=not as_json) if as_json or on_stderr else Screen() as screen:
        yield Showing(screen.line, screen, says_rows)


@dataclass(slots=True)
class _Try:
    """One attempt of the run."""

    showing: Showing
    plan: Plan
    rows: NewRows
    restarts: int
    _last: Mapping[str, Any] = field(default_factory=dict)
    """The last row with a loss."""

    def look(self, statuses: Mapping[int, RankStatus]) -> None:
        """Show where the ranks are."""
        if not statuses:
            return
        first = statuses[min(statuses)]
        if first.steps is not None:  # rows of earlier attempts are no longer in the file
            for row in self.rows.read():
                if row.get("step", 0) > first.begun:
                    self._tell(row, statuses)
        screen = self.showing.screen
        if screen is not None:
            screen.draw(partial(live_line, self._moment(statuses)))

    def _tell(self, row: Mapping[str, Any], statuses: Mapping[int, RankStatus]) -> None:
        has_loss = "loss" in row
        if has_loss:
            self._last = row
        if self.showing.says_rows and not (has_loss and self.showing._draws):
            self.showing.say(row_line(row, self._moment(statuses)))

    def _moment(self, statuses: Mapping[int, RankStatus]) -> Moment:
        first = statuses[min(statuses)]
        step = min(status.step for status in statuses.values())
        median = max((s.median for s in statuses.values() if s.median is not None), default=None)
        ranks = [status for _, status in sorted(statuses.items()) if status.phase != "ended"]
        barred = next((status for status in ranks if status.title), (*ranks, first)[0])
        bar = _bar(barred)
        left = None if median is None or first.steps is None else median * max(0, first.steps - step)
        if left and median and first.phase == "train":
            left -= min(bar["for_s"], median)  # of the current step
        return Moment(
            step=step,
            steps=first.steps,
            left_s=left,
            loss=_loss(self._last),
            speed=self._speed(median),
            memory=_memory(self.plan, statuses),
            restarts=self.restarts,
            **bar,
        )  # fmt: skip

    def _speed(self, median: float | None) -> str:
        """Tokens per second of the last row, else samples per second."""
        tokens = self._last.get("tokens_per_second")
        if tokens:
            return f"{tokens:,.0f} tokens/s"
        if self._last and median:
            return f"{self.plan.batch.global_size / median:,.1f} samples/s"
        return ""


def _loss(row: Mapping[str, Any]) -> float | None:
    """The loss of the row; null means not finite."""
    return None if "loss" not in row else math.nan if row["loss"] is None else row["loss"]


def _bar(status: RankStatus) -> dict[str, Any]:
    """The current activity and its progress."""
    names = ("phase", "title", "done", "total", "unit")
    return {"for_s": max(0.0, time.time() - status.since), **{name: getattr(status, name) for name in names}}


def _memory(plan: Plan, statuses: Mapping[int, RankStatus]) -> Memory | None:
    """Memory of the fullest GPU, with the planned context; without GPUs, of all processes on this node."""
    told = [status for status in statuses.values() if status.memory is not None]
    if not told:
        return None
    if not plan.hardware.is_cpu:
        used = max(status.memory or 0 for status in told) + plan.memory.components.context
        return Memory("GPU", used, plan.memory.needed)
    here = [status.memory or 0 for status in told if status.host == socket.gethostname()]
    return Memory("host", sum(here), plan.memory.host_bytes) if here else None
