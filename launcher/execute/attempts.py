"""Repeat a failed run: with less memory (`on_oom: adapt`) or unchanged (`launch.max_restarts`).

Attempts follow each other until one finishes, nothing is left to change, or no restart is left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.engines import engine_of
from launcher.errors import MachineError, Problem, RecipeError, RunFailed
from launcher.execute.endings import KnownFailure
from launcher.execute.following import Look, blind
from launcher.execute.nodes.group import Group
from launcher.execute.restarts import FIRST_PAUSE_S, Begun, Restarts, with_restarts
from launcher.execute.run_dir import (
    DISK_FULL,
    UNWRITABLE,
    Record,
    earlier_settings,
    last_step,
    locked,
    read_record,
    with_record,
    write_next_try,
)
from launcher.execute.start import execute, is_prepared
from launcher.execute.supervise import Limits
from launcher.facts import probe
from launcher.facts.software import require_modules
from launcher.plan.inputs import Facts
from launcher.plan.plan import Plan
from launcher.planner.adapting import BY, Adaptation, adapt, is_out_of_memory, moment_of
from launcher.recipe.loading import LoadedRecipe, with_changes
from launcher.render.bundle import Bundle, render


def as_adapted(loaded: LoadedRecipe, record: Record, run_dir: Path) -> LoadedRecipe:
    """The recipe with the settings that earlier attempts of this run adapted.

    Raises RecipeError if the recipe now gives one of them a value that no attempt had.
    """
    tries = earlier_settings(run_dir)
    problems = []
    for key in sorted(record.changes.keys() & loaded.origins.keys()):
        given = _given(loaded, key)
        if given != "auto" and all(settings.get(key) != given for settings in tries):
            problems.append(
                Problem(
                    "resume-differs",
                    f"the run was started with {tries[0].get(key)!r} and, when memory ran out, adapted to "
                    f"{tries[-1].get(key)!r}; the recipe now says {given!r}",
                    path=key,
                    hint="restore the value, or start a new run",
                )
            )
    if problems:
        raise RecipeError(problems)
    return with_changes(loaded, record.changes, BY)


def _given(loaded: LoadedRecipe, dotted: str) -> Any:
    """The value in the recipe."""
    value: Any = loaded.recipe.model_dump()
    for name in dotted.split("."):
        value = value[name]
    return value


def run_attempts(
    loaded: LoadedRecipe,
    facts: Facts,
    bundle: Bundle,
    run_dir: Path,
    *,
    devices: str,
    resume: str | None,
    say: Callable[[str], None],
    limits: Limits | None = None,
    first_pause_s: float = FIRST_PAUSE_S,
    group: Group | None = None,
    looking: Callable[[Plan], Look] = lambda plan: blind,
) -> tuple[Plan, dict[str, Any]]:
    """Execute a written run directory and return the plan that finished and its result.json.

    After an out-of-memory error the next attempt uses less memory (on_oom: adapt); after a failure that may
    be transient it is unchanged (launch.max_restarts). loaded, facts: the input of the first plan, before any
    adaptation. limits, first_pause_s: timeouts. group: the other nodes, which take part in every attempt.
    looking: called as an attempt starts, returns what shows its progress. Raises the errors of `execute`;
    RunFailed lists the attempts; RecipeError if another run uses the directory.
    """
    record, prepare = read_record(run_dir), True
    with locked(run_dir) as lock:
        begun, plan = Begun(run_dir, resume), bundle.plan
        restarts = Restarts(begun, int(plan.launch.max_restarts), say, first_pause_s)
        if group is not None:
            restarts.check = group.raise_if_over
        failed: RunFailed | None = None
        while True:
            try:
                with _beginning_again(failed):
                    result = execute(
                        bundle, run_dir, devices=devices, master_port=probe.free_port(), resume=resume,
                        echo=say, look=looking(bundle.plan), prepare=prepare, limits=limits, lock=lock,
                        group=group,
                    )  # fmt: skip
            except _CannotBeginAgain:
                raise
            except RunFailed as failure:
                if isinstance(failure, KnownFailure) and _ran_out_of_memory(bundle.plan, failure):
                    step = _next(loaded, facts, bundle.plan, failure, record)
                    with _beginning_again(failure):
                        bundle, record, resume = _next_try(begun, step, record, say)
                else:
                    resume = restarts.next(failure)
                failed = failure
                prepare = prepare and not is_prepared(run_dir)  # later attempts use the same samples
            else:
                return bundle.plan, with_restarts(run_dir, bundle.plan, result, restarts.unwritten, say)


class _CannotBeginAgain(RunFailed):
    """The disk prevents the next attempt; names the failure before it."""


@contextlib.contextmanager
def _beginning_again(failure: RunFailed | None) -> Iterator[None]:
    """Add the previous failure to the error if the disk prevents the next attempt."""
    try:
        yield
    except (MachineError, RecipeError) as error:
        problem = error.problems[0]
        if failure is None or problem.code not in (DISK_FULL, UNWRITABLE):
            raise
        before = failure.problems[0].message
        message = f"{problem.message}; so the run could not begin again after this: {before}"
        cure = "make room there" if problem.code == DISK_FULL else "make it writable again"
        hint = f"{cure}; then go on with --resume auto"
        raise _CannotBeginAgain(replace(problem, message=message, hint=hint)) from error


def _ran_out_of_memory(plan: Plan, failure: KnownFailure) -> bool:
    """Whether the failure is out-of-memory and on_oom is adapt."""
    asked = plan.on_oom == "adapt"
    return asked and is_out_of_memory(failure.finding.failure.id, plan.hardware)


def _next(
    loaded: LoadedRecipe, facts: Facts, plan: Plan, failure: KnownFailure, record: Record | None
) -> Adaptation:
    """The next adaptation. Raises RunFailed if none is left."""
    known = failure.finding.failure.id
    calls = {frame.function for frame in failure.finding.error.frames}
    before = {} if record is None else record.changes
    step = adapt(loaded, facts, plan, before=before, moment=moment_of(known, calls))
    if step is None:
        raise _nothing_left(failure, record, "nothing is left to try") from failure
    try:
        require_modules(engine_of(step.plan).packages)
    except MachineError as error:
        left = f"what is left to try cannot be done here: {error.problems[0].message}"
        raise _nothing_left(failure, record, left) from failure
    return step


def _nothing_left(failure: KnownFailure, record: Record | None, left: str) -> RunFailed:
    problem = failure.problems[0]
    done = () if record is None else record.adaptations
    tried = "; ".join(adaptation["reason"] for adaptation in done) or "nothing could be changed"
    return RunFailed(
        Problem(
            problem.code,
            f"{problem.message.rstrip('.')}. on_oom: adapt: {left}. Tried: {tried}",
            file=problem.file,
            hint="lower data.max_length, use an adapter or model.quantization, or devices with more memory",
        )
    )


def _next_try(
    begun: Begun, step: Adaptation, record: Record | None, say: Callable[[str], None]
) -> tuple[Bundle, Record, str | None]:
    """Write the next attempt into the run directory and print what changes.

    Returns its bundle, the record, and the checkpoint to resume.
    """
    run_dir = begun.run_dir
    reached = last_step(run_dir)
    goes_on, begins, words = begun.resumes()
    had_any = goes_on is not None
    if not step.keeps_checkpoints:
        goes_on, begins, words = None, 0, []
        begun.anew()
    entry: Mapping[str, Any] = {
        "step": reached,
        "resumed_from": begins,
        "changed": {key: list(values) for key, values in step.changed.items()},
        "reason": step.reason,
    }
    done = () if record is None else record.adaptations
    record = Record(step.changes, (*done, entry))
    bundle = with_record(render(step.plan), record)
    aside = write_next_try(bundle, run_dir, keeps_checkpoints=step.keeps_checkpoints)
    say(f"\non_oom: adapt: {step.reason}")
    for key, (old, new) in step.changed.items():
        say(f"  {key}: {old} -> {new}")
    for line in words:
        say(f"  {line}")
    say(f"  {_beginning(begins, reached, step.unreadable if had_any else '', aside)}\n")
    return bundle, record, goes_on


def _beginning(begins: int, reached: int, unreadable: str, aside: str | None) -> str:
    """Where the next attempt starts, and the steps that are lost."""
    if begins:
        again = f"; {_steps(reached - begins)} done again" if reached > begins else ""
        return f"goes on from the checkpoint of step {begins}{again}"
    if unreadable:
        kept = f"; they stay in {aside}" if aside else ""
        return f"starts again at step 0, {_steps(reached)} lost: of the checkpoints, {unreadable}{kept}"
    lost = f", {_steps(reached)} lost: no checkpoint was saved yet" if reached else ""
    return f"starts again at step 0{lost}"


def _steps(count: int) -> str:
    return f"{count} step is" if count == 1 else f"{count} steps are"
