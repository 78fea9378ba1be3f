"""A temporary run directory for commands that only prepare data."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import Interrupted, MachineError, Problem, RecipeError


@contextlib.contextmanager
def scratch_run_dir(purpose: str) -> Iterator[Path]:
    """An empty folder below TMPDIR, removed at the end unless the error refers to its logs.

    purpose: part of its name. Raises MachineError if it cannot be created.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"effilaunch-{purpose}-"))
    except OSError as error:
        hint = "free disk space there, or set TMPDIR to another folder"
        problem = Problem("tmp-unwritable", f"cannot create a temporary folder: {error}", hint=hint)
        raise MachineError(problem) from error
    kept = True
    try:
        yield folder
        kept = False
    except (RecipeError, MachineError, Interrupted):  # these errors do not refer to logs
        kept = False
        raise
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
