"""One fault of a drill: a run in a process of its own that is interrupted by a fault and resumed."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.execute.drilled import Watched, watch_run
from launcher.facts.checkpoint import complete_checkpoints
from launcher.facts.safe_files import read_jsonl, write_text
from launcher.plan.plan import Plan
from launcher.planner.drill import (
    Course,
    Ending,
    Fault,
    Losses,
    bad_checkpoint,
    bad_ending,
    bad_losses,
    compare,
)
from launcher.render.bundle import dump_json

VARIABLE = "EFFILAUNCH_DRILL"
STRUCK = Path("logs") / ".drilled"
"""Written by a worker into the run directory when the fault is injected."""
RESUMING = re.compile(r"^resuming from (.+)$", re.MULTILINE)
SLOWER = 4.0
"""A run with a fault may take this many times the undisturbed one, and SLACK_S; then it is killed."""
SLACK_S = 180.0


@dataclass(slots=True)
class Drill:
    """A drill under way."""

    folder: Path
    command: list[str]
    """`run` without its run directory."""
    course: Course
    plan: Plan
    data: dict[str, Any]
    """What drill.json holds."""
    say: Callable[[str], None]
    expected: Losses = field(default_factory=dict)
    """Losses of the run without a fault."""

    @property
    def ranks(self) -> int:
        return self.plan.hardware.num_devices

    def save(self) -> None:
        """Write drill.json with what is known so far."""
        write_text(self.folder / "drill.json", dump_json(self.data))

    def run(self, name: str, *more: str, fault: dict[str, Any] | None = None) -> Watched:
        """`effilaunch run` into the folder `name`, as a process of its own."""
        without = (VARIABLE, "EFFILAUNCH_RESUME")
        env = {key: value for key, value in os.environ.items() if key not in without}
        if fault is not None:
            env[VARIABLE] = json.dumps(fault)
        usual = self.data["reference"]["seconds"]
        limit = None if usual is None else SLACK_S + SLOWER * usual
        log = self.folder / f"{name}{'-resumed' if more else ''}.log"
        return watch_run([*self.command, "--output-dir", str(self.folder / name), *more], env, log, limit)


def new_record(fault: Fault) -> dict[str, Any]:
    """The record of a fault before it is injected."""
    unknown = (
        "reason", "struck", "exit_code", "seconds", "left", "cause", "checkpoint", "resumed_at", "compared",
        "difference", "run_dir",
    )  # fmt: skip
    return {"id": fault.id, "title": fault.title, "status": "not-run", **dict.fromkeys(unknown)}


def strike(drill: Drill, fault: Fault, record: dict[str, Any], name: str) -> None:
    """Run into one fault and resume; the result goes into its record."""
    if fault.id == "kill-rank" and drill.ranks == 1:
        record |= {"status": "same", "reason": "one process: killing its only rank kills all"}
        return
    run_dir = drill.folder / name
    record["run_dir"] = str(run_dir)
    wrong = _struck(drill, fault, record, name) or _resumed(drill, record, name)
    record |= {"status": "passed" if wrong is None else "failed", "reason": wrong}
    if wrong is None:
        drop_weights(run_dir)


def _struck(drill: Drill, fault: Fault, record: dict[str, Any], name: str) -> str | None:
    """Run into the fault; what is wrong with the end of the run."""
    run_dir, step = drill.folder / name, drill.course.strikes(fault)
    rank = {"rank": drill.ranks - 1} if fault.id == "kill-rank" else {}
    ended = drill.run(name, fault={"fault": fault.id, "step": step, "times": 1, **rank})
    marker = run_dir / STRUCK
    struck = marker.is_file()
    since = ended.ended_at - marker.stat().st_mtime if struck else ended.seconds
    last = max(complete_checkpoints(run_dir / "checkpoints"), default=None)
    record |= {
        "struck": step if struck else None,
        "exit_code": ended.code,
        "seconds": round(since, 3) if struck else None,
        "left": ended.left,
        "cause": ended.cause or None,
        "checkpoint": last,
    }
    ending = Ending(ended.code, struck, since, ended.left, ended.cause)
    wrong = bad_ending(fault, ending, _stop_seconds(drill.plan))
    return wrong or bad_checkpoint(fault, drill.course, last)


def _stop_seconds(plan: Plan) -> float:
    return float(plan.runtime.stop_seconds or 0)


def _resumed(drill: Drill, record: dict[str, Any], name: str) -> str | None:
    """Resume from the last checkpoint; what is wrong with that."""
    run_dir = drill.folder / name
    before = losses(run_dir)
    early = {step: loss for step, loss in drill.expected.items() if step in before}
    ended = drill.run(name, "--resume", "auto")
    if ended.code != 0:
        return f"resumed, it ended with exit code {ended.code}: {ended.cause or 'no cause'}"
    found, wanted = _resumed_at(run_dir), record["checkpoint"]
    record["resumed_at"] = found
    if found != wanted:
        return f"it resumed from {f'step {found}' if found else 'the start'}, not from step {wanted}"
    after = compare(losses(run_dir), drill.expected)
    record |= {"compared": after.steps, "difference": after.difference}
    tolerance = drill.data["reference"]["tolerance"]
    return bad_losses(after, tolerance) or bad_losses(compare(before, early), tolerance)


def _resumed_at(run_dir: Path) -> int | None:
    """The step of the checkpoint that rank 0 resumed from, by its log."""
    log = (run_dir / "logs" / "rank-0.log").read_text(encoding="utf-8", errors="replace")
    found = RESUMING.findall(log)
    number = Path(found[-1]).name.removeprefix("checkpoint-") if found else ""
    return int(number) if number.isdigit() else None


def losses(run_dir: Path) -> dict[int, float | None]:
    """Step -> loss of training."""
    rows = read_jsonl(run_dir / "metrics.jsonl")
    return {row["step"]: row["loss"] for row in rows if "loss" in row and isinstance(row.get("step"), int)}


def drop_weights(run_dir: Path) -> None:
    """Remove the weights of a run of few steps, which would fill the disk."""
    for name in ("checkpoints", "model", "adapter"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
