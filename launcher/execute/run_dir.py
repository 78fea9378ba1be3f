"""The run directory: created once, locked while a run uses it, never overwritten.

A further attempt of a run keeps the files of the attempts before it; a run that resumes from an older
checkpoint keeps the later ones under another name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from launcher.errors import EffilaunchError, Interrupted, MachineError, Problem, RecipeError
from launcher.files.checkpoint import ORIGIN, SUPERSEDED, complete_checkpoints, incomplete_checkpoints
from launcher.files.rank_status import process_started
from launcher.files.redaction import hide_in, hider, secret_values
from launcher.files.safe_files import exists, is_after, parse_json, read_lines, write_text
from launcher.plan.rehearsal import PREFIX
from launcher.plan.stored import OWN_COMMAND
from launcher.render.bundle import Bundle, dump_json

MARKER = "COMPLETED"
"""Written last by rank 0: only a run with this file has finished."""
ENDED = "ended.json"
"""In logs/: the errors of the command whose run did not finish; removed by the next start."""
LOCK = ".lock"
"""Locked (flock) while a run uses the directory; contains the pid of the run and its host."""
NODES = ".nodes"
"""What the nodes of a run tell each other, see nodes.py; it may be there before the run."""
SUBMITTED = "submitted.yaml"
"""The recipe of a submitted job, with its parents and overrides, as it was when it was submitted."""
STOPPED = "stopped.json"
"""Written by rank 0 when a signal ended the run with a checkpoint."""
RESTARTS = "restarts.jsonl"
"""One row for each restart of the run."""
DISK_FULL, UNWRITABLE = "disk-full", "run-dir-unwritable"
"""Codes of the problems of a run directory that cannot be written."""
FAULTY_GPU = ("gpu-ecc", "gpu-faulty")
"""Codes of the problems of a run that failed of a GPU's hardware."""
EXCLUDES = "EFFILAUNCH_EXCLUDES"
"""Set in jobs that are started again without the node of a faulty GPU, which a restart would keep."""
FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""Errors of a file system without locks, such as Lustre mounted without `flock`."""
LEAVE_S = 600.0
"""How long a start waits for the processes of a killed one. They end within 60 s and two steps."""
_LEFT = "processes of a killed run"
_OF_A_START = (LOCK, NODES, "logs", "checkpoints", "recipe.yaml", ".recipe.yaml.part", ".plan.json.part")
"""Files of a start that was killed before its plan was written."""


@contextlib.contextmanager
def scratch_run_dir(purpose: str) -> Iterator[Path]:
    """An empty folder in TMPDIR, removed at the end unless an error refers to its logs.

    purpose: part of its name. MachineError if it cannot be created.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"effilaunch-{purpose}-"))
    except OSError as error:
        hint = "free disk space there, or set TMPDIR to another folder"
        problem = Problem("tmp-unwritable", f"cannot create a temporary folder: {error}", hint=hint)
        raise MachineError(problem) from error
    try:
        yield folder
    except (RecipeError, MachineError, Interrupted):  # these errors do not refer to logs
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def default_run_dir(recipe_file: str, root: Path) -> Path:
    """`runs/<recipe-stem>/<UTC time>` under `root`; `claimed` creates it."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return free_name(root / "runs" / Path(recipe_file).stem / stamp)


def claimed(proposed: Path) -> Path:
    """Create a folder of a default name: this one or, if another start was first, the next free number.

    Raises as `unwritable`.
    """
    try:
        proposed.parent.mkdir(parents=True, exist_ok=True)
        for path in _numbered(proposed):
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
    except OSError as error:
        raise unwritable(proposed, error) from error
    raise AssertionError("numbers do not end")


def _numbered(path: Path) -> Iterator[Path]:
    """The path, then the same with -2, -3, … after its stem."""
    yield path
    yield from (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))


def free_name(path: Path) -> Path:
    """The path, or the first that does not exist with a number after its stem."""
    return next(one for one in _numbered(path) if not one.exists())


def run_dirs(recipe_file: str, root: Path) -> list[Path]:
    """The run directories of this recipe that have a default name, the newest last; without rehearsals."""
    folder = root / "runs" / Path(recipe_file).stem
    runs = (path for path in folder.glob("*") if not path.name.startswith(PREFIX))
    return sorted(path for path in runs if (path / "plan.json").is_file())


def newest_run_dir(recipe_file: str, root: Path) -> Path | None:
    """The newest run directory of this recipe in which a run was started, else the newest; None without any.

    Without rehearsals; a dry run must not hide the run to resume.
    """
    found = run_dirs(recipe_file, root)
    started = [path for path in found if any((path / "logs").glob("*"))]
    return max(started or found, default=None)


def write_run_dir(bundle: Bundle, run_dir: Path, *, resume: bool) -> None:
    """Write the bundle's files, as `written`, without holding the lock afterwards."""
    with written(bundle.files, run_dir, resume=resume):
        pass


