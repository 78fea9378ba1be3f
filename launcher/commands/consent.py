"""Code that a run directory names is run without a question only where the directory is the user's own."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from launcher.errors import Problem, RecipeError
from launcher.report.questions import ask, can_ask
from launcher.train.job import read_job


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
