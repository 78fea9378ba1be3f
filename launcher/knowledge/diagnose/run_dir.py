"""Read a run directory: its logs, and what each process wrote when it ended."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.files.rank_status import FATAL
from launcher.files.safe_files import parse_json
from launcher.knowledge.diagnose.findings import Error
from launcher.knowledge.diagnose.reading import clean
from launcher.knowledge.diagnose.tracebacks import Errors

_RANK = re.compile(r"(?:^|[._/-])rank[._-]?(\d+)(?=\D|$)")
LOST = "lost.json"
"""File in logs/ about the ranks that the supervisor lost."""
_ELASTIC = re.compile(r"/attempt_\d+/(\d+)/std(?:err|out)\.log$")


def is_run_dir(path: Path) -> bool:
    """Whether this project wrote it."""
    return (path / "plan.json").is_file()


def logs_of(folder: Path) -> list[Path]:
    """A run directory's logs in the order in which they begin; in another folder, files named like logs."""
    if is_run_dir(folder):
        logs = folder / "logs"
        ranks = (*logs.glob("rank-*.log"), *logs.glob(f"{FATAL}-rank-*.log"))
        named = [logs / "prepare.log", *sorted(ranks, key=lambda log: (_number(log), log.name[0] != "r"))]
        return [log for log in (*named, *launcher_logs(folder)) if log.is_file()]
    found = [p for p in folder.rglob("*") if p.is_file() and p.suffix in (".log", ".out", ".err", ".txt")]
    return sorted(found, key=lambda p: (_number(p), str(p)))


def launcher_logs(folder: Path) -> list[Path]:
    """Logs of the launchers: that of node rank 0, then the others'."""
    logs = folder / "logs"
    others = logs.glob("launcher-*.log")
    return [logs / "launcher.log", *sorted(others, key=lambda log: (len(log.name), log.name))]


def _number(path: Path) -> int:
    rank = rank_of(path)
    return -1 if rank is None else rank


def rank_of(path: Path) -> int | None:
    """The rank in a log's name."""
    found = _ELASTIC.search(str(path)) or _RANK.search(path.name)
    return int(found.group(1)) if found else None


def earlier_bytes(folder: Path) -> dict[str, int]:
    """Log name -> its bytes when the last run began: a resumed run appends to the logs."""
    try:
        bound = parse_json((folder / "environment.json").read_text("utf-8"))["bound"]
        return {str(name): int(size) for name, size in bound["log_bytes"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return {}


@dataclass(frozen=True, slots=True)
class Lost:
    """Ranks that disappeared, as the supervisor recorded it."""

    message: str
    ranks: tuple[int, ...]
    oom: bool | None
    """Whether the kernel's OOM killer killed a process meanwhile; None where its counters cannot be read."""


def read_lost(folder: Path) -> Lost | None:
    """The ranks that the supervisor of the last attempt lost; None where it lost none."""
    try:
        found = parse_json((folder / "logs" / LOST).read_text("utf-8"))
        return Lost(str(found["message"]), tuple(map(int, found["ranks"])), found["oom"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def recorded_errors(folder: Path) -> list[Error]:
    """What the processes of the last run wrote in error-*.json, the earliest first."""
    found = []
    for path in sorted((folder / "logs").glob("error-*.json")):
        try:
            record = parse_json(path.read_text("utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(record, dict):
            found.append(_recorded(path, record))
    found.sort(key=lambda error: error.time or 0.0)
    for place, error in enumerate(found):
        error.order = place - len(found)  # before every line of a log
    return found


def _recorded(path: Path, record: dict[str, Any]) -> Error:
    """One record as an error: its traceback's text, read as a log is."""
    rank = record.get("rank")
    parsed = Errors()
    for number, text in enumerate(str(record.get("traceback", "")).splitlines(), 1):
        for line in clean(text.encode("utf-8", "replace"), number, str(path)):
            parsed.feed(line)
    parsed.close()
    whole = [error for error in parsed.found.values() if error.kind == "traceback" and error.type]
    error = whole[-1] if whole else Error(str(record.get("type", "")), str(record.get("message", "")))
    error.message = str(record.get("message") or error.message)
    error.file, error.line = str(path), 1
    error.first_rank = rank if isinstance(rank, int) else None
    error.ranks = set() if error.first_rank is None else {error.first_rank}
    moment = record.get("time")
    error.time = float(moment) if isinstance(moment, int | float) else None
    error.last = 1 << 62
    error.steps_before = 1 << 62
    return error
