"""Where each rank of a run is, as it last said: RUN_DIR/logs/status-rank-N.json, and whether it still lives.

`launcher/train/status.py` writes these files, the process that supervises the run reads them. A process that
prepares data or converts a checkpoint before any rank starts writes RUN_DIR/logs/stage-NAME.json alike.
"""

from __future__ import annotations

import socket
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from launcher.facts.safe_files import parse_json

PHASES = ("start", "prepare", "load", "skip", "train", "evaluate", "save", "finish", "ended")
"""In the order of a run; prepare where the ranks do that themselves. Skip, evaluate and save lie inside
train, evaluate and save inside finish again."""

LEFT_EARLY = 143
"""The exit code of a rank that a signal ended before its first step: what a shell says of SIGTERM."""

PREPARES = "EFFILAUNCH_PREPARE"
"""Tells the ranks of a machine that the first of them prepares the data, while the others wait."""
PREPARE_STAGE = "prepare"
"""The name of a process that prepares the data before any rank starts."""
CONVERT_STAGE = "convert"
"""The name of one that converts a checkpoint."""
PREPARED = "prepared"
"""In logs/: there as soon as the data of this try is prepared."""

REPORT = "effilaunch-report: "
"""Begins a line of output in which a process says as JSON what it could not write as logs/error-*.json."""

_ENDED_STATES = ("Z", "X", "x")
"""Of /proc/PID/stat: a process that has ended, and is only not waited for yet."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What one rank last wrote."""

    rank: int
    host: str
    pid: int
    started: int
    """When the process began, in clock ticks since the machine's start: a used pid is not taken for it."""
    phase: str
    """One of PHASES."""
    step: int
    """Optimizer steps that have ended, those of the run that was resumed included."""
    since: float
    """When the phase or the step began, seconds since 1970; during an evaluation, when its batch began."""
    median: float | None
    """Seconds, median of the last steps (50 at most); None before there are three."""
    code: int | None
    """The exit code, None until the rank knows it."""
    steps: int | None = None
    """The step at which training ends; None before it begins."""
    begun: int = 0
    """Steps of the run that was resumed."""
    memory: int | None = None
    """Peak bytes so far: reserved on a CUDA device, else resident; None before training begins."""
    title: str = ""
    """Of a step that takes long, such as loading weights; empty where there is none."""
    done: float = 0
    """How much of that is done, in `unit`."""
    total: float | None = None
    """How much there is of it; None where nobody knows."""
    unit: str = ""
    """B for bytes; else a noun in the plural, or empty."""


def status_file(run_dir: Path, rank: int) -> Path:
    """Where a rank's status lies."""
    return run_dir / "logs" / f"status-rank-{rank}.json"


def stage_file(run_dir: Path, stage: str) -> Path:
    """Where the status of a process lies that is no rank; its name is none of a rank's."""
    return run_dir / "logs" / f"stage-{stage}.json"


def read_stage(run_dir: Path, stage: str) -> RankStatus | None:
    """What that process last said; None where it says nothing, or said it before it ended."""
    status = _read(stage_file(run_dir, stage))
    return status if status is not None and is_alive(status) else None


def read_statuses(run_dir: Path) -> dict[int, RankStatus]:
    """Rank -> its last status; a file that is no status is left out."""
    found = (_read(path) for path in sorted((run_dir / "logs").glob("status-rank-*.json")))
    return {status.rank: status for status in found if status is not None}


def _read(path: Path) -> RankStatus | None:
    try:
        values: Any = parse_json(path.read_text(encoding="utf-8"))
        return RankStatus(
            **{
                field.name: values[field.name]
                if field.default is MISSING  # a status without it is none; others came later
                else values.get(field.name, field.default)
                for field in fields(RankStatus)
            }
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_alive(status: RankStatus) -> bool:
    """Whether the process that wrote this still runs, on this host."""
    return status.host == socket.gethostname() and process_started(status.pid) == status.started


def process_started(pid: int) -> int | None:
    """When a process of this machine began, in clock ticks since its start; None when it is gone.

    One that has ended and whose parent has not asked for its code yet is gone, too.
    """
    state, *rest = _stat(pid)
    return None if state in ("", *_ENDED_STATES) else int(rest[18])


def process_state(pid: int) -> str:
    """The state of a process of this machine, a letter of /proc/PID/stat; empty when it is gone."""
    return _stat(pid)[0]


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; one empty text for a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return [""]
    # The name of the program stands in brackets, and may hold spaces and brackets of its own.
    return text.rpartition(")")[2].split() or [""]


_SO_FAR = "/s so far"


def amount(value: float, unit: str) -> str:
    """A number with its unit: bytes for B, else a noun in the plural, or nothing."""
    if unit != "B":
        return f"{value:,.0f} {unit}".rstrip()
    for size, name, places in ((2**30, "GiB", 2), (2**20, "MiB", 0), (2**10, "KiB", 0)):
        if value >= size:
            return f"{value / size:,.{places}f} {name}"
    return f"{value:.0f} B"


def of_total(done: float, total: float | None, unit: str) -> str:
    """How much is done, of how much: `1.20 GiB of 4.00 GiB`, `1,000 of 20,000 rows`, `12 rows`."""
    if not total or done >= total:
        return amount(done, unit)
    return f"{amount(done, unit if unit == 'B' else '')} of {amount(total, unit)}"


def step_line(title: str, done: float, total: float | None, unit: str, seconds: float, *, ended: bool) -> str:
    """A line of a log. seconds: since the step began."""
    if not done:
        return f"{title}: {seconds:.0f} s"
    speed = amount(done / max(seconds, 1e-9), unit)
    return f"{title}: {of_total(done, total, unit)}, {speed}{'/s' if ended else _SO_FAR}"


def is_passing(line: str) -> bool:
    """Whether a line says how far a step is that goes on: where a bar shows that, nobody needs the line."""
    return line.endswith(_SO_FAR)
