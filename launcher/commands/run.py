"""`run`: plan, write the run directory, train, report."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from launcher.errors import EffilaunchError, Problem, RecipeError, printable
from launcher.execute.attempts import OomAdaptations, as_adapted, read_adapted, run_attempts, with_adapted
from launcher.execute.endings import KnownFailure
from launcher.execute.fewer_nodes import take_seats
from launcher.execute.mirroring import Mirroring, mirror_url, mirrored, run_mirrored
from launcher.execute.nodes import Nodes
from launcher.execute.record import RunRecord
from launcher.execute.remember import remember_run
from launcher.execute.resume import earlier_pace
from launcher.execute.run_dir import run_dirs, written
from launcher.execute.signals import ended_by_signals
from launcher.execute.start_checks import (
    check_disk_space,
    check_free_memory,
    check_machine,
    check_operators,
    holding_nvme,
)
from launcher.execute.start_point import (
    Beginning,
    check_data,
    check_resumption,
    finished_result,
    keep_beginning,
    readable_checkpoint,
    run_place,
    set_newer_aside,
    with_own_folder,
)
from launcher.execute.taking_part import take_part
from launcher.inputs.first_rows import data_problems
from launcher.inputs.planning_facts import find_hardware, gather, usable_cores
from launcher.knowledge.diagnose.patch import edits
from launcher.plan.plan import Plan
from launcher.planner.elastic import plan_on
from launcher.planner.resuming import Resumption
from launcher.recipe.loading import LoadedRecipe, load_recipe
from launcher.render.bundle import Bundle, render
from launcher.report.diagnosis_sections import edit_text
from launcher.report.outcome import Outcome, note
from launcher.report.plan_text import brief_text, plan_text
from launcher.report.result_text import result_text
from launcher.report.run_display import Showing, showing
from launcher.report.run_sections import adaptations
from launcher.report.text import block_lines
from launcher.schedulers.rendezvous import digest_of_request, find_gathering, leading, shared_run_dir
from launcher.schedulers.scheduler import StartRequest
from launcher.tasks import task_named


@ended_by_signals()
def run_command(
    recipe: str,
    *,
    overrides: Sequence[str],
    on: str | None,
    dry_run: bool,
    tiny: bool,
    resume: str | None,
    output_dir: str | None,
    serve: bool = False,
    as_json: bool,
    node_rank: int | None = None,
    master_addr: str | None = None,
    command_line: Sequence[str] = (),
) -> Outcome:
    """Run a recipe, as `run_recipe`; a signal that asks to stop ends it with Interrupted."""
    if serve and dry_run:
        hint = "leave out one of the two; `plan --html` writes a page"
        raise RecipeError(Problem("usage", "--serve excludes --dry-run, which starts nothing", hint=hint))
    return run_recipe(
        load_recipe(recipe, overrides), on=on, dry_run=dry_run, tiny=tiny, resume=resume, serve=serve,
        output_dir=output_dir, as_json=as_json, node_rank=node_rank, master_addr=master_addr,
        command_line=command_line,
    )  # fmt: skip


def run_recipe(
    loaded: LoadedRecipe,
    *,
    on: str | None,
    tiny: bool,
    resume: str | None,
    output_dir: str | None,
    dry_run: bool = False,
    serve: bool = False,
    as_json: bool = False,
    node_rank: int | None = None,
    master_addr: str | None = None,
    command_line: Sequence[str] = (),
) -> Outcome:
    """Plan, write the run directory, train, and return what was measured.

    node_rank, master_addr: set if the user starts every node. command_line: for hints that repeat it.
    """
    alone = "--dry-run" if dry_run else "--tiny" if tiny else ""
    hardware = partial(find_hardware, loaded.recipe, on)
    request = StartRequest(loaded, hardware, note, node_rank, master_addr, command_line, alone)
    gathering = find_gathering(request)
    asked = digest_of_request(loaded, on=on, resume=resume)
    place = run_place(loaded.path, resume, output_dir)
    if gathering is not None:
        folder = shared_run_dir(place.run_dir, place.is_proposed, gathering.place)
        place = replace(place, run_dir=folder, is_proposed=False)
    with showing(as_json=as_json) as shown:
        if gathering is not None and not gathering.place.is_head:
            take_part(gathering.place, place.run_dir, asked, hardware().devices_per_node, shown.say)
            member, node_rank = gathering.place.member, gathering.place.node_rank
            node = {"run_dir": str(place.run_dir), "member": member, "node_rank": node_rank}
            return Outcome(node, "the run has finished")
        with leading(gathering, place.run_dir, asked, shown.say) as nodes:
            if not alone and (absent := data_problems(loaded)):
                raise RecipeError(absent)
            url = None if alone else mirror_url(loaded.recipe.runtime.mirror, place.run_dir)
            own_dirs = partial(run_dirs, str(loaded.path), Path.cwd())
            with mirrored(place, url, own_dirs, shown.say) as (begins, mirroring):
                return _run(
                    loaded, begins, mirroring, nodes, shown,
                    on=on, dry_run=dry_run, tiny=tiny, resume=resume is not None, serve=serve,
                )  # fmt: skip


def _run(
    loaded: LoadedRecipe,
    begins: Beginning,
    mirroring: Mirroring | None,
    nodes: Nodes | None,
    shown: Showing,
    *,
    on: str | None,
    dry_run: bool,
    tiny: bool,
    resume: bool,
    serve: bool,
) -> Outcome:
    say, run_dir = shown.say, begins.run_dir
    planned, facts = gather(loaded, on, tiny=tiny)
    adapted, records = OomAdaptations(), begins.records or run_dir
    if resume:
        adapted, facts = read_adapted(records), replace(facts, pace=earlier_pace(records))
    there = None if dry_run else 1 if nodes is None else nodes.place.num_nodes
    bundle = with_adapted(render(plan_on(as_adapted(planned, adapted, records), facts, there)), adapted)
    if nodes is not None:
        take_seats(bundle.plan, nodes)
    resumption = check_resumption(begins, bundle, say)
    if dry_run:
        return _written_only(begins, bundle, resume=resume)
    if (before := finished_result(begins, bundle, say)) is not None:
        ended = bundle.plan, before
        _, before = run_mirrored(mirroring, begins, bundle.plan, lambda: ended)
        return _outcome(loaded, run_dir, before)
    gpus = check_machine(bundle.plan, nodes)
    check_free_memory(bundle.plan.memory.needed, gpus, say)
    check_disk_space(bundle.plan, run_dir, begins.step)
    check_operators(bundle.plan)
    check_data(begins, bundle, say, shown.look)
    begins = with_own_folder(begins)
    run_dir = begins.run_dir
    looking = shown.looking(run_dir)
    start = partial(
        run_attempts, planned, facts, bundle, run_dir, gpus=gpus, say=say, nodes=nodes,
        looking=looking if mirroring is None else mirroring.looking(looking),
    )  # fmt: skip
    try:
        with _served(run_dir, say) if serve else contextlib.nullcontext() as follow:
            finished, result = _hold_and(start, begins, mirroring, resumption, bundle, adapted, shown, follow)
    except KnownFailure as failure:
        raise with_recipe_lines(failure, loaded.path, run_dir) from failure
    if warning := remember_run(finished, result, facts):
        note(warning)
    return _outcome(loaded, run_dir, result, None if tiny else finished)


def _written_only(begins: Beginning, bundle: Bundle, *, resume: bool) -> Outcome:
    """The run directory of a dry run."""
    begins = with_own_folder(begins)
    run_dir = begins.run_dir
    with written(bundle.files, run_dir, resume=resume):
        keep_beginning(begins, bundle)
    text = plan_text(bundle) + f"\nwrote {printable(str(run_dir))}, nothing was started\n"
    return Outcome({**bundle.to_json(), "run_dir": str(run_dir)}, text)


def _hold_and(
    start: Callable[..., tuple[Plan, dict[str, Any]]],
    begins: Beginning,
    mirroring: Mirroring | None,
    resumption: Resumption,
    bundle: Bundle,
    adapted: OomAdaptations,
    shown: Showing,
    follow: Callable[[], None] | None = None,
) -> tuple[Plan, dict[str, Any]]:
    """Write the run directory and start the run; both are locked until the last process has ended.

    follow: called when there is something to look at.
    """
    from launcher.report.run_pages import REPORT, reported  # a dry run needs none of these

    say = shown.say
    with written(bundle.files, begins.run_dir, resume=begins.chosen is not None):
        if mirroring is not None:
            begins = mirroring.fetch(begins)
        keep_beginning(begins, bundle)
        say(brief_text(bundle, printable(str(begins.run_dir / REPORT)), shown.page))
        if adapted.adaptations:
            lines = block_lines(adaptations(adapted.adaptations))
            say("\n".join(["out of memory before; the run continues with these changes:", *lines, ""]))
        with (
            readable_checkpoint(begins, resumption, say, shown.look) as checkpoint,
            holding_nvme(bundle.plan, say),
        ):
            set_newer_aside(begins, say)
            with reported(begins.run_dir, say):
                if follow is not None:
                    follow()
                return run_mirrored(mirroring, begins, bundle.plan, partial(start, resume=checkpoint))


@contextlib.contextmanager
def _served(run_dir: Path, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """What begins to serve the page of the run, which ends with the block."""
    from launcher.report.live import serving_apart

    with contextlib.ExitStack() as stack:

        def follow() -> None:
            try:
                address = stack.enter_context(serving_apart(run_dir))
            except (EffilaunchError, OSError) as why:  # the run needs no page
                note(f"no page is served: {why}")
            else:
                say(f"following it at {address}")

        yield follow


def _outcome(
    loaded: LoadedRecipe, run_dir: Path, result: dict[str, Any], planned: Plan | None = None
) -> Outcome:
    """What the run measured, and the command that tries the result.

    planned: with whose time that of the steps is compared.
    """
    command: list[str] = []
    task = task_named(loaded.recipe.task)
    if task.reads_tokens:  # not an image
        is_code = "human_eval" in loaded.recipe.data.train[0].path
        texts = ("def fibonacci(n):",) if is_code else task.example_texts
        command = ["effilaunch", "generate", str(run_dir), *texts]
    data = {"run_dir": str(run_dir), "result": result}
    plan = {} if planned is None else {"time": planned.time.to_json(None)}
    record = RunRecord(run_dir.name, "finished", plan, run_dir=str(run_dir), result=result)
    return Outcome(data, result_text(record, command, load=os.getloadavg()[0] / usable_cores()))


def with_recipe_lines(failure: KnownFailure, recipe: Path, run_dir: Path) -> KnownFailure:
    """The failure; its hint names the recipe lines to change, if `diagnose` knows some."""
    changed = edits(str(recipe), recipe.read_text("utf-8"), failure.finding.failure.changes)
    if not changed:
        return failure
    problem = failure.problems[0]
    lines = "; ".join(map(edit_text, changed))
    hint = f"{problem.hint}; `effilaunch diagnose {shlex.quote(str(run_dir))} --apply` changes {lines}"
    return KnownFailure(replace(problem, hint=hint), failure.finding)
