"""This rank's status file, rewritten at every phase and, at most twice a second, at steps.

A thread writes it: on a network disk a rename may take longer than a step. The first status is written before
anything heavy is imported. `files/rank_status.py` reads it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from launcher.files.rank_status import process_started, stage_file, status_file
from launcher.files.redaction import hider, secret_values
from launcher.files.safe_files import write_text

KEPT_STEPS = 50
LEAST_STEPS = 3
"""Steps needed for a median: the first ones build kernels and caches."""
PAUSE_S = 0.5
"""Between two writes within a phase: a step may take a millisecond."""
PHASE_S, END_S = 1.0, 30.0
"""Longest wait for the write of a new phase, which tells what was lost or hangs; and of the end, without
which the rank counts as lost."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Progress of a long step."""

    title: str = ""
    done: float = 0
    total: float | None = None
    unit: str = ""
    """B for bytes; else a noun in the plural, or empty."""


class Status:
    """What this rank is doing. A status that cannot be written, on a full disk, is skipped."""

    def __init__(self, run_dir: Path | None, rank: int, stage: str = "") -> None:
        """run_dir: None for a status that is never written (a Trainer without a worker).

        stage: of a process that is not a rank.
        """
        file = (
            None if run_dir is None else stage_file(run_dir, stage) if stage else status_file(run_dir, rank)
        )
        self._file = file
        self._rank, self._pid = rank, os.getpid()
        self._started = process_started(self._pid) or 0
        self._changed = threading.Condition()
        self._text, self._asked, self._done = "", 0, 0
        """What the thread is to write; numbers of the latest write, and of the latest one that has ended."""
        self._closed = False
        self._seconds: deque[float] = deque(maxlen=KEPT_STEPS)
        self._phase, self._step = "start", 0
        self._code: int | None = None
        self._median: float | None = None
        self._least_s = 0.0
        self._steps: int | None = None
        self._resumed = 0
        self._memory: Callable[[], int] | None = None
        self._bar = Bar()
        self._bar_is_written = False
        self._hide: Callable[[str], str] | None = None
        self._begin()
        if self._file is not None:
            threading.Thread(target=self._keep, args=(self._file,), name="status", daemon=True).start()
        self._write()
        self.flush(PHASE_S)

    @property
    def phase(self) -> str:
        return self._phase

    @property
    def step(self) -> int:
        return self._step

    @property
    def median(self) -> float | None:
        """Seconds of a step, as last written; for any thread."""
        return self._median

    def enter(self, phase: str, *, step: int | None = None) -> None:
        """Begin a phase. step: the number of finished steps."""
        self._enter(phase, PHASE_S, step=step)

    def _enter(self, phase: str, wait_s: float, step: int | None = None) -> None:
        self._phase = phase
        if step is not None:
            self._step = step
        self._begin()
        self._write()
        self.flush(wait_s)

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """A phase inside another, which continues after it."""
        outer = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(outer)

    def begin_training(self, step: int, steps: int, memory: Callable[[], int]) -> None:
        """Begin training after `step`, until `steps`; memory: called at each write, in bytes."""
        self._resumed, self._steps, self._memory = step, steps, memory
        self.enter("train", step=step)

    def show(self, bar: Bar | None) -> None:
        """Show the progress of a long step; None when it has ended. From any thread."""
        self._bar = bar or Bar()
        if time.monotonic() - self._written >= PAUSE_S or (bar is None and self._bar_is_written):
            self._write()

    def step_ended(self, step: int) -> None:
        """One more step of training has ended; its duration is the time since the last one or the phase."""
        self._seconds.append(time.monotonic() - self._begun)
        self._step = step
        self.moved()

    def takes_at_least(self, seconds: float) -> None:
        """What a part of some steps has taken, such as a generation that serves several: who waits for a step
        may wait so long, whatever the median of all steps is."""
        self._least_s = seconds

    def moved(self, bar: Bar | None = None) -> None:
        """Something within the phase has ended: a step, a batch of an evaluation. bar: its progress."""
        self._bar = bar or self._bar
        self._begin()
        if self._begun - self._written >= PAUSE_S:
            self._write()

    def end(self, code: int) -> None:
        """The process is about to exit with this status."""
        self._code = code
        self._enter("ended", END_S)

    def flush(self, wait_s: float) -> None:
        """Wait up to `wait_s` seconds until the file has what is known now."""
        if self._is_written_here:
            with self._changed:
                asked = self._asked
                self._changed.wait_for(lambda: self._done >= asked, wait_s)

    def close(self) -> None:
        """Write nothing more."""
        self.flush(PHASE_S)
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def _is_written_here(self) -> bool:
        """Whether this process is the one whose status it is, and not a fork, which has no thread for it."""
        return self._file is not None and os.getpid() == self._pid

    def _harmless_bar(self) -> Bar:
        """The title may be the address of a download, with a key in it."""
        if not self._bar.title:
            return self._bar
        if self._hide is None:
            self._hide = hider(secret_values(os.environ))
        return replace(self._bar, title=self._hide(self._bar.title))

    def _begin(self) -> None:
        self._begun, self._since = time.monotonic(), time.time()

    def _write(self) -> None:
        self._written = time.monotonic()
        many = len(self._seconds) >= LEAST_STEPS
        self._median = max(median(self._seconds), self._least_s) if many else None
        if not self._is_written_here:
            return
        values = {
            "rank": self._rank,
            "host": socket.gethostname(),
            "pid": self._pid,
            "started": self._started,
            "phase": self._phase,
            "step": self._step,
            "since": self._since,
            "median": self._median,
            "code": self._code,
            "steps": self._steps,
            "begun": self._resumed,
            "memory": None if self._memory is None else self._memory(),
            **asdict(self._harmless_bar()),
        }
        self._bar_is_written = bool(self._bar.title)
        with self._changed:
            self._text, self._asked = json.dumps(values) + "\n", self._asked + 1
            self._changed.notify_all()

    def _keep(self, file: Path) -> None:
        """The thread: writes the latest status; what came between two writes is skipped."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._done < self._asked)
                if self._closed:
                    return
                text, asked = self._text, self._asked
            with contextlib.suppress(OSError):
                write_text(file, text)
            with self._changed:
                self._done = asked
                self._changed.notify_all()


_current = Status(None, 0)


def start_status(run_dir: Path, rank: int) -> Status:
    """Begin this process's status, in phase start; RUN_DIR/logs must exist."""
    global _current
    _current = Status(run_dir, rank)
    return _current


@contextlib.contextmanager
def status_of_stage(run_dir: Path, stage: str) -> Iterator[None]:
    """Within this, this process has the status of a stage, which is removed afterwards."""
    global _current
    before, _current = _current, Status(run_dir, 0, stage)
    own = _current
    try:
        yield
    finally:
        _current = before
        own.close()
        with contextlib.suppress(OSError):
            stage_file(run_dir, stage).unlink(missing_ok=True)


def status() -> Status:
    """This process's status; without a worker one that is never written."""
    return _current
