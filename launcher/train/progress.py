"""Progress of long steps: in the status of this process, and as lines in its log.

The bars of libraries are tqdm's. In a worker they draw nothing, and report in the same way.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from launcher.files.rank_status import step_line
from launcher.train.status import Bar, status

EVERY_S = 15.0
"""Seconds between two lines of a log."""
LEAST_S = 1.0
"""A shorter step of a library leaves no line."""

_lock = threading.RLock()
_under_way: list[Progress] = []
"""Steps in progress; the last one is shown."""


class Progress:
    """Counts what is done of `total` (None: unknown), from any thread."""

    def __init__(
        self, title: str, total: float | None = None, unit: str = "rows", *, least_s: float = 0.0
    ) -> None:
        """unit: B for bytes, else a noun in the plural. least_s: a shorter step leaves no line."""
        self._title, self._total, self._unit, self._least_s = title, total, unit, least_s
        self._done = 0.0
        self._started = self._printed = time.monotonic()
        with _lock:
            _under_way.append(self)
        self._show()

    def add(self, amount: float) -> None:
        """Count what is done."""
        with _lock:
            self._done += amount
        self._show()

    def reach(self, done: float, total: float | None) -> None:
        """Set what is done so far."""
        self._done, self._total = done, total
        self._show()

    def close(self, *, ended: bool = True) -> None:
        """The step is over. ended: False if it was aborted."""
        with _lock:
            if self not in _under_way:
                return
            _under_way.remove(self)
            outer = _under_way[-1] if _under_way else None
        status().show(None if outer is None else outer._bar())
        if ended and time.monotonic() - self._started >= self._least_s:
            self._line(ended=True)

    def _bar(self) -> Bar:
        return Bar(self._title, self._done, self._total, self._unit)

    def _show(self) -> None:
        if _under_way and _under_way[-1] is self:
            status().show(self._bar())
        if time.monotonic() - self._printed >= EVERY_S:
            self._printed = time.monotonic()
            self._line(ended=False)

    def _line(self, *, ended: bool) -> None:
        seconds = time.monotonic() - self._started
        line = step_line(self._title, self._done, self._total, self._unit, seconds, ended=ended)
        print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(ended=kind is None)


@contextlib.contextmanager
def bars_in_status() -> Iterator[None]:
    """Within this, every bar of tqdm reports to the status, and writes nothing else.

    huggingface_hub and datasets have bars for terminals only; TQDM_POSITION turns them on everywhere
    (huggingface_hub/utils/tqdm.py is_tqdm_disabled, datasets/utils/tqdm.py). A forked process has no status
    of its own: its bars are silent.
    """
    from tqdm.std import tqdm

    process, before = os.getpid(), (tqdm.display, tqdm.close, tqdm.status_printer)
    asked = os.environ.get("TQDM_POSITION")
    os.environ["TQDM_POSITION"] = "-1"

    def display(bar: Any, msg: str | None = None, pos: int | None = None) -> bool:
        if os.getpid() == process:
            _report(_progress_of(bar), bar)
        return True

    def close(bar: Any) -> None:
        progress = bar.__dict__.pop("_progress", None)
        if progress is not None:
            _report(progress, bar)
            progress.close()
        if "start_t" in bar.__dict__:
            bar.delay = float("inf")  # so it was never displayed, and has nothing to write
        before[1](bar)

    tqdm.display, tqdm.close = display, close
    tqdm.status_printer = staticmethod(lambda file: lambda text: None)
    try:
        yield
    finally:
        tqdm.display, tqdm.close, tqdm.status_printer = before[0], before[1], staticmethod(before[2])
        del os.environ["TQDM_POSITION"]
        if asked is not None:
            os.environ["TQDM_POSITION"] = asked


@contextlib.contextmanager
def no_bars() -> Iterator[None]:
    """Within this, transformers and the hub show no progress bars, which would fill a file or a pipe."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _progress_of(bar: Any) -> Progress:
    found: Progress | None = bar.__dict__.get("_progress")
    if found is None:
        title = str(bar.desc or "").strip().rstrip(":.") or "working"
        unit = "" if bar.unit in ("it", None) else str(bar.unit).strip()
        found = bar.__dict__["_progress"] = Progress(title, _number(bar.total), unit, least_s=LEAST_S)
    return found


def _report(progress: Progress, bar: Any) -> None:
    progress.reach(_number(bar.n) or 0.0, _number(bar.total))


def _number(value: Any) -> float | None:
    """A count of a bar, which may be numpy's or torch's; None if it is not a finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
