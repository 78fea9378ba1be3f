"""`on_oom: adapt` in a run: one try after the other, until one finishes or nothing is left to change."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import MachineError, Problem, RecipeError, RunFailed
from launcher.execute.adapted import (
    Record,
    checkpoints_of,
    earlier_settings,
    last_step,
    read_record,
    with_record,
    write_next_try,
)
from launcher.execute.failed import KnownFailure
from launcher.execute.local import execute
from launcher.facts import probe
from launcher.facts.software import require_modules
from launcher.plan.adapting import BY, Adaptation, adapt, is_out_of_memory, moment_of
from launcher.plan.inputs import Facts
from launcher.plan.plan import Plan
from launcher.recipe.changes import with_changes
from launcher.recipe.loading import LoadedRecipe
from launcher.render.bundle import Bundle, render


def as_adapted(loaded: LoadedRecipe, record: Record, run_dir: Path) -> LoadedRecipe:
    """The recipe with what earlier tries of this run have adapted.

    RecipeError when the recipe now gives one of those settings a value that no try had.
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
    """What the recipe says."""
    value: Any = loaded.recipe.model_dump()
    for name in dotted.split("."):
        value = value[name]
    return value


def run_tries(
    loaded: LoadedRecipe,
    facts: Facts,
    bundle: Bundle,
    run_dir: Path,
    *,
    devices: str,
    resume: str | None,
    say: Callable[[str], None],
) -> tuple[Plan, dict[str, Any]]:
    """Execute a written run directory; the plan that finished, and its result.json.

    loaded, facts: what the first plan was made from, before anything was adapted. Raises as `execute`; after
    tries the RunFailed says what was tried.
    """
    record = read_record(run_dir)
    prepare = True
    while True:
        started = time.time()
        try:
            result = execute(
                bundle,
                run_dir,
                devices=devices,
                master_port=probe.free_port(),
                resume=resume,
                echo=say,
                prepare=prepare,
            )
        except KnownFailure as failure:
            step = _next(loaded, facts, bundle.plan, failure, record)
            bundle, record, resume = _next_try(run_dir, step, record, resume, started, say)
            prepare = False  # nothing that is adapted changes the samples
        else:
            return bundle.plan, result


def _next(
    loaded: LoadedRecipe, facts: Facts, plan: Plan, failure: KnownFailure, record: Record | None
) -> Adaptation:
    """What to try next; the failure itself where adapting cannot mend it, or is not asked for."""
    known = failure.finding.failure.id
    if plan.value("on_oom") != "adapt" or not is_out_of_memory(known, plan.hardware):
        raise failure
    calls = {frame.function for frame in failure.finding.error.frames}
    before = {} if record is None else record.changes
    step = adapt(loaded, facts, plan, before=before, moment=moment_of(known, calls))
    if step is None:
        raise _nothing_left(failure, record, "nothing is left to try") from failure
    try:
        if step.plan.value("sharding.engine") == "deepspeed":
            require_modules(["deepspeed"])
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
    run_dir: Path,
    step: Adaptation,
    record: Record | None,
    resume: str | None,
    started: float,
    say: Callable[[str], None],
) -> tuple[Bundle, Record, str | None]:
    """Write the next try into the run directory and say what changes.

    resume: what the failed try was told to continue; started: when it began (epoch, s). Returns the bundle of
    the next one, the record, and what it is told to continue.
    """
    reached = last_step(run_dir)
    whole = checkpoints_of(run_dir)
    goes_on = None
    if step.keeps_checkpoints:
        goes_on = _continue(run_dir, resume, started)
    begins = _step_of(goes_on, whole)
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
    say(f"  {_beginning(begins, reached, step.unreadable if whole or resume else '', aside)}\n")
    return bundle, record, goes_on


def _continue(run_dir: Path, resume: str | None, started: float) -> str | None:
    """What the next try continues: the last complete checkpoint, of this start where the user named one."""
    if resume is None or resume == "auto":
        return "auto" if checkpoints_of(run_dir) else None
    written = checkpoints_of(run_dir, since=started)
    return str(written[max(written)]) if written else resume


def _step_of(goes_on: str | None, whole: Mapping[int, Path]) -> int:
    if goes_on is None:
        return 0
    if goes_on == "auto":
        return max(whole)
    number = Path(goes_on).name.rpartition("-")[2]
    return int(number) if number.isdigit() else 0


def _beginning(begins: int, reached: int, unreadable: str, aside: str | None) -> str:
    """Where the next try begins and what is lost by that."""
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
