"""The run directory of `merge`, `generate` and `eval`: is it finished, and may its code run?"""

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
from launcher.execute.run_dir import MARKER, read_own
from launcher.files.checkpoint import FINISHED_BEFORE
from launcher.files.safe_files import read_json
from launcher.knowledge.failures.noise import is_noise
from launcher.recipe.hooks import MAKE_MODELS
from launcher.report.outcome import note
from launcher.report.questions import ask, can_ask
from launcher.train.job import Job, read_job


def result_run(run_dir: str, checkpoint: str | None) -> Path:
    """The absolute path of the run directory whose result, or checkpoint, is used.

    Raises RecipeError for a user's own command, whose result is where its script has put it; without
    `checkpoint` as `finished_run`.
    """
    folder = Path(run_dir).absolute()
    if read_own(folder) is not None:
        message = "is the run of a command of your own, whose result effilaunch does not know"
        hint = "use the folder that the script wrote; `report` and `diagnose` read this run"
        raise RecipeError(Problem("own-command", message, run_dir, hint=hint))
    return finished_run(run_dir) if checkpoint is None else folder


def finished_run(run_dir: str) -> Path:
    """The absolute path of the run directory. Raises RecipeError if no run finished in it.

    The result of a run that is being continued to more steps is used until the longer run finishes.
    """
    folder = Path(run_dir).absolute()
    if os.path.isfile(folder / MARKER):  # noqa: PTH113 - no error for a name that no file can have
        return folder
    if os.path.isfile(folder / FINISHED_BEFORE):  # noqa: PTH113 - the same
        step = "an earlier step"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            step = f"step {int(read_json(folder / 'result.json')['steps'])}"
        note(f"the result is that of {step}: the run was continued to more steps and has not finished")
        return folder
    message = f"{run_dir} contains no finished run"
    hint = "name the directory of a finished run"
    if not os.path.isdir(folder):  # noqa: PTH112 - the same
        message += ": no such folder"
    elif (folder / "plan.json").is_file():
        hint = (
            f"`effilaunch report {shlex.quote(run_dir)}` shows how far it came; --checkpoint NAME uses "
            "one of its checkpoints; `run --resume auto` continues it"
        )
    raise RecipeError(Problem("not-finished", message, hint=hint))


@contextlib.contextmanager
def output_on_stderr() -> Iterator[None]:
    """Send what libraries print to stderr, because stdout is for the result.

    Hides their deprecation warnings, known noise, and progress bars if stderr is no terminal.
    """
    from launcher.train.progress import no_bars

    deepspeed, bitsandbytes = logging.getLogger("DeepSpeed"), logging.getLogger("bitsandbytes")
    level = bitsandbytes.level
    bitsandbytes.setLevel(logging.ERROR)
    deepspeed.addFilter(_is_news)  # importing it resets its level
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
    """Ask before `command` runs code that the run directory of another user names.

    hooks: whether the command also runs the hook file. allowed: --allow-code was given.
    Raises RecipeError without consent, if the plan cannot be read, and where only the hook file can make the
    model of the result.
    """
    job = read_job(run_dir)  # as the worker reads it
    if not (job.task.made_by_hooks and hooks):  # which makes the model again
        _refuse_own_model(job, command)
    if allowed:
        return
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
    hint = "read that code, then add --allow-code"
    problem = Problem("foreign-code", message, file=str(foreign), hint=hint)
    if not can_ask() or not ask(f"{problem.file} {message}. Run it? (yes/no)", "no", _yes):
        raise RecipeError(problem)


def _hooks(job: Job) -> list[str]:
    found = job.at("python.hooks")
    return found if isinstance(found, list) else []


def _refuse_own_model(job: Job, command: str) -> None:
    made = [name for name in _hooks(job) if name in MAKE_MODELS]
    if made:
        message = (
            f"the model of this run was made by {made[0]} in {job.python.file}, and `{command}` would load "
        )
        message += "it without"
        hint = "load the result with your own code: its weights are in adapter/ or model/"
        raise RecipeError(Problem("own-model", message, file=str(job.run_dir), path="python", hint=hint))


def _owner(path: Path) -> int | None:
    """The user id of the owner of a file, following links; None if there is none."""
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
