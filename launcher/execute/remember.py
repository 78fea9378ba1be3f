"""Append the measurements of a finished run to the calibration file, for later plans."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from launcher.errors import MachineError
from launcher.machine import probe
from launcher.memory.calibration import job_kind
from launcher.models.measured_runs import MeasuredRun
from launcher.plan.inputs import Facts
from launcher.plan.plan import Plan
from launcher.planner.planner import predict_as_run


def remember_run(plan: Plan, result: Mapping[str, Any], facts: Facts) -> str | None:
    """Append a finished run, except a rehearsal (`--tiny`); a note for the user if that fails.

    result: its result.json; facts: those of its plan.
    """
    if plan.tiny:
        return None
    path = probe.calibration_file()
    try:
        append_line(path, finished_run(plan, result, facts).to_line())
    except MachineError as error:  # nvidia-smi failed meanwhile
        return f"the measurements of this run are not kept: {error}"
    except OSError as error:
        return f"the measurements of this run are not kept: cannot write {path}: {error.strerror}"
    return None


def finished_run(plan: Plan, result: Mapping[str, Any], facts: Facts) -> MeasuredRun:
    """The record of a run: measured memory, and the estimate for the longest batch that it met."""
    memory = result["memory"]
    # Without calibration: a correction must not be corrected again.
    predicted = predict_as_run(plan, replace(facts, calibration=None), memory["tokens"]["largest"])
    is_cpu = plan.hardware.is_cpu
    return MeasuredRun(
        # The device at hand, since a plan may be for another one.
        device="cpu" if is_cpu else probe.probe_hardware().device,
        method=memory["method"],
        torch=plan.versions.get("torch", ""),
        transformers=plan.versions.get("transformers", ""),
        kind=job_kind(plan.spec, plan.job),
        processes=result["processes"],
        params=plan.spec.params,
        steps=memory["steps"],
        predicted_by=predicted.method,
        predicted=predicted.total,
        components=asdict(predicted.components),
        measured=memory["measured"],
        allocated=memory["allocated"],
        context=memory["components"]["context"]["measured"],
        device_bytes=memory["device_bytes"],
    )


def append_line(path: Path, line: str) -> None:
    """Append one line atomically; an unfinished line before it is ended."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        end = stream.seek(0, os.SEEK_END)
        torn = False
        if end:
            stream.seek(end - 1)
            torn = stream.read(1) != b"\n"
        stream.write((b"\n" if torn else b"") + line.encode("utf-8"))
