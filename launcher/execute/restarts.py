"""Restart failed runs (`launch.max_restarts`): which ones, from which checkpoint, after which pause."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.errors import Interrupted, Problem, RunFailed
from launcher.execute.endings import HANG, LAUNCHER_LOST, RANK_LOST, KnownFailure
from launcher.execute.resume import choose_checkpoint
from launcher.execute.run_dir import RESTARTS, last_step
from launcher.execute.signals import pause
from launcher.facts.checkpoint import MANIFEST, complete_checkpoints, read_manifest
from launcher.facts.rank_status import read_statuses
from launcher.facts.redaction import hider, secret_values
from launcher.facts.safe_files import read_jsonl, write_text
from launcher.plan.plan import Plan
from launcher.render.bundle import dump_json

LENGTH = ("max_steps", "num_train_epochs")
"""Of `trainer`, in result.json under `planned`: a later dry run writes another plan.json beside it."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 300.0
"""The first pause suits a killed process; the longest outlasts the reboot of a node."""

_STATUS_S = 0.5
"""Shortest time between two statuses of a rank."""
_MAY_PASS = ("run-failed", RANK_LOST, LAUNCHER_LOST, HANG)
"""Problems without a known cause: the next attempt may not meet them."""
_KNOWN_TO_PASS = (
    "nccl-timeout",
    "port-in-use",
    "hub-unreachable",
    "jit-stale-lock",
    "no-step",
    "exit-code-lost",
)
"""Known failures that may not come again. The others are caused by the recipe, the machine or its memory."""


def may_pass(failure: RunFailed) -> bool:
    """Whether a restarted run may succeed: not where it must fail in the same way."""
    if isinstance(failure, KnownFailure):
        return failure.finding.failure.id in _KNOWN_TO_PASS
    return failure.problems[0].code in _MAY_PASS


def pause_before(number: int, first_s: float = FIRST_PAUSE_S) -> float:
    """Seconds before restart `number` of those in a row (1 is the first)."""
    return min(first_s * 2.0 ** min(number - 1, 30), LONGEST_PAUSE_S)


@dataclass(frozen=True, slots=True)
class _Place:
    """How far an attempt came, and its error: the same twice would come a third time."""

    code: str
    step: int
    checkpoint: int
    """The newest one's step; 0 without any."""


@dataclass(slots=True)
class Begun:
    """The checkpoint that a command began with, and those that were there before it."""

    run_dir: Path
    resume: str | None
    """What its first attempt was told to resume."""
    _there: Mapping[str, int] = field(default_factory=dict)
    """Checkpoints that were there before -> when their manifest was written."""

    def __post_init__(self) -> None:
        whole = complete_checkpoints(self.run_dir / "checkpoints").values()
        self._there = {path.name: (path / MANIFEST).stat().st_mtime_ns for path in whole}

    def anew(self) -> None:
        """From now on, resume nothing that existed until now."""
        self.resume, self._there = None, {}

    def resumes(self) -> tuple[str | None, int, list[str]]:
        """What the next attempt resumes, its step, and lines for the user; None and 0: it starts anew.

        This command's newest whole checkpoint, else what the command began with.
        """
        chosen = choose_checkpoint(self.run_dir)
        path = chosen.checkpoint
        is_own = path is not None and self._there.get(path.name) != (path / MANIFEST).stat().st_mtime_ns
        if self.resume not in (None, "auto") and not is_own:
            # A newer one that was there before belongs to a continuation that the user did not choose.
            before = Path(str(self.resume))
            return self.resume, _step_of(before), [f"resumes from {before}, as before"]
        return (None if path is None else str(path)), chosen.step, chosen.words()


