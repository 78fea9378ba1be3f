"""A run directory whose run completed: what merge, generate and eval start from."""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import Problem, RecipeError
from launcher.execute.run_dir import MARKER
from launcher.facts.checkpoint import FINISHED_BEFORE
from launcher.facts.safe_files import read_json
from launcher.knowledge.failures.noise import is_noise
from launcher.report.outcome import note
from launcher.report.questions import ask, can_ask
from launcher.train.job import read_job


def finished_run(run_dir: str) -> Path:
    """The run directory as an absolute path. RecipeError when no run completed in it.

    The result of a run that was made longer afterwards counts until the longer one has completed.
    """
    folder = Path(run_dir).absolute()
    if os.path.isfile(folder / MARKER):  # noqa: PTH113 - no error for a name that no file can have
        return folder
    if os.path.isfile(folder / FINISHED_BEFORE):  # noqa: PTH113 - the same
        note(f"the result is that of {_step(folder)}: the run was made longer, and has not finished since")
        return folder
    message = f"{run_dir} holds no finished run"
    hint = "name a run directory whose run completed"
    if not os.path.isdir(folder):  # noqa: PTH112 - the same
        message += ": there is no such folder"
    elif (folder / "plan.json").is_file():
        hint = (
            f"`effilaunch report {shlex.quote(run_dir)}` says how far it came; --checkpoint NAME takes "
            "one of its checkpoints; `run --resume auto` continues it"
        )
    raise RecipeError(Problem("not-finished", message, hint=hint))


def _step(folder: Path) -> str:
    """The step of result.json, in words."""
    try:
        return f"step {int(read_json(folder / 'result.json')['steps'])}"
    except (OSError, ValueError, KeyError, TypeError):
        return "an earlier step"


@contextlib.contextmanager
def output_on_stderr() -> Iterator[None]:
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


def consent_to_code(run_dir: Path, command: str, *, hooks: bool, allowed: bool) -> None:
    """Ask before `command` runs code that the plan.json of somebody else's directory names.

    hooks: whether the command runs the hook file, beside a model's own code. allowed: the user has said yes
    on the command line. RecipeError without a yes, and where the plan cannot be read; nothing happens where
    all files belong to the user.
    """
    if allowed:
        return
    job = read_job(run_dir)  # the worker's reader: what it would run is what is asked about
    file = job.at("python.file") if hooks else None
    code = [f"the Python file {file}"] if isinstance(file, str) and file else []
    if job.at("model.trust_remote_code"):
        code.append(f"the code of the model {job.at('model.name_or_path')}")
    if not code:
        return
    own = os.geteuid()
    named = [run_dir, run_dir / "plan.json", *([Path(file)] if isinstance(file, str) and file else [])]
    others = {path: uid for path in named if (uid := _owner(path)) not in (None, own)}
    if not others:
        return
    foreign, uid = next(iter(others.items()))
    message = f"belongs to {_user(uid)}, and `{command}` would run {' and '.join(code)}"
    problem = Problem(
        "foreign-code", message, file=str(foreign), hint="read that code, then add --allow-code"
    )
    if not can_ask() or not ask(f"{problem.file} {message}. Run it? (yes/no)", "no", _yes):
        raise RecipeError(problem)


def _owner(path: Path) -> int | None:
    """The user id that a file belongs to, of a link that of what it leads to; None where there is none."""
    try:
        return path.stat().st_uid
    except (OSError, ValueError):
        return None


def _user(uid: int | None) -> str:
    try:
        return f"user {pwd.getpwuid(uid or 0).pw_name}"
    except KeyError:
        return f"user id {uid}"


def _yes(answer: str) -> bool:
    if answer.lower() in ("y", "yes", "n", "no"):
        return answer.lower().startswith("y")
    raise RecipeError(Problem("usage", f"{answer!r} is neither yes nor no"))
