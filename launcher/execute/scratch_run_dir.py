"""A run directory beside the user's own, for commands that only prepare the data of a recipe."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import Interrupted, MachineError, Problem, RecipeError


@contextlib.contextmanager
def scratch_run_dir(purpose: str) -> Iterator[Path]:
    """An empty folder below TMPDIR; it is removed, unless a failure ends this whose error names its logs.

    purpose: part of the folder's name. MachineError where none can be made.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"effilaunch-{purpose}-"))
    except OSError as error:
        hint = "make room there, or name another folder with the variable TMPDIR"
        problem = Problem("tmp-unwritable", f"no temporary folder can be made: {error}", hint=hint)
        raise MachineError(problem) from error
    kept = True
    try:
        yield folder
        kept = False
    except (RecipeError, MachineError, Interrupted):  # they say all that is known
        kept = False
        raise
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
