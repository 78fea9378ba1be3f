"""`ladder`: the rungs of a recipe, one run after the other, predicted beside measured."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.doctor.start_checks import check_machine
from launcher.errors import EffilaunchError, Interrupted, MachineError, Problem, RecipeError, RunFailed
from launcher.execute.remember import remember_run
from launcher.execute.run_dir import claimed, default_run_dir, write_run_dir
from launcher.execute.start import execute, prepare_data
from launcher.facts import probe
from launcher.facts.safe_files import write_text
from launcher.facts.software import require_modules
from launcher.inputs.first_rows import data_problems
from launcher.inputs.planning_facts import gather
from launcher.knowledge.doctor.needs import NEEDED
from launcher.memory.estimate import MemoryEstimate
from launcher.plan.inputs import Facts
from launcher.plan.plan import Plan
from launcher.planner.ladder import (
    RUNGS,
    Step,
    choose_rungs,
    plan_ladder,
    sentence,
    start_batch,
)
from launcher.planner.planner import predict_as_run
from launcher.recipe.loading import load_recipe
from launcher.render.bundle import dump_json, render
from launcher.report.ladder import ladder_page, ladder_text, rung_line
from launcher.report.outcome import SCHEMA_VERSION, Outcome
from launcher.report.run_display import Showing, showing

DATA = "data.json"


@dataclass(slots=True)
class Climb:
    """A ladder that is being climbed; `data` is what ladder.json holds."""

    folder: Path
    data: dict[str, Any]
    facts: Facts
    shown: Showing
    prepared: Path | None = None
    """data.json of the first rung: all rungs train on the same rows."""
    lacking: list[Problem] = field(default_factory=list)
    """What this machine does not have."""

    @property
    def rungs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.data["rungs"]
        return found

    def say(self, line: str) -> None:
        """A line of the ladder."""
        self.shown.say(line)

    def save(self) -> None:
        """ladder.json and ladder.html as far as the ladder was climbed."""
        for name, text in (("ladder.json", dump_json(self.data)), ("ladder.html", ladder_page(self.data))):
            write_text(self.folder / name, text)


def ladder_command(
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
    """Climb the ladder. When no rung ran, exit 4 if the machine lacks something, else 5.

    After an interrupt (130), what was done is kept.
    """
    chosen = choose_rungs(only)
    if steps < 1:
        raise RecipeError(Problem("usage", f"--steps {steps}: expected at least 1", "--steps"))
    loaded = load_recipe(recipe, overrides)
    absent = [] if tiny else data_problems(loaded)
    if absent:
        raise RecipeError(absent)
    require_modules(NEEDED)
    batch = start_batch(loaded.recipe, tiny=tiny)
    planned, facts = gather(loaded, on, tiny=tiny)
    found = [step for step in plan_ladder(planned, facts, batch, steps) if step.rung in chosen]
    folder = _folder(output_dir, Path(loaded.path).stem)
    data = {
        "schema_version": SCHEMA_VERSION,
        "recipe": str(loaded.path),
        "model": facts.model.name,
        "hardware": facts.hardware.label,
        "device_bytes": facts.hardware.device_bytes,
        "batch": batch,
        "steps": steps,
        "tiny": tiny,
        "versions": dict(facts.versions),
        "rungs": [_record(step) for step in found],
    }
    with showing(as_json=as_json, says_rows=False) as shown:
        climb = Climb(folder, data, facts, shown)
        climb.say(f"{len(found)} rungs, {steps} steps of {batch} samples each, in {folder}")
        _climb(climb, found, planned.recipe.data.metrics)
    if all(rung["status"] != "done" for rung in climb.rungs):
        raise _nothing_ran(climb)
    return Outcome({"run_dir": str(folder), **data}, ladder_text(data, str(folder)))


def _folder(output_dir: str | None, stem: str) -> Path:
    """The ladder's directory, which is made: the one that was asked for where it is empty, else a new one."""
    if not output_dir:
        return claimed(default_run_dir(f"{stem}-ladder", Path.cwd()).absolute())
    folder = Path(output_dir).absolute()
    try:
        if folder.exists() and any(folder.iterdir()):
            message, hint = f"the ladder's directory {folder} is not empty", "name another --output-dir"
            raise RecipeError(Problem("run-dir-not-empty", message, hint=hint))
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot write the ladder's directory {folder}: {error.strerror}"
        hint = "name another with --output-dir"
        raise RecipeError(Problem("run-dir-unwritable", message, hint=hint)) from error
    return folder


