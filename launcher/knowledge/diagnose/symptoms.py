"""Failures without an error: a loss that is not a number, one that does not move, steps that never start.

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

from launcher.facts.safe_files import parse_json
from launcher.knowledge.diagnose import forms
from launcher.knowledge.diagnose.findings import Error, Finding
from launcher.knowledge.diagnose.reading import Line, clean
from launcher.knowledge.failures.catalogue import Failure

NOT_A_NUMBER_ROWS = 3
"""Logged steps in a row whose loss is nan, or 0.0 beside a gradient of nan or 0."""
FLAT_ROWS = 30
"""Logged steps in a row with the same loss."""
FLAT_SPREAD = 1e-5
"""Largest relative difference between losses that count as the same."""
OVERFLOWS = 20
"""Skipped steps in a row; a loss scale that starts at 2^32 settles within these."""
HANG_S = 1800.0
"""Seconds without a step after which training counts as one that never starts."""

_ROW = re.compile(r"\{[^{}]*['\"](?:loss|step|epoch)['\"][^{}]*\}")
_PAIR = re.compile(r"['\"](\w+)['\"]: ['\"]?(-?(?:nan|inf|NaN|Infinity|[\d.]+(?:[eE][-+]?\d+)?))['\"]?")

FLAT = Failure(
    id="loss-flat",
    title="the loss does not move",
    cause="The loss is the same over many steps although the learning rate is not zero: no weight that "
    "matters is trained. Frozen weights, 16-bit weights that swallow small updates or masked labels do it.",
    fix="look at what is trainable (`effilaunch plan RECIPE`), at `precision` (mixed, not 16-bit only), and "
    "at the loss mask (`effilaunch prepare RECIPE --show 3`)",
    source="own observation",
    places=("diagnose",),
)
NO_STEP = Failure(
    id="no-step",
    title="training never took its first step",
    cause="The run reached the training loop, or the set-up before it, and wrote nothing more for a long "
    "time: a rank waits for another one, or for a lock.",
    fix="look where the processes stand (`py-spy dump --pid PID`); stale build locks and NCCL between the "
    "devices are what `effilaunch doctor` checks",
    source="own observation",
    places=("diagnose",),
)


@dataclass(slots=True)
class Watch:
    """What training itself reported."""

    rows: int = 0
    bad: int = 0
    """Rows at the end, one after the other, that are not a number."""
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
    """The beginning of the last line, as it stands."""
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
        """metrics.jsonl of a run directory, which replaces what its logs showed."""
        path = folder / "metrics.jsonl"
        try:
            lines = path.read_text("utf-8", errors="replace").splitlines()
        except OSError:
            return
        self.rows, self.bad = 0, 0
        self.losses.clear()
        for number, text in enumerate(lines, 1):
            try:
                row = parse_json(text)
            except ValueError:
                continue
            if isinstance(row, dict) and "loss" in (numbers := _numbers(row)):
                self.row(numbers, Line(text, number, str(path)))

    def findings(self, registry: Sequence[Failure]) -> list[Finding]:
        """What is wrong with a run that printed no error and no success."""
        return self.divergence(registry) or self._hang(registry)

    def divergence(self, registry: Sequence[Failure]) -> list[Finding]:
        """A loss that is not a number, or does not move: a run may end in success with one."""
        known = {failure.id: failure for failure in registry}
        if self.overflows >= OVERFLOWS and "fp16-bf16-pretrained" in known:
            return [
                self._finding(known["fp16-bf16-pretrained"], f"{self.overflows} steps in a row overflowed")
            ]
        if self.bad >= NOT_A_NUMBER_ROWS:
            masked = self.zero_gradient and self.bad == self.rows
            name = "labels-all-masked" if masked else "nan-shown-as-zero"
            if name in known:
                message = (
                    f"the last {self.bad} of {self.rows} logged losses are nan or a hidden nan (loss: 0.0)"
                )
                return [self._finding(known[name], message, self.bad_from)]
        if len(self.losses) == FLAT_ROWS and self.moving:
            low, high = min(self.losses), max(self.losses)
            if low > 0 and high - low <= FLAT_SPREAD * high:
                return [self._finding(FLAT, f"loss {high:g} over the last {FLAT_ROWS} logged steps")]
        return []

    def _hang(self, registry: Sequence[Failure]) -> list[Finding]:
        """Training that never took a step: told by the clock of the log, never by its end alone."""
        if self.rows or self.running is None:
            return []
        waited = 0.0
        end = max((line.time or 0.0 for line in clean(self.last, 0)), default=0.0)
        if self.first_time is not None:
            waited = max(waited, max(end, self.last_time or 0.0) - self.first_time)
        if waited < HANG_S:
            return []
        known = {failure.id: failure for failure in registry}
        failure = NO_STEP
        if b"as PyTorch extensions root" in self.last:
            failure = known.get("jit-stale-lock", NO_STEP)
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
