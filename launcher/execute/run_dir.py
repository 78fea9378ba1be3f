"""The run directory: made once, never overwritten, compared before it is continued."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.facts.status import process_started
from launcher.render.bundle import Bundle, dump_json

MARKER = "COMPLETED"
"""Written last by rank 0: a run is done only when this file says so."""
LOCK = ".lock"
"""Held while a run lives in this directory (flock); holds the pid of the run."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""Answers of a file system that knows no locks, such as Lustre mounted without `flock`."""
_OF_A_START = (LOCK, "logs", "checkpoints", "recipe.yaml", "recipe.yaml.part", "plan.json.part")
"""What a start leaves that was killed before its plan was written."""


def default_run_dir(recipe_file: str, root: Path) -> Path:
    """`runs/<recipe-stem>/<UTC time>` under `root`."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    folder = root / "runs" / Path(recipe_file).stem
    candidate = folder / stamp
    number = 1
    while candidate.exists():
        number += 1
        candidate = folder / f"{stamp}-{number}"
    return candidate


def newest_run_dir(recipe_file: str, root: Path) -> Path | None:
    """The newest run directory of this recipe; None when there is none."""
    folder = root / "runs" / Path(recipe_file).stem
    found = sorted(p for p in folder.glob("*") if (p / "plan.json").is_file())
    return found[-1] if found else None


def write_run_dir(bundle: Bundle, run_dir: Path, *, resume: bool) -> None:
    """Write the bundle's files. A non-empty folder is refused (exit 2), unless a run in it is resumed."""
    try:
        _check_free(run_dir)
        own = _OF_A_START if resume and not (run_dir / "plan.json").is_file() else ()
        occupied = run_dir.exists() and any(path.name not in own for path in run_dir.iterdir())
        if occupied and not (resume and (run_dir / "plan.json").is_file()):
            raise RecipeError(
                Problem(
                    "run-dir-not-empty",
                    f"the run directory {run_dir} is not empty",
                    hint="name another --output-dir, or --resume auto to continue that run",
                )
            )
        for name in ("logs", "checkpoints"):
            (run_dir / name).mkdir(parents=True, exist_ok=True)
        for name, text in bundle.files.items():
            if name == "recipe.yaml" and any((run_dir / "checkpoints").glob("checkpoint-*")):
                continue  # what the run was begun with
            write_file(run_dir / name, text)
    except OSError as error:
        raise RecipeError(
            Problem(
                "run-dir-unwritable",
                f"cannot write the run directory {run_dir}: {error.strerror}",
                hint="name another with --output-dir",
            )
        ) from error
    (run_dir / "command.sh").chmod(0o755)


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[int]:
    """Hold the run directory, so that no second run writes into it; the lock's descriptor.

    RecipeError `run-dir-in-use` when another process holds it: a run, or what is left of one that was killed.
    On a file system without locks nothing is held.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / LOCK).open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            stream.seek(0)
            raise RecipeError(_in_use(run_dir, stream.read().strip())) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        yield stream.fileno()


def _check_free(run_dir: Path) -> None:
    """RecipeError when another process holds the run directory; this one may."""
    lock = run_dir / LOCK
    if not lock.is_file() or lock.read_text("utf-8").strip() == str(os.getpid()):
        return
    with locked(run_dir):
        pass


def _in_use(run_dir: Path, holder: str) -> Problem:
    alive = holder.isdigit() and process_started(int(holder)) is not None
    who = f"by process {holder}" if alive else "by what a killed run left, which ends within about a minute"
    return Problem(
        "run-dir-in-use",
        f"the run directory {run_dir} is in use {who}",
        hint="wait for that run, end it, or name another --output-dir",
    )


def write_file(path: Path, text: str) -> None:
    """Write aside, then rename: a file is whole or absent."""
    aside = path.with_name(path.name + ".part")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def record_bound(run_dir: Path, bound: dict[str, Any]) -> None:
    """Add the values that were bound late to environment.json."""
    path = run_dir / "environment.json"
    write_file(path, dump_json({**json.loads(path.read_text("utf-8")), "bound": bound}))