@contextlib.contextmanager
def written(files: Mapping[str, str], run_dir: Path, *, resume: bool) -> Iterator[int]:
    """Write the files of a run (name -> text), and hold the run directory; the lock's descriptor.

    RecipeError for a non-empty folder, unless a run in it is resumed, and for one that another run holds.
    MachineError if the disk is full.
    """
    with contextlib.ExitStack() as held:
        try:
            if not (run_dir / LOCK).is_file():
                _check_empty(run_dir, resume)  # before a lock is created in a foreign folder
            lock = held.enter_context(locked(run_dir))
            _check_empty(run_dir, resume)
            _write(files, run_dir)
        except OSError as error:
            raise unwritable(run_dir, error) from error
        yield lock


def _check_empty(run_dir: Path, resume: bool) -> None:
    begun = (run_dir / "plan.json").is_file()
    own = _OF_A_START if resume and not begun else (LOCK, NODES)
    occupied = run_dir.exists() and any(path.name not in own for path in run_dir.iterdir())
    if occupied and not (resume and begun):
        message = f"the run directory {run_dir} is not empty"
        hint = "name another --output-dir, or --resume auto to continue that run"
        raise RecipeError(Problem("run-dir-not-empty", message, hint=hint))


def _write(files: Mapping[str, str], run_dir: Path) -> None:
    for name in ("logs", "checkpoints"):
        (run_dir / name).mkdir(parents=True, exist_ok=True)
    begun = any((run_dir / "checkpoints").glob("checkpoint-*")) or (run_dir / SUBMITTED).is_file()
    for name, text in files.items():
        if not (name == "recipe.yaml" and begun and (run_dir / name).is_file()):  # what the run began with
            write_text(run_dir / name, text)
    if "command.sh" in files:
        (run_dir / "command.sh").chmod(0o755)


def unwritable(run_dir: Path, error: OSError) -> EffilaunchError:
    """The error of a run directory that cannot be written; MachineError where the disk is full."""
    message = f"cannot write the run directory {run_dir}: {error.strerror or error}"
    if error.errno in FULL:
        hint = "free space there, or name another folder with --output-dir"
        return MachineError(Problem(DISK_FULL, message, hint=hint))
    return RecipeError(Problem(UNWRITABLE, message, hint="name another with --output-dir"))


