"""`drill`: a short real run is struck and resumed, fault by fault, and its losses compared."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.commands.striking import Drill, drop_weights, losses, new_record, strike
from launcher.doctor.start_checks import check_machine, check_room
from launcher.errors import (
    DoesNotFit,
    EffilaunchError,
    Interrupted,
    MachineError,
    Problem,
    RecipeError,
    RunFailed,
)
from launcher.execute.drilled import Watched, interruptible
from launcher.execute.run_dir import FULL, claimed, default_run_dir, unwritable
from launcher.inputs.first_rows import data_problems
from launcher.inputs.planning_facts import gather
from launcher.planner.drill import (
    Fault,
    Losses,
    check_resumable,
    check_states,
    choose_faults,
    compare,
    course_overrides,
    make_course,
    tolerance_of,
)
from launcher.planner.planner import make_plan
from launcher.recipe.loading import load_recipe
from launcher.report.drill_text import drill_text, fault_line
from launcher.report.outcome import SCHEMA_VERSION, Outcome, echo, note

UNDISTURBED = ("00-undisturbed", "00-undisturbed-again")


def drill_command(
    recipe: str,
    *,
    overrides: Sequence[str],
    on: str | None,
    tiny: bool,
    steps: int,
    only: str | None,
    output_dir: str | None,
    as_json: bool,
) -> Outcome:
    """Drill a recipe. Exit 0 when its loss went on after every fault, else 5.

    After an interrupt (130), what was done is kept.
    """
    faults = choose_faults(only)
    drill = _planned(recipe, overrides, on=on, tiny=tiny, steps=steps, output_dir=output_dir)
    drill.say = note if as_json else echo
    data = drill.data
    data["faults"] = [new_record(fault) for fault in faults]
    runs = f"runs of {data['steps']} steps, saved every {data['save_steps']}"
    drill.say(f"{len(faults)} faults, {runs}, in {drill.folder}")
    try:
        with interruptible():
            _drill(drill, faults)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise unwritable(drill.folder, error) from error
    failed = [record for record in data["faults"] if record["status"] == "failed"]
    problems = [_failed(drill, failed[0])] if failed else []
    shown = drill_text(data, str(drill.folder))
    code = RunFailed.exit_code if failed else 0
    return Outcome({"run_dir": str(drill.folder), **data}, shown, problems, code)


def _planned(
    recipe: str, overrides: Sequence[str], *, on: str | None, tiny: bool, steps: int, output_dir: str | None
) -> Drill:
    """The drill before anything has run: what its runs will be is planned as they will plan it."""
    course = make_course(steps)
    asked = load_recipe(recipe, overrides).recipe
    check_resumable(asked)
    sets = [*overrides, *course_overrides(asked, course)]
    loaded = load_recipe(recipe, sets)
    absent = [] if tiny else data_problems(loaded)
    if absent:
        raise RecipeError(absent)
    planned, facts = gather(loaded, on, tiny=tiny)
    plan = make_plan(planned, facts)
    check_states(plan)
    check_machine(plan)
    named = default_run_dir(f"{Path(loaded.path).stem}-drill", Path.cwd())
    folder = (Path(output_dir) if output_dir else named).absolute()
    check_room(plan, folder)  # of one run: the weights of one go before the next begins
    if output_dir:
        _make_folder(folder)
    else:
        folder = claimed(folder)
    command = [sys.executable, "-m", "launcher.cli", "run", recipe, "--json"]
    command += ["--tiny"] if tiny else []
    command += [] if on is None else ["--on", on]
    command += [word for value in sets for word in ("--set", value)]
    data = {
        "schema_version": SCHEMA_VERSION,
        "recipe": str(loaded.path),
        "model": facts.model.name,
        "hardware": facts.hardware.label,
        "steps": course.steps,
        "save_steps": course.save_steps,
        "tiny": tiny,
        "versions": dict(facts.versions),
        "reference": {"runs": 0, "seconds": None, "spread": None, "tolerance": 0.0},
    }
    return Drill(folder, command, course, plan, data, note)


def _make_folder(folder: Path) -> None:
    try:
        if folder.exists() and any(folder.iterdir()):
            message, hint = f"the drill's directory {folder} is not empty", "name another --output-dir"
            raise RecipeError(Problem("run-dir-not-empty", message, hint=hint))
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot write the drill's directory {folder}: {error.strerror}"
        hint = "name another with --output-dir"
        raise RecipeError(Problem("run-dir-unwritable", message, hint=hint)) from error


def _drill(drill: Drill, faults: Sequence[Fault]) -> None:
    """The undisturbed run, then every fault; what was done is kept when somebody interrupts."""
    place = "the undisturbed run"
    try:
        _reference(drill)
        drill.save()
        for number, (fault, record) in enumerate(zip(faults, drill.data["faults"], strict=True), start=1):
            place = fault.id
            drill.say(f"[{number}/{len(faults)}] {fault.id}: {fault.title} …")
            strike(drill, fault, record, f"{number:02d}-{fault.id}")
            drill.save()
            drill.say(f"[{number}/{len(faults)}] {fault_line(record)}")
    except KeyboardInterrupt as stop:
        drill.save()
        hint = f"what was done until then is in {drill.folder}"
        raise Interrupted(Problem("interrupted", f"stopped at {place}", hint=hint)) from stop


def _reference(drill: Drill) -> None:
    """Run without a fault: once on a CPU, where a run repeats itself to the bit; twice on GPUs."""
    runs: list[Losses] = []
    seconds: list[float] = []
    for name in UNDISTURBED[:1] if drill.plan.hardware.is_cpu else UNDISTURBED:
        drill.say(f"{name.partition('-')[2]} …")
        ended = drill.run(name)
        if ended.code != 0:
            raise _own_error(drill, name, ended)
        runs.append(losses(drill.folder / name))
        seconds.append(ended.seconds)
        drop_weights(drill.folder / name)
    drill.expected = runs[0]
    drill.data["reference"] = {
        "runs": len(runs),
        "seconds": round(max(seconds), 3),
        "spread": compare(runs[1], runs[0]).difference if len(runs) > 1 else None,
        "tolerance": tolerance_of(runs),
    }


def _own_error(drill: Drill, name: str, ended: Watched) -> EffilaunchError:
    """The error of a run that ended although nothing struck it, as that run told it."""
    kinds: dict[int | None, type[EffilaunchError]] = {
        kind.exit_code: kind for kind in (RecipeError, DoesNotFit, MachineError, Interrupted)
    }
    told = [Problem(**problem) for problem in ended.answer.get("errors", [])]
    if not told:
        message = f"the run that nothing struck ended with exit code {ended.code}"
        told = [Problem("run-failed", message, file=str(drill.folder / f"{name}.log"))]
    return kinds.get(ended.code, RunFailed)(told)


def _failed(drill: Drill, record: dict[str, Any]) -> Problem:
    return Problem(
        "drill-failed",
        f"{record['id']}: {record['reason']}",
        file=record["run_dir"],
        hint=f"what the run said is in {drill.folder}, in the logs of the same name",
    )
