"""`run`: plan, write the bundle, start it, tell how it ended."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from launcher.commands.plan import bundle_json
from launcher.doctor.start_checks import check_nvme, check_room, holding_nvme
from launcher.errors import MachineError, Problem, RecipeError
from launcher.execute.attempts import as_adapted, run_attempts
from launcher.execute.endings import KnownFailure
from launcher.execute.nodes.group import Group
from launcher.execute.remember import remember_run
from launcher.execute.resume import earlier_pace
from launcher.execute.run_dir import Record, read_record, with_record, written
from launcher.execute.start_point import (
    Beginning,
    beginning,
    check_data,
    check_resumption,
    finished_result,
    keep_beginning,
    readable_checkpoint,
    set_newer_aside,
    with_own_folder,
)
from launcher.facts import probe
from launcher.facts.software import require_modules
from launcher.inputs.first_rows import data_problems
from launcher.inputs.planning_facts import find_hardware, gather
from launcher.knowledge.diagnose.patch import edits
from launcher.knowledge.doctor.needs import needed_modules
from launcher.knowledge.lint.document import printable
from launcher.plan.plan import Plan
from launcher.plan.planner import make_plan
from launcher.plan.resumed_states import Resumption
from launcher.recipe.loading import LoadedRecipe, load_recipe
from launcher.render.bundle import Bundle, render
from launcher.report.diagnosis_text import edit_text
from launcher.report.outcome import Outcome, note
from launcher.report.run_display import Showing, showing
from launcher.report.text import adapted_lines, plan_text, result_text
from launcher.schedulers.rendezvous import (
    Request,
    await_members,
    digest_of_request,
    find_gathering,
    gathered,
    take_part,
)
from launcher.tasks import task_named


def run_command(
    recipe: str,
    overrides: Sequence[str],
    *,
    on: str | None,
    dry_run: bool,
    tiny: bool,
    resume: str | None,
    output_dir: str | None,
    as_json: bool,
    node_rank: int | None = None,
    master_addr: str | None = None,
    command: Sequence[str] = (),
) -> Outcome:
    """Plan, write the run directory, start the workers, and return what they measured.

    node_rank, master_addr: of this machine and of the first one, where the command is started on several.
    command: the words of the command line, for hints.
    """
    loaded = load_recipe(recipe, overrides)
    alone = "--dry-run" if dry_run else "--tiny" if tiny else ""
    hardware = partial(find_hardware, loaded.recipe, on)
    request = Request(loaded, hardware, note, node_rank, master_addr, command, alone)
    gathering = find_gathering(request)
    asked = digest_of_request(loaded, overrides, on=on, resume=resume)
    with showing(as_json=as_json) as shown:
        if gathering is not None and not gathering.place.is_head:
            return Outcome(take_part(gathering.place, asked, shown.say), "the run has finished")
        with gathered(gathering, asked, shown.say) as group:
            if not (dry_run or tiny) and (absent := data_problems(loaded)):
                raise RecipeError(absent)
            return _run(
                loaded, group, shown, on=on, dry_run=dry_run, tiny=tiny, resume=resume, output_dir=output_dir
            )


def _run(
    loaded: LoadedRecipe,
    group: Group | None,
    shown: Showing,
    *,
    on: str | None,
    dry_run: bool,
    tiny: bool,
    resume: str | None,
    output_dir: str | None,
) -> Outcome:
    given, say = Path(loaded.path), shown.say
    planned, facts = gather(loaded, on, tiny=tiny)
    begins = beginning(given, resume, output_dir)
    run_dir = begins.run_dir
    record = None
    if resume is not None:
        record, facts = read_record(run_dir), replace(facts, pace=earlier_pace(run_dir))
    adapted = planned if record is None else as_adapted(planned, record, run_dir)
    bundle = with_record(render(make_plan(adapted, facts)), record)
    resumption = check_resumption(begins, bundle, say)
    if dry_run:
        begins = with_own_folder(begins)
        run_dir = begins.run_dir
        with written(bundle, run_dir, resume=resume is not None):
            keep_beginning(begins, bundle)
        text = plan_text(bundle) + f"\nwrote {printable(str(run_dir))}, nothing was started\n"
        return Outcome({**bundle_json(bundle), "run_dir": str(run_dir)}, text)
    if (before := finished_result(begins, bundle, say)) is not None:
        return _outcome(loaded, run_dir, before)
    if group is not None:
        await_members(group, say)
    devices = check_machine(bundle.plan) if group is None else check_machine(bundle.plan, group)
    check_room(bundle.plan, run_dir, begins.step)
    check_nvme(bundle.plan)
    check_data(begins, bundle, say, shown.look)
    begins = with_own_folder(begins)
    run_dir = begins.run_dir
    start = partial(
        run_attempts, planned, facts, bundle, run_dir, devices=devices, say=say, group=group,
        looking=shown.looking(run_dir),
    )  # fmt: skip
    try:
        finished, result = _hold_and(start, begins, resumption, bundle, record, shown)
    except KnownFailure as failure:
        raise with_recipe_lines(failure, given, run_dir) from failure
    if unkept := remember_run(finished, result, facts):
        note(unkept)
    return _outcome(loaded, run_dir, result)


def _hold_and(
    start: Callable[..., tuple[Plan, dict[str, Any]]],
    begins: Beginning,
    resumption: Resumption,
    bundle: Bundle,
    record: Record | None,
    shown: Showing,
) -> tuple[Plan, dict[str, Any]]:
    """Start the run in its written directory, which is its own from the first file to the last process."""
    from launcher.commands.report import reported  # what it takes is for no dry run

    say = shown.say
    with written(bundle, begins.run_dir, resume=begins.chosen is not None):
        keep_beginning(begins, bundle)
        say(plan_text(bundle, shown.page))
        say(f"run directory {printable(str(begins.run_dir))}\n")
        say_adapted(record, say)
        with (
            readable_checkpoint(begins, resumption, say, shown.look) as checkpoint,
            holding_nvme(bundle.plan, say),
        ):
            set_newer_aside(begins, say)
            with reported(begins.run_dir, say):
                return start(resume=checkpoint)


def say_adapted(record: Record | None, say: Callable[[str], None]) -> None:
    """What an earlier start of this run has changed when memory ran out."""
    if record is not None:
        lines = adapted_lines(record.adaptations)
        say("\n".join(["memory ran out before; the run goes on as it was adapted:", *lines, ""]))


def _outcome(loaded: LoadedRecipe, run_dir: Path, result: dict[str, Any]) -> Outcome:
    """What the run measured, and the command that tries what it has learnt."""
    command: list[str] = []
    if task_named(loaded.recipe.task).reads_tokens:  # a picture cannot be written on a command line
        command = ["effilaunch", "generate", str(run_dir), _sample_prompt(loaded)]
    data = {"run_dir": str(run_dir), "result": result}
    return Outcome(data, result_text(result, str(run_dir), command))


def with_recipe_lines(failure: KnownFailure, recipe: Path, run_dir: Path) -> KnownFailure:
    """The failure; where changes of the recipe mend it, its hint names their lines, as `diagnose` does."""
    changed = edits(str(recipe), recipe.read_text("utf-8"), failure.finding.failure.changes)
    if not changed:
        return failure
    problem = failure.problems[0]
    lines = "; ".join(map(edit_text, changed))
    hint = f"{problem.hint}; `effilaunch diagnose {shlex.quote(str(run_dir))} --apply` changes {lines}"
    return KnownFailure(replace(problem, hint=hint), failure.finding)


def check_machine(plan: Plan, group: Group | None = None) -> str:
    """The device ids to use; MachineError (4) when a machine cannot run the plan."""
    require_modules(needed_modules(plan))
    hardware = plan.hardware
    if hardware.num_nodes != (1 if group is None else group.place.num_nodes):
        here = "this is one" if group is None else f"{group.place.num_nodes} take part"
        raise MachineError(
            Problem(
                "several-machines",
                f"{hardware.label} asks for {hardware.num_nodes} machine(s), and {here}",
                hint="name the machines in a file (launch.hostfile), or start the same command on each with "
                "--node-rank and --master-addr, or start it in a Slurm job with srun; --dry-run writes the "
                "bundle, --on names other hardware",
            )
        )
    if group is not None:
        group.members.check(hardware)
    if hardware.is_cpu:
        return ""
    visible = [gpu.index for gpu in probe.visible_gpus()]
    # With a group its check has counted those of this machine, too: one task a device may see its own alone.
    if group is None and len(visible) < hardware.devices_per_node:
        raise MachineError(
            Problem(
                "device-missing",
                f"the plan is for {hardware.label}, this machine shows {len(visible)} GPUs",
                hint="--on names other hardware, --tiny rehearses the recipe on a CPU",
            )
        )
    return ",".join(visible[: hardware.devices_per_node])


def _sample_prompt(loaded: LoadedRecipe) -> str:
    """A prompt for the command that tries the result: code for code data, a word otherwise."""
    first = loaded.recipe.data.train[0]
    return "def fibonacci(n):" if "human_eval" in first.path else "Hello"
