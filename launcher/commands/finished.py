"""A run directory whose run completed: what merge, generate and eval start from."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import Problem, RecipeError
from launcher.execute.run_dir import MARKER
from launcher.failures.noise import is_noise


def finished_run(run_dir: str) -> Path:
    """The run directory as an absolute path. RecipeError when no run completed in it."""
    folder = Path(run_dir).absolute()
    if os.path.isfile(folder / MARKER):  # noqa: PTH113 - no error for a name that no file can have
        return folder
    message = f"{run_dir} holds no finished run"
    hint = "name a run directory whose run completed"
    if not os.path.isdir(folder):  # noqa: PTH112 - the same
        message += ": there is no such folder"
    elif (folder / "plan.json").is_file():
        hint = f"`effilaunch report {shlex.quote(run_dir)}` says how far it came; `run --resume auto` goes on"
    raise RecipeError(Problem("not-finished", message, hint=hint))


@contextlib.contextmanager
def words_aside() -> Iterator[None]:
    """Within this, what is printed on the way goes to stderr: stdout is for the result.

    Without upstream's words on what changes in its next version, on kernels that are not needed here and on
    what the plan has dealt with, and without its bars where no terminal moves them.
    """
    from launcher.train.bars import no_bars

    deepspeed, bitsandbytes = logging.getLogger("DeepSpeed"), logging.getLogger("bitsandbytes")
    level = bitsandbytes.level
    bitsandbytes.setLevel(logging.ERROR)
    deepspeed.addFilter(_is_news)  # its level is set when it is imported, on the way
    bars = contextlib.nullcontext() if sys.stderr.isatty() else no_bars()
    try:
        with bars, contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        bitsandbytes.setLevel(level)
        deepspeed.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return not is_noise(record.getMessage())