@dataclass(slots=True)
class Restarts:
    """The restarts of one command."""

    begun: Begun
    allowed: int
    """In a row, without a new checkpoint between."""
    say: Callable[[str], None]
    first_pause_s: float = FIRST_PAUSE_S
    check: Callable[[], None] = lambda: None
    """Called in the pauses: raises where the run cannot continue, as when a node is lost."""
    _in_a_row: int = 0
    _last: _Place | None = None
    _causes: list[str] = field(default_factory=list)
    unwritten: list[dict[str, Any]] = field(default_factory=list)
    """Restarts that could not be recorded, for result.json."""

    def next(self, failure: RunFailed) -> str | None:
        """Wait, and return what the next attempt resumes (EFFILAUNCH_RESUME); None: it starts anew.

        Raises the failure where there is no next attempt, with what was tried. Interrupted after a signal.
        """
        run_dir = self.begun.run_dir
        step = _reached(run_dir)
        newest = max(complete_checkpoints(run_dir / "checkpoints"), default=0)
        place = _Place(failure.problems[0].code, step, newest)
        if self._last is not None and place.checkpoint != self._last.checkpoint:
            self._in_a_row = 0
        if not (self.allowed and may_pass(failure)):
            raise self._told(failure, "")
        if self._last is not None and _same(place, self._last, run_dir):
            raise self._told(
                failure, f"it failed twice in the same way at step {step}, so it is not restarted again"
            )
        if self._in_a_row >= self.allowed:
            raise self._told(failure, f"launch.max_restarts: {self.allowed} is used up")
        self._in_a_row, self._last = self._in_a_row + 1, place
        self._causes.append(failure.problems[0].message)
        return self._restart(failure, step)

    def _restart(self, failure: RunFailed, step: int) -> str | None:
        run_dir = self.begun.run_dir
        waited = pause_before(self._in_a_row, self.first_pause_s)
        cause = failure.problems[0].message
        self.say(f"\nrestart {self._in_a_row} of {self.allowed} in {waited:g} s: {cause}")
        stopped_by = pause(waited, self.check)
        if stopped_by is not None:
            message = f"{stopped_by.name}: stopped while it waited to restart; it had failed: {cause}"
            hint = "continue it with --resume auto"
            raise Interrupted(Problem("interrupted", message, file=str(run_dir), hint=hint)) from failure
        resumes, begins, words = self.begun.resumes()
        for line in words:
            self.say(line)
        told = hider(secret_values(os.environ))(cause)
        row = {"time": time.time(), "step": step, "cause": told, "resumed_from": begins, "waited_s": waited}
        try:
            with (run_dir / RESTARTS).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")
        except OSError as error:
            self.unwritten.append(row)
            self.say(
                f"{run_dir / RESTARTS} cannot be written ({error.strerror}): the run continues without it"
            )
        return resumes

    def _told(self, failure: RunFailed, why: str) -> RunFailed:
        """The failure with what was tried before it."""
        if not self._causes:
            return failure
        problem = failure.problems[0]
        count = len(self._causes)
        before = "; ".join(dict.fromkeys(self._causes))
        told = [problem.message.rstrip("."), *([why] if why else [])]
        tried = f"{count} restart{'s' if count > 1 else ''} before, after: {before}"
        told_problem = replace(problem, message="; ".join([*told, tried]))
        if isinstance(failure, KnownFailure):
            return KnownFailure(told_problem, failure.finding)
        return RunFailed([told_problem, *failure.problems[1:]])


def with_restarts(
    run_dir: Path,
    plan: Plan,
    result: Mapping[str, Any],
    unwritten: Sequence[Mapping[str, Any]],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Add the planned length and all restarts of the run to result.json; its content.

    unwritten: restarts that are not in restarts.jsonl. Where result.json cannot be written, it stays as the
    worker wrote it.
    """
    planned = {name: plan.at(f"trainer.{name}") for name in LENGTH if f"trainer.{name}" in plan.names}
    told = {**result, "planned": planned, "restarts": [*read_jsonl(run_dir / RESTARTS), *unwritten]}
    try:
        write_text(run_dir / "result.json", dump_json(told))
    except OSError as error:
        say(f"{run_dir / 'result.json'} cannot be written ({error.strerror}): it does not list the restarts")
    return told


def _reached(run_dir: Path) -> int:
    """Steps that the last attempt had done."""
    steps = [status.step for status in read_statuses(run_dir).values()]
    return max([*steps, last_step(run_dir)]) if any(steps) else 0


def _same(place: _Place, last: _Place, run_dir: Path) -> bool:
    """Whether two attempts ended in the same way at the same step, within the precision of the statuses."""
    medians = [s.median for s in read_statuses(run_dir).values() if s.median]
    between_two = int(_STATUS_S / min(medians)) if medians else 0
    alike = (place.code, place.checkpoint) == (last.code, last.checkpoint)
    return alike and abs(place.step - last.step) <= between_two


def _step_of(checkpoint: Path) -> int:
    manifest = read_manifest(checkpoint)
    return 0 if manifest is None else manifest.step
