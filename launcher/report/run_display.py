"""Show a running run: lines that stay, and in a terminal a status line at the bottom.

Nothing here waits for a terminal: it may be stopped, full or gone while ranks are supervised.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from launcher.execute.following import Look
from launcher.execute.record import NewRows
from launcher.files.rank_status import RankStatus, amount, is_passing, of_total
from launcher.plan.plan import Plan
from launcher.report.outcome import echo, harmless, is_quiet, note
from launcher.report.tables import duration, gib
from launcher.report.terminal import Page, is_coloured, is_terminal, is_tty, page_of, plain

_BAR = 20
"""Columns of a progress bar."""
_LONG_S, _LONG_STEP_S = 1.0, 30.0
"""Seconds from which the time of a phase without a bar, or of the first step, and of later steps is shown."""
_REWARDS = ("rewards/accuracies", "rewards/margins")
"""Metrics of preference training shown next to the loss."""
_TIMINGS = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_jit_compilation_time")
_DOING = {
    "start": "starting",
    "prepare": "preparing the data",
    "load": "loading",
    "skip": "skipping rows that were trained on",
    "evaluate": "evaluating",
    "save": "saving",
    "finish": "finishing",
}
_KEPT_BYTES = 1 << 20
"""Limit of the text that waits for a stopped terminal (Ctrl-S); the oldest is dropped."""
_NO_COLOUR = "\x1b[0m"


# --- the state of a run as one line


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in use and planned, bytes."""

    of: str
    """GPU: the fullest device; host: the processes of this machine."""
    used: int
    planned: int


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run."""

    phase: str = "start"
    for_s: float = 0.0
    """Seconds since the phase or the step began."""
    step: int = 0
    steps: int | None = None
    left_s: float | None = None
    """Seconds until the last step."""
    loss: float | None = None
    """Of the last row that has one; nan where that was not finite."""
    speed: str = ""
    memory: Memory | None = None
    restarts: int = 0
    title: str = ""
    """The long operation at present, such as loading weights; `done` of `total` in `unit`."""
    done: float = 0
    total: float | None = None
    unit: str = ""


def live_line(now: RunState, columns: int) -> str:
    """As much as fits, the most important first; empty when all ranks have ended."""
    if now.phase == "ended":
        return ""
    if now.steps is None:
        parts = [_doing(now)]
    else:
        parts = [f"step {now.step:,}/{now.steps:,}"]
        parts += [_doing(now)] if now.phase != "train" or now.title else []
        loss = "" if now.loss is None else f"loss {_number(now.loss)}"
        parts += [loss, _left(now), _this_step(now), _memory(now), now.speed]
    shown = ""
    for part in filter(None, (*parts, _restarts(now))):
        longer = f"{shown} · {part}" if shown else part
        if not shown or columns_of(longer) <= columns:
            shown = longer
    return cut(shown, columns)


def _doing(now: RunState) -> str:
    """The long operation: with a bar if its length is known, else with the amount done."""
    since = f", {duration(now.for_s)}" if now.for_s >= _LONG_S else ""
    if not now.title:
        doing = _DOING.get(now.phase, "")
        return f"{doing}{since}" if doing else ""
    title, unit = flat(now.title), flat(now.unit)
    if not now.total:
        return (f"{title}: {amount(now.done, unit)}" if now.done else title) + since
    share = min(max(now.done / now.total, 0.0), 1.0)
    bar = "#" * round(_BAR * share)
    return f"{title} [{bar:.<{_BAR}}] {share:.0%}, {of_total(now.done, now.total, unit)}"


def _this_step(now: RunState) -> str:
    long = _LONG_STEP_S if now.step else _LONG_S
    shown = now.phase == "train" and not now.title and now.for_s >= long
    return f"this step {duration(now.for_s)} so far" if shown else ""


def _left(now: RunState) -> str:
    return "" if now.left_s is None else f"{duration(now.left_s)} left"


def _memory(now: RunState) -> str:
    memory = now.memory
    return "" if memory is None else f"{memory.of} {gib(memory.used)} of {gib(memory.planned)} planned"


def _restarts(now: RunState) -> str:
    return f"restarted {now.restarts} time{'' if now.restarts == 1 else 's'}" if now.restarts else ""


def row_line(row: Mapping[str, Any], now: RunState) -> str:
    """A row of metrics.jsonl as a line that stays."""
    step = f"step {row.get('step', 0):,}" + (f"/{now.steps:,}" if now.steps else "")
    if "loss" not in row:
        names = [name for name in row if name.startswith("eval_") and name not in _TIMINGS]
        return f"{step}: evaluated: {', '.join(f'{name} {_number(row[name])}' for name in names)}"
    parts = [f"loss {_number(row['loss'])}"]
    for key, name in (("learning_rate", "learning rate"), ("grad_norm", "gradients")):
        parts += [f"{name} {_number(row[key])}"] if row.get(key) is not None else []
    parts += [f"{name} {_number(row[name])}" for name in _REWARDS if name in row]
    parts += [now.speed, _left(now), _memory(now), _restarts(now)]
    return f"{step}: {', '.join(filter(None, parts))}"


def _number(value: Any) -> str:
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.4g}"


# --- text within the columns of a terminal


def columns_of(text: str) -> int:
    """Columns of a text on a terminal: two for a wide character, none for a combining mark or a colour."""
    return sum(map(_columns_of_one, plain(text)))


def flat(text: str) -> str:
    """The text as it may appear within a line: without colours, tabs or line ends."""
    return " ".join(harmless(plain(text)).split())


def cut(text: str, columns: int) -> str:
    """A text without colours cut to so many columns, with an ellipsis."""
    if columns_of(text) <= columns:
        return text
    kept, used = "", 0
    for letter in text:
        used += _columns_of_one(letter)
        if used > columns - 1:
            break
        kept += letter
    return f"{kept}…" if columns > 0 else ""


def _columns_of_one(letter: str) -> int:
    if unicodedata.combining(letter) or unicodedata.category(letter) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in ("W", "F") else 1


class Screen:
    """A terminal with a changing line at the bottom and lines that stay above it.

    Where the stream is no terminal, or one that cannot move its cursor, there are only the lines that stay.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        otherwise: Callable[[str], None] = echo,
        *,
        draws: bool = True,
    ) -> None:
        """stream: None for stdout. otherwise: receives the lines if that is no terminal.

        draws: whether there is a changing line if the terminal can have one.
        """
        stream = sys.stdout if stream is None else stream
        self._otherwise = otherwise
        self._descriptor = _reopened(stream) if is_tty(stream) and not is_quiet() else None
        self._is_coloured = is_coloured(stream)
        self._draws = draws and is_terminal(stream)
        self._waiting = b""
        self._shown, self._columns = "", 0
        """The line at the bottom and its columns."""

    @property
    def is_live(self) -> bool:
        """Whether there is a line that changes."""
        return self._draws and self._descriptor is not None

    def line(self, text: str) -> None:
        """Write one or more lines that stay. Never fails."""
        if self._descriptor is None:
            self._otherwise(text)
            return
        shown = harmless(text if self._is_coloured else plain(text))
        end = _NO_COLOUR if "\x1b" in shown else ""  # the text may end within a colour
        self._add(self._erased() + f"{shown}{end}\n" + self._shown)
        self._push()

    def draw(self, text_of: Callable[[int], str]) -> None:
        """Draw the bottom line, and write what waits. text_of: free columns -> text.

        Nothing is drawn while the terminal has not accepted what was written before, or by a background job.
        """
        self._push()
        if not self.is_live or self._waiting or not self._is_foreground():
            return
        text = harmless(text_of(self._width() - 1)).replace("\n", " ")  # the last column might begin a line
        if text != self._shown:
            erased = self._erased()
            self._shown, self._columns = text, columns_of(text)
            self._add(erased + text)
            self._push()

    def close(self) -> None:
        """Remove the bottom line and write what still waits."""
        if self._descriptor is None:
            return
        self._add(self._erased())
        self._shown = ""
        with contextlib.suppress(OSError):
            os.set_blocking(self._descriptor, True)  # no process is supervised any more
        self._push()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _erased(self) -> str:
        """Erases the bottom line, which has several rows if the window was made narrower since."""
        if not self._shown:
            return ""
        above = max(0, self._columns - 1) // self._width()
        return f"\x1b[{above}A\r\x1b[J" if above else "\r\x1b[K"

    def _width(self) -> int:
        """The current columns, since a window changes."""
        assert self._descriptor is not None, "only a live screen has a width"
        try:
            return os.get_terminal_size(self._descriptor).columns or 80
        except OSError:
            return 80

    def _is_foreground(self) -> bool:
        assert self._descriptor is not None, "only a live screen has a foreground job"
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:  # not the controlling terminal
            return True

    def _add(self, text: str) -> None:
        self._waiting = (self._waiting + text.encode("utf-8", errors="replace"))[-_KEPT_BYTES:]

    def _push(self) -> None:
        """Write what the terminal accepts without blocking."""
        while self._waiting and self._descriptor is not None:
            try:
                written = os.write(self._descriptor, self._waiting)
            except BlockingIOError:
                return
            except OSError:  # the terminal is gone: further lines go to `otherwise`
                os.close(self._descriptor)
                self._descriptor, self._waiting = None, b""
                return
            self._waiting = self._waiting[written:]


