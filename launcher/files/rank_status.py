"""Status files of the ranks (RUN_DIR/logs/status-rank-N.json), liveness of processes, progress of long steps.

`launcher/train/status.py` writes them. The supervisor of each node reads those of its own ranks and puts
them into the node's file in RUN_DIR/.nodes, which node rank 0 reads. A process that prepares data or converts
a checkpoint before the ranks start writes RUN_DIR/logs/stage-NAME.json.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from launcher.files.safe_files import parse_json, with_descriptor

PHASES = ("start", "prepare", "load", "skip", "train", "evaluate", "save", "finish", "ended")
"""In the order of a run; `prepare` where the ranks do it themselves. skip, evaluate and save are within
train; evaluate and save also within finish."""

AGREE_S = 2.0
"""The ranks agree whether to stop about so often, or at each step if one takes longer."""

LEFT_EARLY = 143
"""Exit status of a rank that was terminated before its first step: 128 + SIGTERM."""

PREPARES = "EFFILAUNCH_PREPARE"
"""Environment variable: the first rank of a node prepares the data while the others wait."""
PREPARE_STAGE = "prepare"
"""Name of the process that prepares the data before the ranks start."""
CONVERT_STAGE = "convert"
"""Name of the process that converts a checkpoint."""
PREPARED = "prepared"
"""File in logs/: the data of this attempt is prepared."""

REPORT = "effilaunch-report: "
"""Prefix of an output line with the JSON that could not be written to logs/error-*.json."""

PUSHING = ".pushing"
"""In RUN_DIR: hard links to the files of what is being pushed to the hub, which retention cannot remove."""
PUSH_FAILED = "push-failed"
"""Code of a rank's problem: the run has finished, and its result is not on the hub."""

FATAL = "fatal"

ENDED_STATES = ("", "Z", "X", "x")
"""States of a process that does not exist, or has exited (zombie, dead)."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The last status of a rank."""

    rank: int
    host: str
    pid: int
    started: int
    """Start time of the process in clock ticks since boot, which detects a reused pid."""
    phase: str
    """One of PHASES."""
    step: int
    """Completed optimizer steps, including those before a resume."""
    since: float
    """Start of the phase or step (of the batch, during an evaluation), seconds since 1970."""
    median: float | None
    """Median duration of the last steps (at most 50) in seconds; None before there are three."""
    code: int | None
    """Exit status; None while the rank runs."""
    steps: int | None = None
    """Last step of training; None before it begins."""
    begun: int = 0
    """Steps before the resume."""
    memory: int | None = None
    """Peak bytes so far: reserved on a CUDA device, else resident; None before training begins."""
    title: str = ""
    """Name of a long step, such as loading weights; empty where there is none."""
    done: float = 0
    """Progress of the long step, in `unit`."""
    total: float | None = None
    """Total of the long step; None where unknown."""
    unit: str = ""
    """B for bytes, else a plural noun, or empty."""


def status_file(run_dir: Path, rank: int) -> Path:
    """Path of a rank's status."""
    return run_dir / "logs" / f"status-rank-{rank}.json"


def fatal_log(run_dir: Path, rank: int) -> Path:
    """Path of the stacks that a rank writes when a fatal signal (such as SIGSEGV) ends it."""
    return run_dir / "logs" / f"{FATAL}-rank-{rank}.log"


def stage_file(run_dir: Path, stage: str) -> Path:
    """Path of the status of a process that is no rank."""
    return run_dir / "logs" / f"stage-{stage}.json"


def read_stage(run_dir: Path, stage: str) -> RankStatus | None:
    """The last status of that process; None where it has none, or has exited."""
    status = _read_status(stage_file(run_dir, stage))
    return status if status is not None and is_alive(status) else None


def read_statuses(run_dir: Path, ranks: Iterable[int] | None = None) -> dict[int, RankStatus]:
    """Rank -> its last status; invalid files are skipped. ranks: None for all: their folder is listed."""
    if ranks is None:
        paths = with_descriptor(lambda: sorted((run_dir / "logs").glob("status-rank-*.json")))
    else:
        paths = [status_file(run_dir, rank) for rank in ranks]
    found = map(_read_status, paths)
    return {status.rank: status for status in found if status is not None}


def _read_status(path: Path) -> RankStatus | None:
    try:
        return as_status(parse_json(with_descriptor(partial(path.read_text, encoding="utf-8"))))
    except (OSError, ValueError):
        return None


def as_status(values: Any) -> RankStatus | None:
    """The status of a JSON value; None for another one."""
    try:
        return RankStatus(
            **{
                field.name: values[field.name]
                if field.default is MISSING  # required; the others were added later
                else values.get(field.name, field.default)
                for field in fields(RankStatus)
            }
        )
    except (KeyError, TypeError, AttributeError):
        return None


def is_alive(status: RankStatus) -> bool:
    """Whether the process that wrote this is still running, on this host."""
    return status.host == socket.gethostname() and process_started(status.pid) == status.started


def process_started(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None where it has exited, zombies included."""
    state, *rest = process_stat(pid)
    return None if state in ENDED_STATES else int(rest[18])


def process_state(pid: int) -> str:
    """The state of a process, a letter of /proc/PID/stat; empty where it does not exist."""
    return process_stat(pid)[0]


def process_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; [""] where the process does not exist."""
    try:
        text = with_descriptor(partial(Path(f"/proc/{pid}/stat").read_text, "utf-8", "replace"))
    except (OSError, ValueError):
        return [""]
    # The program name, in brackets, may itself contain spaces and brackets.
    return text.rpartition(")")[2].split() or [""]


_SO_FAR = "/s so far"


def amount(value: float, unit: str) -> str:
    """A number with its unit: B for bytes, else a plural noun, or empty."""
    if unit != "B":
        return f"{value:,.0f} {unit}".rstrip()
    for size, name, places in ((2**30, "GiB", 2), (2**20, "MiB", 0), (2**10, "KiB", 0)):
        if value >= size:
            return f"{value / size:,.{places}f} {name}"
    return f"{value:.0f} B"


def of_total(done: float, total: float | None, unit: str) -> str:
    """Progress: `1.20 GiB of 4.00 GiB`, `1,000 of 20,000 rows`, `12 rows`."""
    if not total or done >= total:
        return amount(done, unit)
    return f"{amount(done, unit if unit == 'B' else '')} of {amount(total, unit)}"


def step_line(title: str, done: float, total: float | None, unit: str, seconds: float, *, ended: bool) -> str:
    """A log line on a long step. seconds: since it began."""
    if not done:
        return f"{title}: {seconds:.0f} s"
    speed = amount(done / max(seconds, 1e-9), unit)
    return f"{title}: {of_total(done, total, unit)}, {speed}{'/s' if ended else _SO_FAR}"


def is_passing(line: str) -> bool:
    """Whether a log line reports a step in progress, which a progress bar makes redundant."""
    return line.endswith(_SO_FAR)