def read_own(run_dir: Path) -> dict[str, Any] | None:
    """plan.json of the run of a user's own command; None for another folder."""
    try:
        found = parse_json((run_dir / "plan.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("kind") == OWN_COMMAND else None


_held: dict[Path, int] = {}
"""Run directories that this process holds -> the descriptor of their lock."""


@contextlib.contextmanager
def locked(run_dir: Path, say: Callable[[str], None] | None = None) -> Iterator[int]:
    """Hold the run directory, so that no second run writes into it; the lock's descriptor.

    RecipeError `run-dir-in-use` if another process holds it: a run, or the rest of a killed one. say: called
    once before this waits for the latter. Does nothing on a file system without locks, or if this process
    holds it already.
    """
    place = run_dir.absolute()
    if place in _held:
        yield _held[place]
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / LOCK).open("a+", encoding="utf-8") as stream:
        try:
            _take(stream, run_dir, say)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        with contextlib.suppress(OSError):  # a full disk: the others' error does not name this process
            os.ftruncate(stream.fileno(), 0)
            os.write(stream.fileno(), f"{os.getpid()} {socket.gethostname()}\n".encode())
        _held[place] = stream.fileno()
        try:
            yield stream.fileno()
        finally:
            del _held[place]


def _take(stream: TextIO, run_dir: Path, say: Callable[[str], None] | None) -> None:
    """Lock the file. Raises RecipeError if others hold it, and go on to."""
    deadline = None
    while True:
        try:
            return fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            stream.seek(0)
            holder = _holder(stream.read())
            if holder or say is None or (deadline is not None and time.monotonic() > deadline):
                raise RecipeError(_in_use(run_dir, holder)) from error
        if deadline is None:
            deadline = time.monotonic() + LEAVE_S
            say(f"waiting for {_LEFT} of {run_dir}, which save and end")
        time.sleep(0.2)


def is_held(run_dir: Path) -> bool:
    """Whether another process holds the run directory; False where there are no locks."""
    if run_dir.absolute() in _held:
        return False
    try:
        with (run_dir / LOCK).open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _holder(text: str) -> str:
    """The living process that a lock file names; empty for the rest of a killed run."""
    pid, host = [*text.split(), "", ""][:2]
    if host not in ("", socket.gethostname()):
        return f"process {pid} on {host}"
    return f"process {pid}" if pid.isdigit() and process_started(int(pid)) is not None else ""


def _in_use(run_dir: Path, holder: str) -> Problem:
    who = holder or f"{_LEFT}, which end within about a minute"
    hint = "wait for that run, end it, or name another --output-dir"
    return Problem("run-dir-in-use", f"the run directory {run_dir} is in use by {who}", hint=hint)


def record_bound(run_dir: Path, bound: dict[str, Any]) -> None:
    """Add the values that were bound at the start to environment.json."""
    path = run_dir / "environment.json"
    if "command" in bound:
        bound = {**bound, "command": hide_in(bound["command"], hider(secret_values(os.environ)))}
    write_text(path, dump_json({**parse_json(path.read_text("utf-8")), "bound": bound}))


@dataclass(frozen=True, slots=True)
class Stopped:
    """What rank 0 wrote when it stopped."""

    signal: str | None = None
    step: int | None = None
    checkpoint: str | None = None


def read_stopped(run_dir: Path) -> Stopped | None:
    """stopped.json; None if nothing stopped this run."""
    try:
        found = parse_json((run_dir / STOPPED).read_text("utf-8"))
        return Stopped(found.get("signal"), found.get("step"), found.get("checkpoint"))
    except (OSError, ValueError, AttributeError):
        return None


_KEPT = ("plan.json", "ds_config.json", "accelerate.yaml", "command.sh")
"""Files that each attempt of a run writes anew."""


def write_next_attempt(bundle: Bundle, run_dir: Path, *, keeps_checkpoints: bool) -> str | None:
    """Write the files of the next attempt; those of the last one stay as plan-1.json, plan-2.json and so on.

    Checkpoints that cannot be resumed are set aside, with the metrics that led to them. Returns the name of
    their new folder; None where none were moved. Raises as `write_run_dir`.
    """
    number = 1 + len(list(run_dir.glob("plan-*.json")))
    aside = None
    try:
        for name in _KEPT:  # first, since these need space
            old = run_dir / name
            if old.is_file() and old.read_text("utf-8") != bundle.files.get(name):
                write_text(old.with_name(f"{old.stem}-{number}{old.suffix}"), old.read_text("utf-8"))
                if name not in bundle.files:
                    old.unlink()
        if not keeps_checkpoints:
            aside = _set_aside(run_dir, number)
    except OSError as error:
        raise unwritable(run_dir, error) from error
    write_run_dir(bundle, run_dir, resume=True)
    return aside


def _set_aside(run_dir: Path, number: int) -> str | None:
    metrics, checkpoints = run_dir / "metrics.jsonl", run_dir / "checkpoints"
    if metrics.is_file():
        metrics.rename(run_dir / f"metrics-{number}.jsonl")
    aside = None
    if any(checkpoints.glob("checkpoint-*")):
        aside = f"checkpoints-{number}"
        checkpoints.rename(run_dir / aside)
    # It cannot be resumed either; last, since a failed renaming leaves the run as it was.
    (run_dir / ORIGIN).unlink(missing_ok=True)
    return aside


def last_step(run_dir: Path) -> int:
    """The last step that the run has logged; 0 where there is none."""
    last = 0
    with contextlib.suppress(OSError):
        for _, row in read_lines(run_dir / "metrics.jsonl"):
            if row is not None and is_after(row, last) and isinstance(row["step"], int):
                last = row["step"]
    return last


_RECORDS = ("metrics.jsonl", RESTARTS)


def set_aside_after(run_dir: Path, step: int, say: Callable[[str], None]) -> None:
    """Set aside the checkpoints after `step`, and the rows of records that belong to them.

    They are never resumed, counted or removed. Raises as `unwritable`. Records first: an interrupted start
    loses nothing.
    """
    later = _checkpoints_after(run_dir / "checkpoints", step)
    if not later:
        return
    try:
        for name in _RECORDS:
            _split(run_dir / name, step, max(later))
        new = [
            folder.rename(free_name(folder.with_name(f"{SUPERSEDED}{number}"))).name
            for number, folder in sorted(later.items())
        ]
    except OSError as error:
        raise unwritable(run_dir, error) from error
    old = ", ".join(folder.name for _, folder in sorted(later.items()))
    say(
        f"set aside: {old}, saved after the step that the run resumes from, as {', '.join(new)} in "
        f"{run_dir / 'checkpoints'}; they are neither resumed nor removed"
    )


def _checkpoints_after(folder: Path, step: int) -> dict[int, Path]:
    """Step -> checkpoint of a later step, also an incomplete one."""
    found = [*complete_checkpoints(folder).values(), *incomplete_checkpoints(folder)]
    steps = {int(path.name.rpartition("-")[2]): path for path in found if path.parent == folder}
    return {number: path for number, path in steps.items() if number > step}


def _split(record: Path, step: int, last: int) -> None:
    """Move the rows of a record after `step` into a file of their own; damaged lines stay."""
    if not exists(record):
        return
    aside = free_name(record.with_name(f"{record.stem}-{SUPERSEDED}{last}{record.suffix}"))
    parts = {path: path.with_name(f"{path.name}.part") for path in (aside, record)}
    try:
        with parts[aside].open("wb") as later, parts[record].open("wb") as kept:
            for line, row in read_lines(record):
                (later if is_after(row, step) else kept).write(line)
        if parts[aside].stat().st_size:
            for path, part in parts.items():
                part.replace(path)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
