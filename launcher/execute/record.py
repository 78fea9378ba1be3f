"""Read a run directory: of a finished, failed, stopped, running or never started run.

Only plan.json is required. Other files that are missing, half written or of another form are skipped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from launcher.errors import Problem, RecipeError
from launcher.execute.logged import read_logged
from launcher.execute.mirror_upload import read_progress
from launcher.execute.run_dir import ENDED, MARKER, RESTARTS, STOPPED, is_held, read_stopped
from launcher.files.checkpoint import complete_checkpoints
from launcher.files.rank_status import LEFT_EARLY, is_alive, read_statuses
from launcher.files.redaction import hide_in
from launcher.files.safe_files import parse_json, read_bytes, read_json, read_jsonl, write_text
from launcher.render.bundle import dump_json

State = Literal["planned", "not started", "running", "stopped", "failed", "finished"]
"""`planned`: a plan without a run directory."""
_LARGEST = 2**26
"""Bytes of a file that is read: runs write none that is longer."""
_OF_OTHERS = {
    "ladder.json": "a ladder's: its ladder.html shows it",
    "drill.json": "a drill's: its drill.json has the results",
    "sweep.json": "a sweep's: name the runs in it",
}
"""File in a folder of several runs -> what the folder is."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as recorded in its directory; everything but the plan may be empty."""

    name: str
    """The stem of the recipe."""
    state: State
    plan: Mapping[str, Any]
    """plan.json."""
    run_dir: str = ""
    recipe: str = ""
    """recipe.yaml, as given."""
    result: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, Any]] = ()
    """Rows of metrics.jsonl that have a step; of many, those that a chart shows."""
    logged: int = 0
    """How many rows it has."""
    data: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    restarts: Sequence[Mapping[str, Any]] = ()
    stopped: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    """The highest step of a rank."""
    phase: str = ""
    """Of rank 0."""
    checkpoints: Sequence[str] = ()
    """Names of the complete ones, the newest last."""
    mirror: Mapping[str, Any] = field(default_factory=dict)
    """mirror.json: what is in the run's object store."""
    diagnosis: Mapping[str, Any] = field(default_factory=dict)
    """Result of `diagnose` for a failed run; added by the caller."""
    problems: Sequence[str] = ()
    """Errors that the command printed at the end; or why a plan does not fit."""


def read_run(run_dir: Path) -> RunRecord:
    """Read a run directory. RecipeError (2) for another folder."""
    plan = _read_json(run_dir / "plan.json")
    if not plan:
        raise RecipeError(_no_run(run_dir))
    statuses = read_statuses(run_dir)
    logged = read_logged(run_dir / "metrics.jsonl")
    first, state = statuses.get(0), _state(run_dir, bool(logged.rows))
    ended = {} if state in ("finished", "running") else _read_json(run_dir / "logs" / ENDED)
    problems, found = ended.get("problems"), complete_checkpoints(run_dir / "checkpoints")
    return RunRecord(
        name=Path(str(plan.get("recipe", ""))).stem or run_dir.resolve().name,
        state="stopped" if ended.get("interrupted") is True else state,
        plan=plan,
        run_dir=str(run_dir.resolve()),
        recipe=_read_text(run_dir / "recipe.yaml"),
        result=_read_json(run_dir / "result.json"),
        metrics=logged.rows,
        logged=logged.count,
        data=_read_json(run_dir / "data.json"),
        environment=_environment(run_dir),
        restarts=read_jsonl(run_dir / RESTARTS),
        stopped=_read_json(run_dir / STOPPED),
        step=max((status.step for status in statuses.values()), default=0),
        phase="" if first is None else first.phase,
        checkpoints=[found[step].name for step in sorted(found)],
        mirror=read_progress(run_dir),
        problems=[item for item in problems if isinstance(item, str)] if isinstance(problems, list) else [],
    )


def _environment(run_dir: Path) -> dict[str, Any]:
    """environment.json, with the nodes of the last attempt."""
    found, nodes = _read_json(run_dir / "environment.json"), _read_json(run_dir / "logs" / "nodes.json")
    bound = found.get("bound")
    return {**found, "bound": {**(bound if isinstance(bound, dict) else {}), **nodes}} if nodes else found


def total_seconds(result: Mapping[str, Any]) -> float | None:
    """Duration of all starts that led to the result; None where it is unknown."""
    found = result.get("total_seconds", None if result.get("resumed_at") else result.get("seconds"))
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


def keep_end(run_dir: Path, problems: Sequence[str], *, interrupted: bool) -> None:
    """Write the errors of the command that supervised the run, which are not all in the logs."""
    end = {"interrupted": interrupted, "problems": list(problems)}
    write_text(run_dir / "logs" / ENDED, dump_json(end))


def _state(run_dir: Path, has_rows: bool) -> State:
    statuses = read_statuses(run_dir).values()
    if is_held(run_dir) or any(is_alive(status) for status in statuses):
        return "running"
    if (run_dir / MARKER).is_file():
        return "finished"
    left = any(status.code == LEFT_EARLY for status in statuses)
    if left or read_stopped(run_dir) is not None:
        return "stopped"
    return "failed" if has_rows or any((run_dir / "logs").glob("*")) else "not started"


def _no_run(folder: Path) -> Problem:
    """The problem of a folder that is no run directory."""
    code, file = "no-run-dir", str(folder)
    known = next((what for name, what in _OF_OTHERS.items() if (folder / name).is_file()), None)
    if known is not None:
        return Problem(code, f"is no run directory, but {known}", file, hint=f"such as {file}/*/")
    runs = sorted(path.parent for path in folder.glob("*/plan.json"))
    if runs:
        hint = f"name one of them, or several to compare; the latest is {runs[-1]}"
        return Problem(code, f"is no run directory; it contains {len(runs)} of them", file, hint=hint)
    why = "no such folder" if not folder.exists() else "it has no plan.json that can be read"
    return Problem(code, f"is no run directory: {why}", file, hint="name what `run` called run directory")


def _read_text(path: Path) -> str:
    try:
        return read_bytes(path, _LARGEST).decode("utf-8", errors="replace")
    except OSError:
        return ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path, _LARGEST)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def without_secrets(record: RunRecord, hide: Callable[[str], str]) -> RunRecord:
    """The record with `hide` applied to every text in it."""
    hidden = {each.name: hide_in(getattr(record, each.name), hide) for each in fields(record)}
    return replace(record, **hidden)


class NewRows:
    """Reads the rows added to metrics.jsonl while it grows; a file that was replaced from its beginning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        """Device and inode."""
        self._read = 0
        """Bytes of it."""

    def read(self) -> list[dict[str, Any]]:
        """The rows since the last time; a half-written one comes with the next."""
        try:
            with self._path.open("rb") as stream:
                state = self._path.stat()
                if (state.st_dev, state.st_ino) != self._file:
                    self._file, self._read = (state.st_dev, state.st_ino), 0
                stream.seek(self._read)
                lines, end, _ = stream.read().rpartition(b"\n")
        except OSError:
            return []
        self._read += len(lines) + len(end)
        rows = []
        for line in lines.splitlines():
            with contextlib.suppress(ValueError):
                rows.append(parse_json(line))
        return [row for row in rows if isinstance(row, dict)]
