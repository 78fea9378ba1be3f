"""`doctor`: check this machine, and whether it can run a recipe."""

from __future__ import annotations

import contextlib
import getpass
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launcher import __version__
from launcher.errors import DoesNotFit, MachineError, Problem, RecipeError
from launcher.execute.binding import fixed_environment
from launcher.execute.run_dir import default_run_dir
from launcher.files.secrets import is_secret_name
from launcher.inputs.first_rows import data_problems
from launcher.inputs.planning_facts import gather
from launcher.knowledge.doctor.check import CheckResult, Verdict
from launcher.knowledge.doctor.examine import DATA_CHECK_ID, PLAN_CHECK_ID, examine
from launcher.knowledge.doctor.needs import hub_model, nvme_path, reports_to
from launcher.knowledge.doctor.redact import Private, redact, redact_json
from launcher.lab.rehearsal.run import rehearse_recipe
from launcher.machine.machine_facts import Machine, Subject, gather_machine
from launcher.models.model_config import NOT_HERE
from launcher.plan.plan import Plan
from launcher.planner.planner import make_plan
from launcher.recipe.loading import LoadedRecipe, load_recipe
from launcher.render.new_file import write_new
from launcher.report.doctor_text import bundle_text, doctor_text
from launcher.report.outcome import Outcome

_ENV = "launch.env."
_USERS = ("USER", "LOGNAME", "SUDO_USER", "WANDB_ENTITY", "WANDB_USERNAME", "WANDB_EMAIL")
"""Environment variables with the name of a person."""


def doctor_command(
    recipe: str | None,
    *,
    overrides: Sequence[str],
    on: str | None,
    bundle: str | None,
    rehearse: bool,
    **rehearsal: Any,
) -> Outcome:
    """Check this machine, for the recipe if one is given; exit status 4 if a check fails.

    bundle: write a redacted report to this file, "" for a default name. rehearse: run the rehearsal instead.
    rehearsal: its options.
    """
    options = {"--on": on is not None, "--set": bool(overrides), "--rehearse": rehearse}
    if recipe is None and (named := [name for name, given in options.items() if given]):
        raise _usage(f"{named[0]} needs a recipe", f"effilaunch doctor RECIPE {named[0]} …")
    of_rehearsal = ("seconds", "output_dir", "node_rank", "master_addr")
    named = [f"--{name.replace('_', '-')}" for name in of_rehearsal if rehearsal[name] is not None]
    if named and not rehearse:
        raise _usage(f"{named[0]} needs --rehearse", f"effilaunch doctor RECIPE --rehearse {named[0]} …")
    if rehearse and bundle is not None:
        raise _usage("--bundle reports the checks, which --rehearse omits", "run one after the other")
    if recipe is not None and rehearse:
        return rehearse_recipe(recipe, overrides=overrides, on=on, **rehearsal)
    return _check(recipe, overrides, on, bundle)


def _usage(message: str, hint: str) -> RecipeError:
    return RecipeError(Problem("usage", message, hint=hint))


def _check(recipe: str | None, overrides: Sequence[str], on: str | None, bundle: str | None) -> Outcome:
    target = None if bundle is None else bundle_path(bundle, Path.cwd())
    plan, findings = (None, []) if recipe is None else examine_recipe(recipe, on, overrides)
    machine = gather_machine(subject_of(plan, recipe))
    findings += examine(machine, plan)
    asked = None if recipe is None else recipe + (f" on {on}" if on else "")
    failed = any(finding.verdict.status == "fail" for finding in findings)
    text = doctor_text(findings, asked)
    data = {
        "checks": [finding.to_json() for finding in findings],
        "ready": not failed,
        "machine": machine.to_json(),
    }
    if target is not None:
        write_bundle(target, findings, machine, asked)
        data["bundle"] = str(target)
        text += f"wrote {target}\n"
    return Outcome(data, text, exit_code=MachineError.exit_code if failed else 0)


def examine_recipe(
    recipe: str, on: str | None, overrides: Sequence[str] = ()
) -> tuple[Plan | None, list[CheckResult]]:
    """The plan, or the nearest miss if none fits, and the findings of planning.

    Raises RecipeError if the recipe is wrong on every machine.
    """
    loaded = load_recipe(recipe, overrides)
    absent = data_problems(loaded)
    plan, problems = _planned(loaded, on)
    label = (
        ""
        if plan is None
        else f"{plan.hardware.label}, {plan.job.engine.name}, micro-batch {plan.batch.micro}"
    )
    here = "data is missing" if absent else "data is here"
    findings = [
        CheckResult(PLAN_CHECK_ID, "plan", _verdict(problems, label)),
        CheckResult(DATA_CHECK_ID, "data", _verdict(absent, here)),
    ]
    return plan, findings