def _record(step: Step) -> dict[str, Any]:
    """A rung before it is run."""
    return {
        "id": step.rung.id,
        "title": step.rung.title,
        "changed": dict(step.changed),
        "keeps": list(step.kept),
        "hardware": None if step.plan is None else step.plan.hardware.label,
        "planned": None if step.plan is None else step.plan.memory.total,
        **_predicted(None if step.plan is None else step.plan.memory),
        "measured": None,
        "load": None,
        "seconds": None,
        "metric": None,
        "status": "not-run" if step.refusal is None else "refused",
        "reason": step.refusal,
        "run_dir": None,
    }


def _predicted(memory: MemoryEstimate | None) -> dict[str, Any]:
    """An estimate in a record."""
    found = {} if memory is None else memory.to_json()
    return {
        "predicted": found.get("total"),
        "low": found.get("low"),
        "high": found.get("high"),
        "components": found.get("components"),
    }


def _climb(climb: Climb, found: Sequence[Step], metrics: Sequence[str]) -> None:
    """Run what can be run; the rung at fault is marked, and the next one is tried."""
    for number, (step, record) in enumerate(zip(found, climb.rungs, strict=True), start=1):
        place = f"[{number}/{len(found)}]"
        if step.plan is not None and record["status"] != "refused":
            climb.say(f"{place} {step.rung.id}: {step.rung.title} …")
            try:
                _run(climb, step, step.plan, record, metrics)
            except (Interrupted, KeyboardInterrupt) as stop:
                record |= {"status": "interrupted", "reason": "stopped by the user"}
                climb.save()
                hint = f"what was measured until then is in {climb.folder}"
                problem = Problem("interrupted", f"stopped at rung {step.rung.id}", hint=hint)
                raise Interrupted(problem) from stop
        climb.save()
        climb.say(f"{place} {rung_line(record)}")


def _run(climb: Climb, step: Step, plan: Plan, record: dict[str, Any], metrics: Sequence[str]) -> None:
    """Run one rung and fill its record. Rows that cannot be prepared end the ladder: they end every rung."""
    try:
        devices = check_machine(plan)
    except MachineError as error:
        record |= {"status": "refused", "reason": sentence(error)}
        climb.lacking += error.problems
        return
    bundle = render(plan)
    run_dir = climb.folder / f"{RUNGS.index(step.rung) + 1:02d}-{step.rung.id}"
    record["run_dir"] = str(run_dir)
    write_run_dir(bundle, run_dir, resume=False)
    if climb.prepared is None:
        prepare_data(bundle, run_dir, echo=climb.say, look=climb.shown.look)
        climb.prepared = run_dir / DATA
    else:
        shutil.copy(climb.prepared, run_dir / DATA)
    try:
        result = execute(
            bundle, run_dir, devices=devices, master_port=probe.free_port(), resume=None,
            prepare=False, echo=lambda line: None, look=climb.shown.begin(plan, run_dir),
        )  # fmt: skip
    except Interrupted:
        raise
    except EffilaunchError as error:
        record |= {"status": "failed", "reason": sentence(error)}
        return
    if unkept := remember_run(plan, result, climb.facts):
        climb.say(unkept)
    memory = result["memory"]
    record |= {
        "status": "done",
        **_predicted(predict_as_run(plan, climb.facts, memory["tokens"]["largest"])),
        "measured": memory["measured"],
        "load": memory["load"]["measured"],
        "seconds": result["train_seconds"],
        "metric": _metric(result, metrics),
    }
    # The weights of a few steps are of no use, and fourteen copies of a model would fill a disk.
    shutil.rmtree(run_dir / result["output"], ignore_errors=True)


def _metric(result: dict[str, Any], asked: Sequence[str]) -> dict[str, Any]:
    """The recipe's first metric at the end, else the loss on held-out rows, else the last training loss."""
    for name in (*(f"eval_{name}" for name in asked), "eval_loss"):
        if name in result["eval"]:
            return {"name": name, "value": result["eval"][name]}
    return {"name": "loss", "value": result["loss"]["last"]}


def _nothing_ran(climb: Climb) -> EffilaunchError:
    if climb.lacking:
        return MachineError(list(dict.fromkeys(climb.lacking)))
    reasons = [f"{rung['id']}: {rung['reason']}" for rung in climb.rungs]
    problems = [Problem("no-rung-ran", reason, file=str(climb.folder / "ladder.json")) for reason in reasons]
    return RunFailed(problems)