def _reopened(stream: TextIO) -> int | None:
    """A non-blocking descriptor of the terminal, which leaves those that others share unchanged."""
    try:
        name = os.ttyname(stream.fileno())
        return os.open(name, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except (OSError, ValueError):  # in a container without /dev/pts, or without a descriptor
        return None


# --- the display of a command


@dataclass(slots=True)
class Showing:
    """Shows the preparation of a run and its attempts."""

    speak: Callable[[str], None]
    """Prints a line that stays."""
    screen: Screen | None = None
    """Where the status line is drawn; None: rows are printed instead."""
    says_rows: bool = True
    """Whether to print each row of metrics.jsonl if there is no status line."""

    def say(self, line: str) -> None:
        """Print a line, unless the status line shows it already."""
        if not (self.is_live and is_passing(line)):
            self.speak(line)

    @property
    def is_live(self) -> bool:
        """Whether there is a status line."""
        return self.screen is not None and self.screen.is_live

    @property
    def page(self) -> Page:
        """The width and colours of text."""
        return page_of(sys.stdout) if self.is_live else Page()

    def look(self, statuses: Mapping[int, RankStatus]) -> None:
        """Show the status of a process that is no rank."""
        self.draw(RunState(**_activity(statuses[min(statuses)])) if statuses else RunState("ended"))

    def draw(self, now: RunState) -> None:
        """Update the status line."""
        if self.screen is not None:
            self.screen.draw(partial(live_line, now))

    def looking(self, run_dir: Path) -> Callable[[Plan | None], Look]:
        """The function that `run_attempts` calls as each attempt starts."""
        attempts = itertools.count()
        return lambda plan: self.begin(plan, run_dir, next(attempts))

    def begin(self, plan: Plan | None, run_dir: Path, restarts: int = 0) -> Look:
        """Start showing an attempt. plan: None for a user's own command."""
        return _Attempt(self, plan, NewRows(run_dir / "metrics.jsonl"), restarts).look


@contextlib.contextmanager
def showing(*, as_json: bool, on_stderr: bool = False, says_rows: bool = True) -> Iterator[Showing]:
    """The display of a command. Lines go to stderr if stdout is for the result.

    on_stderr: stdout is for the result alone. says_rows: see Showing.
    """
    screen = Screen(sys.stderr, note, draws=not as_json) if as_json or on_stderr else Screen()
    with contextlib.closing(screen):
        yield Showing(screen.line, screen, says_rows)


@dataclass(slots=True)
class _Attempt:
    """One attempt of the run."""

    showing: Showing
    plan: Plan | None
    rows: NewRows
    restarts: int
    _last: Mapping[str, Any] = field(default_factory=dict)
    """The last row with a loss."""

    def look(self, statuses: Mapping[int, RankStatus]) -> None:
        """Show the statuses of the ranks and the new rows."""
        if not statuses:
            return
        first = statuses[min(statuses)]
        if first.steps is not None:  # rows of earlier attempts are no longer in the file
            for row in self.rows.read():
                if row.get("step", 0) > first.begun:
                    self._show_row(row, statuses)
        self.showing.draw(self._moment(statuses))

    def _show_row(self, row: Mapping[str, Any], statuses: Mapping[int, RankStatus]) -> None:
        has_loss = "loss" in row
        if has_loss:
            self._last = row
        if self.showing.says_rows and not (has_loss and self.showing.is_live):
            self.showing.say(row_line(row, self._moment(statuses)))

    def _moment(self, statuses: Mapping[int, RankStatus]) -> RunState:
        first = statuses[min(statuses)]
        step = min(status.step for status in statuses.values())
        median = max((s.median for s in statuses.values() if s.median is not None), default=None)
        ranks = [status for _, status in sorted(statuses.items()) if status.phase != "ended"]
        busy = next((status for status in ranks if status.title), (*ranks, first)[0])
        activity = _activity(busy)
        left = None if median is None or first.steps is None else median * max(0, first.steps - step)
        if left and median and first.phase == "train":
            left -= min(activity["for_s"], median)  # of the current step
        return RunState(
            step=step,
            steps=first.steps,
            left_s=left,
            loss=_loss(self._last),
            speed=self._speed(median),
            memory=None if self.plan is None else _used(self.plan, statuses),
            restarts=self.restarts,
            **activity,
        )

    def _speed(self, median: float | None) -> str:
        """Tokens per second of the last row, else samples per second."""
        tokens = self._last.get("tokens_per_second")
        if tokens:
            return f"{tokens:,.0f} tokens/s"
        if self._last and median and self.plan is not None:
            return f"{self.plan.batch.global_size / median:,.1f} samples/s"
        return ""


def _loss(row: Mapping[str, Any]) -> float | None:
    """The loss of the row; null means not finite."""
    return None if "loss" not in row else math.nan if row["loss"] is None else row["loss"]


def _activity(status: RankStatus) -> dict[str, Any]:
    """The fields of a Moment that a rank's status has."""
    names = ("phase", "title", "done", "total", "unit")
    return {"for_s": max(0.0, time.time() - status.since), **{name: getattr(status, name) for name in names}}


def _used(plan: Plan, statuses: Mapping[int, RankStatus]) -> Memory | None:
    """Memory of the fullest GPU, with the planned context; without GPUs, of all processes on this node."""
    known = [status for status in statuses.values() if status.memory is not None]
    if not known:
        return None
    if not plan.hardware.is_cpu:
        used = max(status.memory or 0 for status in known) + plan.memory.components.outside
        return Memory("GPU", used, plan.memory.needed)
    here = [status.memory or 0 for status in known if status.host == socket.gethostname()]
    return Memory("host", sum(here), plan.memory.host_bytes) if here else None