def _planned(loaded: LoadedRecipe, on: str | None) -> tuple[Plan | None, Sequence[Problem]]:
    """The plan, or the problems: the model is not found, nothing fits, the device is too old."""
    try:
        loaded, facts = gather(loaded, on)
    except MachineError as error:
        return None, error.problems
    except RecipeError as error:
        if not {problem.code for problem in error.problems} <= NOT_HERE:
            raise
        return None, error.problems
    try:
        return make_plan(loaded, facts), ()
    except DoesNotFit as error:
        return error.nearest_miss, error.problems
    except RecipeError as error:  # the recipe is valid: the planner refuses it for this hardware
        return None, error.problems


def _verdict(problems: Sequence[Problem], found: str) -> Verdict:
    if not problems:
        return Verdict("ok", found)
    message = "; ".join(f"{p.path}: {p.message}" if p.path else p.message for p in problems)
    hints = dict.fromkeys(p.hint for p in problems if p.hint)
    return Verdict("fail", found or "no plan", message, "; ".join(hints))


def subject_of(plan: Plan | None, recipe: str | None) -> Subject:
    """What the machine facts are gathered for: the needs of the plan."""
    if plan is None:
        return Subject(sys.executable, Path.cwd() / "runs")
    env = {
        name: value
        for name, value in plan.launch.env.items()
        if "{" not in value  # values such as {master_port} are only known at the start
    }
    env |= fixed_environment({**os.environ, **env}, "none")[0]
    return Subject(
        python=plan.interpreter,
        run_dir=default_run_dir(str(recipe), Path.cwd()),
        env=env,
        hub_model=hub_model(plan),
        revision=plan.model.revision or "main",
        cache_dir=plan.model.cache_dir,
        nvme_path=nvme_path(plan),
        wandb=reports_to(plan, "wandb"),
        mirror=None if plan.runtime.mirror is None else plan.runtime.mirror.replace("{name}", "doctor"),
    )


def bundle_path(given: str, folder: Path) -> Path:
    """The new file of the report. Raises RecipeError if it exists or cannot be written."""
    name = given or f"effilaunch-doctor-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.md"
    try:
        path = folder / Path(name).expanduser()
        taken, here = path.exists() or path.is_symlink(), path.parent.is_dir()
    except (OSError, RuntimeError) as error:  # the name is too long, or the home of an unknown user
        reason = getattr(error, "strerror", None) or str(error)
        raise RecipeError(Problem("bundle-name", f"not a valid file name: {reason}", name)) from None
    if taken:
        hint = "name a new file; the recipe comes before --bundle"
        raise RecipeError(Problem("bundle-exists", "exists already", str(path), hint=hint))
    if not here:
        hint = "create the folder first"
        raise RecipeError(Problem("bundle-folder", "its folder does not exist", str(path), hint=hint))
    if not os.access(path.parent, os.W_OK):  # before the checks, which take seconds
        raise RecipeError(Problem("bundle-unwritable", "its folder cannot be written to", str(path)))
    return path


def write_bundle(path: Path, findings: Sequence[CheckResult], machine: Machine, asked: str | None) -> None:
    """Write the redacted report. Raises RecipeError if that fails."""
    private = private_here()
    # Redact each string by itself: JSON escapes would hide matches of the patterns.
    rows = redact_json([finding.to_json() for finding in findings], private)
    facts = redact_json(machine.to_json(), private)
    assert isinstance(rows, list), "a list stays one"
    assert isinstance(facts, dict), "a mapping stays one"
    text = bundle_text(rows, facts, redact(asked, private) if asked else None, __version__)
    try:
        write_new(path, text)
    except OSError as error:
        problem = Problem("bundle-unwritable", f"cannot be written: {error.strerror}", str(path))
        raise RecipeError(problem) from None


def private_here() -> Private:
    """The names and secrets of this user and machine."""
    try:
        home = Path.home()
    except RuntimeError:  # neither $HOME nor an entry for this user
        home = Path("/")
    node = os.uname().nodename
    users = {os.environ.get(name, "") for name in _USERS} | {home.name}
    with contextlib.suppress(OSError, KeyError):  # a container's user may have no name
        users.add(getpass.getuser())
    secrets = [value for name, value in os.environ.items() if is_secret_name(name) and len(value) >= 6]
    hosts = {node, node.partition(".")[0], os.environ.get("HOSTNAME", "")}
    return Private(
        homes=[str(home), str(home.resolve())],
        users=[user for user in users if len(user) > 1],
        hosts=[host for host in hosts if len(host) > 1 and host != "localhost"],
        secrets=secrets,
    )
