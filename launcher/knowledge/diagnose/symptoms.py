"""Failures without an error: a loss that is not a number or does not change, training that never starts.

Thresholds are conservative: what a healthy run may show for a while is no symptom.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.files.safe_files import read_lines
from launcher.knowledge.diagnose import forms
from launcher.knowledge.diagnose.findings import Error, Finding
from launcher.knowledge.diagnose.reading import Line, clean
from launcher.knowledge.failures.catalogue import Failure

NOT_A_NUMBER_ROWS = 3
"""Logged steps in a row whose loss is nan, or 0.0 with a gradient of nan or 0."""
FLAT_ROWS = 30
"""Logged steps in a row with the same loss."""
FLAT_SPREAD = 1e-5
"""Largest relative difference between losses that count as the same."""
OVERFLOWS = 20
"""Skipped steps in a row; a loss scale that starts at 2^32 needs fewer."""
HANG_S = 1800.0
"""Seconds without a first step after which a run hangs."""

_ROW = re.compile(r"\{[^{}]*['\"](?:loss|step|epoch)['\"][^{}]*\}")
_PAIR = re.compile(r"['\"](\w+)['\"]: ['\"]?(-?(?:nan|inf|NaN|Infinity|[\d.]+(?:[eE][-+]?\d+)?))['\"]?")

FLAT = Failure(
    id="loss-flat",
    title="the loss does not change",
    cause="The loss is the same over many steps although the learning rate is not zero: the weights do not "
    "change. Weights are frozen, 16-bit weights round small updates to zero, or all labels are masked.",
    fix="check what is trainable (`effilaunch plan RECIPE`), `precision` (mixed, not 16-bit only), and the "
    "loss mask (`effilaunch prepare RECIPE --show 3`)",
    source="own observation",
    places=("diagnose",),
)
NO_STEP = Failure(
    id="no-step",
    title="training never took its first step",
    cause="The run reached the training loop, or the set-up before it, and wrote nothing more for a long "
    "time: a rank waits for another one, or for a lock.",
    fix="see what the processes wait for (`py-spy dump --pid PID`); `effilaunch doctor` checks for stale "
    "build locks and for NCCL between the devices",
    source="own observation",
    places=("diagnose",),
)


@dataclass(slots=True)
class TrainingWatch:
    """The progress of training, from its log lines and metrics."""

    rows: int = 0
    bad: int = 0
    """Last rows in a row whose loss is not a number."""
    zero_gradient: bool = True
    """Whether all of those have a gradient of exactly 0."""
    bad_from: Line | None = None
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=FLAT_ROWS))
    moving: bool = True
    """Whether the learning rate of the last row is above 0."""
    overflows: int = 0
    running: Line | None = None
    first_time: float | None = None
    last_time: float | None = None
    last: bytes = b""
    """The beginning of the last line, unchanged."""
    latest: Line | None = None

    def feed(self, line: Line) -> None:
        """A line of a log."""
        if line.text.strip():
            self.latest = line
        if line.time is not None:
            self.last_time = line.time
        if forms.RUNNING.search(line.text):
            self.running, self.first_time = line, line.time or self.last_time
        if "OVERFLOW" in line.text:
            self.overflows += 1
        found = _ROW.search(line.text)
        if found is not None:
            row = {key: float(value) for key, value in _PAIR.findall(found.group())}
            if "loss" in row:
                self.row(row, line)

    def row(self, row: Mapping[str, float], line: Line) -> None:
        """One logged step: loss, grad_norm, learning_rate."""
        self.rows += 1
        loss, gradient = row["loss"], row.get("grad_norm")
        hidden = loss == 0.0 and gradient is not None and (gradient == 0.0 or math.isnan(gradient))
        if math.isnan(loss) or hidden:
            if self.bad == 0:
                self.bad_from, self.zero_gradient = line, True
            self.bad += 1
            self.zero_gradient &= gradient == 0.0
        else:
            self.bad = 0
            self.overflows = 0
        self.losses.append(loss)
        self.moving = row.get("learning_rate", 1.0) > 0

    def read_run(self, folder: Path) -> None:
        """Read metrics.jsonl of a run directory, which replaces the rows of its logs."""
        path = folder / "metrics.jsonl"
        try:
            rows = [row for _, row in read_lines(path)]
        except OSError:
            return
        self.rows, self.bad = 0, 0
        self.losses.clear()
        for number, row in enumerate(rows, 1):
            if "loss" in (numbers := _numbers(row or {})):
                self.row(numbers, Line("", number, str(path)))

    def findings(self, registry: Sequence[Failure]) -> list[Finding]:
        """The failure of a run that printed neither an error nor a success."""
        return self.divergence(registry) or self._hang(registry)

    def divergence(self, registry: Sequence[Failure]) -> list[Finding]:
        """A loss that is not a number or does not change, even if the run succeeded."""
        known = {failure.id: failure for failure in registry}
        if self.overflows >= OVERFLOWS and (failure := known.get("fp16-bf16-pretrained")):
            return [self._finding(failure, f"{self.overflows} steps in a row overflowed")]
        masked = self.zero_gradient and self.bad == self.rows
        failure = known.get("labels-all-masked" if masked else "nan-shown-as-zero")
        if self.bad >= NOT_A_NUMBER_ROWS and failure is not None:
            message = f"the last {self.bad} of {self.rows} logged losses are nan or a hidden nan (loss: 0.0)"
            return [self._finding(failure, message, self.bad_from)]
        if len(self.losses) == FLAT_ROWS and self.moving:
            low, high = min(self.losses), max(self.losses)
            if low > 0 and high - low <= FLAT_SPREAD * high:
                return [self._finding(FLAT, f"loss {high:g} over the last {FLAT_ROWS} logged steps")]
        return []

    def _hang(self, registry: Sequence[Failure]) -> list[Finding]:
        """Training that never took a step, by the times of the log; its end alone is no proof."""
        if self.rows or self.running is None or self.first_time is None:
            return []
        end = max((line.time or 0.0 for line in clean(self.last, 0)), default=0.0)
        waited = max(end, self.last_time or 0.0) - self.first_time
        if waited < HANG_S:
            return []
        failure = NO_STEP
        if b"as PyTorch extensions root" in self.last:
            failure = next((known for known in registry if known.id == "jit-stale-lock"), NO_STEP)
        return [self._finding(failure, f"no step in {waited / 60:.0f} minutes", self.running)]

    def _finding(self, failure: Failure, message: str, line: Line | None = None) -> Finding:
        line = line or self.latest
        error = Error("", message, kind="line")
        if line is not None:
            error.file, error.line = line.file, line.number
        return Finding(failure, error, (), None)


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    values: dict[str, float] = {}
    for key, value in row.items():
        try:
            values[key] = float(value)
        except (TypeError, ValueError, OverflowError):
            continue
    return values
