"""The run directory: made once, never overwritten, compared before it is continued."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launcher.errors import EffilaunchError, MachineError, Problem, RecipeError
from launcher.facts.atomic_writes import write_text
from launcher.facts.rehearsal import PREFIX
from launcher.facts.secrets import hide_in, hider, secret_values
from launcher.facts.status import process_started
from launcher.facts.user_files import parse_json
from launcher.render.bundle import Bundle, dump_json
from launcher.render.slurm import SUBMITTED

MARKER = "COMPLETED"
"""Written last by rank 0: a run is done only when this file says so."""
ENDED = "ended.json"
"""In logs/: what the command said of a run that did not finish; gone when it is started again."""
LOCK = ".lock"
"""Held while a run lives in this directory (flock); holds the pid of the run and its host."""
DISK_FULL, UNWRITABLE = "disk-full", "run-dir-unwritable"
"""Codes of the problems of a run directory that cannot be written."""
FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""Answers of a file system that knows no locks, such as Lustre mounted without `flock`."""
_OF_A_START = (LOCK, "logs", "checkpoints", "recipe.yaml", ".recipe.yaml.part", ".plan.json.part")
"""What a start leaves that was killed before its plan was written."""


def default_run_dir(recipe_file: str, root: Path) -> Path:
    """`runs/<recipe-stem>/<UTC time>` under `root`; a proposal, which `claimed` makes one's own."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    proposed = root / "runs" / Path(recipe_file).stem / stamp
    return next(path for path in _numbered(proposed) if not path.exists())


def claimed(proposed: Path) -> Path:
    """Make a folder of a default name: this one or, where another start was first, the next free number.

    Whoever makes a folder owns it: runs that start in the same second get one each. Raises as `unwritable`.
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
    """The path, then the same with -2, -3, … behind it."""
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))


def newest_run_dir(recipe_file: str, root: Path) -> Path | None:
    """The newest run directory of this recipe in which something was started, else in which nothing was.

    None when there is none. A dry run, made to look at a plan, must not hide the run that is to go on, and a
    rehearsal is none.
    """
    folder = root / "runs" / Path(recipe_file).stem
    runs = (path for path in folder.glob("*") if not path.name.startswith(PREFIX))
    found = sorted(path for path in runs if (path / "plan.json").is_file())
    started = [path for path in found if any((path / "logs").glob("*"))]
    return max(started or found, default=None)


def write_run_dir(bundle: Bundle, run_dir: Path, *, resume: bool) -> None:
    """Write the bundle's files, as `written`, and leave the directory to others."""
    with written(bundle, run_dir, resume=resume):
        pass


@contextlib.contextmanager
def written(bundle: Bundle, run_dir: Path, *, resume: bool) -> Iterator[int]:
    """Write the bundle's files, and hold the run directory while this is entered; the lock's descriptor.

    A non-empty folder is refused (RecipeError), unless a run in it is resumed; so is one that another run
    holds, whose plan is never replaced. MachineError where the disk is full.
    """
    with contextlib.ExitStack() as held:
        try:
            _check_free(run_dir)
            _check_empty(run_dir, resume)  # before a lock is laid into a folder of somebody else
            lock = held.enter_context(locked(run_dir))
            _check_empty(run_dir, resume)
            _write(bundle, run_dir)
        except OSError as error:
            raise unwritable(run_dir, error) from error
        yield lock


def _check_empty(run_dir: Path, resume: bool) -> None:
    begun = (run_dir / "plan.json").is_file()
    own = _OF_A_START if resume and not begun else (LOCK,)
    occupied = run_dir.exists() and any(path.name not in own for path in run_dir.iterdir())
    if occupied and not (resume and begun):
        raise RecipeError(
            Problem(
                "run-dir-not-empty",
                f"the run directory {run_dir} is not empty",
                hint="name another --output-dir, or --resume auto to continue that run",
            )
        )


def _write(bundle: Bundle, run_dir: Path) -> None:
    for name in ("logs", "checkpoints"):
        (run_dir / name).mkdir(parents=True, exist_ok=True)
    for name, text in bundle.files.items():
        begun = any((run_dir / "checkpoints").glob("checkpoint-*")) or (run_dir / SUBMITTED).is_file()
        if name == "recipe.yaml" and begun and (run_dir / name).is_file():
            continue  # what the run was begun with
        write_text(run_dir / name, text)
    (run_dir / "command.sh").chmod(0o755)


def unwritable(run_dir: Path, error: OSError) -> EffilaunchError:
    """The error of a run directory that cannot be written: of the machine where only room is missing."""
    message = f"cannot write the run directory {run_dir}: {error.strerror or error}"
    if error.errno in FULL:
        hint = "make room there, or name another folder with --output-dir"
        return MachineError(Problem(DISK_FULL, message, hint=hint))
    return RecipeError(Problem(UNWRITABLE, message, hint="name another with --output-dir"))


_held: dict[Path, int] = {}
"""Run directories that this process holds -> the descriptor of their lock."""


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[int]:
    """Hold the run directory, so that no second run writes into it; the lock's descriptor.

    RecipeError `run-dir-in-use` when another process holds it: a run, or what is left of one that was killed.
    On a file system without locks nothing is held. Who holds it already holds it on.
    """
    place = run_dir.absolute()
    if place in _held:
        yield _held[place]
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / LOCK).open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            stream.seek(0)
            raise RecipeError(_in_use(run_dir, stream.read())) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        with contextlib.suppress(OSError):  # a full disk: only its name is missing in the others' error
            os.ftruncate(stream.fileno(), 0)
            os.write(stream.fileno(), f"{os.getpid()} {socket.gethostname()}\n".encode())
        _held[place] = stream.fileno()
        try:
            yield stream.fileno()
        finally:
            del _held[place]


def is_held(run_dir: Path) -> bool:
    """Whether a run of another process lives in this directory now; False where there are no locks."""
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


def _check_free(run_dir: Path) -> None:
    """RecipeError when another process holds the run directory; this one may."""
    if (run_dir / LOCK).is_file():
        with locked(run_dir):
            pass


def _in_use(run_dir: Path, said: str) -> Problem:
    holder, host = [*said.split(), "", ""][:2]
    if host not in ("", socket.gethostname()):
        who = f"by process {holder} on {host}"
    elif holder.isdigit() and process_started(int(holder)) is not None:
        who = f"by process {holder}"
    else:
        who = "by what a killed run left, which ends within about a minute"
    return Problem(
        "run-dir-in-use",
        f"the run directory {run_dir} is in use {who}",
        hint="wait for that run, end it, or name another --output-dir",
    )


def record_bound(run_dir: Path, bound: dict[str, Any]) -> None:
    """Add the values that were bound late to environment.json."""
    path = run_dir / "environment.json"
    if "command" in bound:
        bound = {**bound, "command": hide_in(bound["command"], hider(secret_values(os.environ)))}
    write_text(path, dump_json({**parse_json(path.read_text("utf-8")), "bound": bound}))
