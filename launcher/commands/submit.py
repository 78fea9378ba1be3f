"""`submit`: a recipe as jobs of a cluster: checked, submitted, followed."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from launcher.errors import (
    DoesNotFit,
    EffilaunchError,
    Interrupted,
    MachineError,
    Problem,
    RecipeError,
    RunFailed,
)
from launcher.execute.record import RunRecord, total_seconds
from launcher.execute.run_dir import MARKER, SUBMITTED, claimed, default_run_dir, unwritable, write_run_dir
from launcher.execute.start_checks import check_disk_space
from launcher.files.safe_files import read_jsonl, write_text
from launcher.inputs.first_rows import data_problems
from launcher.inputs.planning_facts import find_hardware, gather
from launcher.machine.hardware import Hardware
from launcher.plan.draft import Draft
from launcher.planner.elastic import plan_on
from launcher.recipe.loading import LoadedRecipe, load_recipe, local_paths
from launcher.recipe.sweep import Values, combine, folder_name, refuse_same, shown, swept_overrides
from launcher.recipe.yaml_writer import snapshot
from launcher.render.bundle import Bundle, render
from launcher.report.outcome import Outcome, echo, note
from launcher.report.plan_text import brief_text, plan_text
from launcher.report.result_text import (
    cancelled_text,
    dry_run_text,
    result_text,
    submitted_text,
    sweep_text,
)
from launcher.schedulers import queue_named
from launcher.schedulers.following import follow, judge
from launcher.schedulers.queue import Checked, PlannedRun, Queue, QueuedJob, Submission
from launcher.schedulers.submitted import RECORD, SWEEP, Submitted, SubmittedRun, read_submitted

Say = Callable[[str], None]


@dataclass(frozen=True)
class Configuration:
    """One run of a submission, before anything is written."""

    values: Values
    """What the sweep sets; empty for a single run."""
    loaded: LoadedRecipe
    bundle: Bundle
    hardware: Hardware
    """What its job asks for."""
    run_dir: Path

    @cached_property
    def run(self) -> PlannedRun:
        text = snapshot(self.loaded, self.hardware)
        return PlannedRun(self.run_dir, self.bundle.plan, self.values, text, local_paths(self.loaded))


def submit_command(
    target: str,
    overrides: Sequence[str],
    *,
    to: str,
    on: str | None,
    sweeps: Sequence[str],
    dry_run: bool,
    tiny: bool,
    output_dir: str | None,
    detach: bool,
    follow: bool,
    cancel: bool,
    requeue: bool,
    as_json: bool,
) -> Outcome:
    """Submit a recipe, and follow it unless `detach`; or follow, cancel or requeue what was submitted."""
    say = note if as_json else echo
    if follow or cancel or requeue:
        submitted = read_submitted(Path(target).absolute())
        if requeue:
            return requeue_submitted(submitted)
        return cancel_submitted(submitted) if cancel else follow_submitted(submitted, say)
    queue = queue_named(to)
    _refuse_run_dir(Path(target))
    if not dry_run:
        queue.require()
    recipe = load_recipe(target, overrides).path
    with _own_folder(str(recipe), output_dir, dry_run=dry_run) as folder:
        configure = partial(_configuration, queue, target, overrides, on, tiny=tiny, dry_run=dry_run)
        found = _configurations(configure, combine(sweeps), folder)
        loaded, job = found[0].loaded, _submission(found, folder, tiny)
        files = queue.render(job)
        checked = queue.check(job, files, dry_run=dry_run)
        _report(checked, loaded)
        if dry_run:
            data = {"folder": str(folder), "files": _all_files(found, folder, files)}
            return Outcome(data, dry_run_text(plan_text(found[0].bundle), files, checked.answers))
        say(brief_text(found[0].bundle, "`--dry-run` prints it whole, with the job's files"))
        for line in checked.answers:
            say(line)
        _write(queue, found, job, files)
        submitted = _submit(queue, job, str(loaded.path.absolute()), files)
    say(submitted_text(submitted))
    if detach:
        return Outcome(submitted.to_json(), "")
    return follow_submitted(submitted, say)


def _submit(queue: Queue, job: Submission, recipe: str, files: Mapping[str, str]) -> Submitted:
    """Submit the files and write the record. After an error no job is queued."""
    ids = queue.submit(job, files)
    try:
        submitted = Submitted(job.folder, recipe, ids.prepare, ids.job, (), queue.name)
        runs = tuple(
            SubmittedRun(run.run_dir, number, submitted.log(number, job.folder), run.values)
            for run, number in zip(job.runs, ids.runs, strict=True)
        )
        submitted = replace(submitted, runs=runs)
        submitted.write()
    except EffilaunchError:
        queue.cancel([*([ids.prepare] if ids.prepare else []), *ids.runs])
        raise
    return submitted


@contextlib.contextmanager
def _own_folder(recipe: str, output_dir: str | None, *, dry_run: bool) -> Iterator[Path]:
    """The folder of this submission alone; removed at the end where it is empty."""
    folder = (Path(output_dir) if output_dir else default_run_dir(recipe, Path.cwd())).absolute()
    if output_dir or dry_run:
        yield folder
        return
    folder = claimed(folder)
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # the first that is not empty ends it
            for made in (folder, folder.parent, folder.parent.parent):
                made.rmdir()


def _refuse_run_dir(target: Path) -> None:
    if any((target / name).is_file() for name in (RECORD, SWEEP)):
        message = f"a job was submitted from {target} already"
        hint = "--follow follows it, --cancel ends it, --requeue resumes its run"
        raise RecipeError(Problem("already-submitted", message, hint=hint))


def _configurations(
    configure: Callable[[Values, Path], Configuration], sweep: Sequence[Values], folder: Path
) -> list[Configuration]:
    """All runs, planned; the problems of all of them at once."""
    found: list[Configuration] = []
    errors: list[tuple[Values, EffilaunchError]] = []
    for index, values in enumerate(sweep):
        run_dir = folder / folder_name(index, values, len(sweep)) if values else folder
        try:
            found.append(configure(values, run_dir))
        except (RecipeError, DoesNotFit) as error:
            errors.append((values, error))
    if errors:
        raise _all_at_once(errors)
    _check_sizes(found)
    refuse_same((c.values, c.loaded.recipe.model_dump()) for c in found)
    return found


def _configuration(
    queue: Queue,
    target: str,
    overrides: Sequence[str],
    on: str | None,
    values: Values,
    run_dir: Path,
    *,
    tiny: bool,
    dry_run: bool,
) -> Configuration:
    loaded = load_recipe(target, overrides, swept_overrides(values))
    if refused := [p for p in loaded.of_jobs if (p.path or "").startswith(f"launch.{queue.name}.")]:
        raise RecipeError(refused)
    if queue.shares_files and not (dry_run or tiny) and (absent := data_problems(loaded)):
        raise RecipeError(absent)
    if on is None and loaded.recipe.hardware is None:
        hint = "write --on, e.g. --on 2x8xA100-80GB, or `hardware:` in the recipe"
        message = "the hardware of the job must be set: it is not that of this machine"
        raise RecipeError(Problem("submit-hardware", message, file=str(loaded.path), hint=hint))
    hardware = find_hardware(loaded.recipe, on)
    planned, facts = gather(loaded, on, tiny=tiny)
    if cpus := queue.cpus_per_node(loaded.recipe.launch, facts.hardware):
        # Those of the job, not of this machine.
        facts = replace(facts, cpu_cores=cpus, processor=None)
    bundle = render(plan_on(planned, facts))
    if tiny:  # a rehearsal uses one node, with the devices that it finds there
        hardware = replace(hardware, num_nodes=1)
    if queue.shares_files and not dry_run:
        check_disk_space(bundle.plan, run_dir)
    return Configuration(values, loaded, bundle, hardware, run_dir)


def _all_at_once(errors: Sequence[tuple[Values, EffilaunchError]]) -> EffilaunchError:
    """The problems of all configurations; those that all have once, the others with their values."""
    if len(errors) == 1 and not errors[0][0]:
        return errors[0][1]
    problems: dict[Problem, list[Values]] = {}
    for values, error in errors:
        for problem in error.problems:
            problems.setdefault(problem, []).append(values)
    every = [
        problem
        if len(holders) == len(errors) > 1
        else replace(problem, message=f"with {' or '.join(map(shown, holders))}: {problem.message}")
        for problem, holders in problems.items()
    ]
    first = errors[0][1]
    if isinstance(first, DoesNotFit) and not any(isinstance(error, RecipeError) for _, error in errors):
        return DoesNotFit(every, first.nearest_miss)
    return RecipeError(every)


def _check_sizes(found: Sequence[Configuration]) -> None:
    sizes = {c.hardware.label for c in found}
    launch = {repr(c.loaded.recipe.launch) for c in found}
    message = "the runs of a sweep are one array, whose jobs are equal"
    if len(sizes) > 1:
        message, hint = f"{message}: this one needs {', '.join(sorted(sizes))}", "submit each size separately"
        raise RecipeError(Problem("sweep-sizes", message, path="hardware", hint=hint))
    if len(launch) > 1:
        raise RecipeError(Problem("sweep-sizes", message, path="launch", hint="sweep another key"))


def _submission(found: Sequence[Configuration], folder: Path, tiny: bool) -> Submission:
    first = found[0]
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", first.loaded.path.stem).strip("-") or "effilaunch"
    launch, runs = first.loaded.recipe.launch, tuple(c.run for c in found)
    return Submission(stem, sys.executable, str(Path.cwd()), folder, first.hardware, launch, runs, tiny)


def _report(checked: Checked, loaded: LoadedRecipe) -> None:
    """Print the warnings; RecipeError with the problems, each with its line of the recipe."""
    for warning in checked.warnings:
        note(warning)
    if checked.problems:
        raise RecipeError(list(dict.fromkeys(_placed(problem, loaded) for problem in checked.problems)))
    if checked.unasked:
        note(f"{checked.unasked}: the job files were not checked by the scheduler")


def _placed(problem: Problem, loaded: LoadedRecipe) -> Problem:
    """The problem with the line of its key, or of the nearest section around it."""
    draft = Draft(loaded.origins)
    path = problem.path or ""
    while path and draft.origin(path) is None:
        path = path.rpartition(".")[0]
    file, line = draft.place(path) if path else (None, None)
    return replace(problem, file=file or str(loaded.path), line=line)


def _all_files(found: Sequence[Configuration], folder: Path, files: Mapping[str, str]) -> dict[str, str]:
    """Every file that a submission writes, relative to its folder."""
    written = dict(files)
    for c in found:
        place = "" if c.run_dir == folder else f"{c.run_dir.name}/"
        written |= {f"{place}{name}": text for name, text in c.bundle.files.items()}
        written[f"{place}{SUBMITTED}"] = c.run.snapshot
    return written


def _write(queue: Queue, found: Sequence[Configuration], job: Submission, files: Mapping[str, str]) -> None:
    """Write everything that the jobs need. RecipeError where something is in the folder already."""
    folder = job.folder
    if job.is_sweep and folder.exists() and any(folder.iterdir()):
        hint = "name another --output-dir"
        raise RecipeError(Problem("run-dir-not-empty", f"the folder {folder} is not empty", hint=hint))
    for c in found:
        write_run_dir(c.bundle, c.run_dir, resume=False)
    try:
        (folder / "logs").mkdir(exist_ok=True)
        for name, text in files.items():
            write_text(folder / name, text)
        for run in job.runs:
            write_text(run.run_dir / SUBMITTED, run.snapshot)
            # To start one run of a sweep again alone.
            for name, text in queue.render(job.alone(run)).items() if job.is_sweep else ():
                write_text(run.run_dir / name, text)
    except OSError as error:
        raise unwritable(folder, error) from error


def requeue_submitted(submitted: Submitted) -> Outcome:
    """Start the runs again that have not finished and whose jobs have ended; they resume."""
    queue = queue_named(submitted.to)
    jobs = queue.jobs([run.job for run in submitted.runs])
    done = {number for number, job in jobs.items() if job.phase == "done"}
    left = [run for run in submitted.runs if not (run.job in done or (run.run_dir / MARKER).is_file())]
    queued = [run.job for run in left if run.job in jobs and not jobs[run.job].has_ended]
    if not left or queued:
        code, message = ("still-queued", f"job {', '.join(queued)} has not ended")
        if not left:
            code, message = ("already-done", "every run has finished")
        hint = "--follow follows it, --cancel ends it" if queued else "--follow shows the results"
        raise RecipeError(Problem(code, message, file=str(submitted.place), hint=hint))
    whole = read_submitted(submitted.folder) if submitted.is_part else submitted
    again = whole.requeued({run.job: queue.requeue(run.run_dir, run.job) for run in left})
    again.write()
    return Outcome(again.to_json(), submitted_text(again))


def cancel_submitted(submitted: Submitted) -> Outcome:
    """Remove the jobs from the queue, or end them, without a requeue. Of one run of a sweep its own job."""
    queue = queue_named(submitted.to)
    queue.cancel(submitted.own_jobs)
    try:
        states = {number: job.state for number, job in queue.jobs(submitted.jobs).items()}
    except MachineError:  # the jobs are cancelled nevertheless
        states = {}
    return Outcome({**submitted.to_json(), "states": states}, cancelled_text(submitted))


def follow_submitted(submitted: Submitted, say: Say) -> Outcome:
    """Follow to the end; the result of the run, or the table of the sweep. Raises as `run` does."""
    try:
        jobs = follow(queue_named(submitted.to), submitted, say)
    except KeyboardInterrupt:
        message = f"job {submitted.job} is no longer followed; it continues"
        hint = f"`effilaunch submit {submitted.place} --follow` follows it again, `--cancel` ends it"
        raise Interrupted(Problem("interrupted", message, hint=hint)) from None
    if submitted.is_sweep:
        return _sweep(submitted, jobs)
    (run,) = submitted.runs
    result = judge(queue_named(submitted.to), submitted, run, jobs)
    data = {"run_dir": str(run.run_dir), **submitted.to_json(), "result": result}
    record = RunRecord(run.run_dir.name, "finished", {}, run_dir=str(run.run_dir), result=result)
    return Outcome(data, result_text(record, []))


def _sweep(submitted: Submitted, jobs: Mapping[str, QueuedJob | None]) -> Outcome:
    """A row for each run, and the problems of those that did not finish."""
    rows, found = zip(*(_row(submitted, run, jobs) for run in submitted.runs), strict=True)
    problems = [problem for problem in found if problem is not None]
    code = RunFailed.exit_code if problems else 0
    return Outcome({**submitted.to_json(), "table": rows}, sweep_text(submitted, rows), problems, code)


def _row(
    submitted: Submitted, run: SubmittedRun, jobs: Mapping[str, QueuedJob | None]
) -> tuple[dict[str, Any], Problem | None]:
    metrics = read_jsonl(run.run_dir / "metrics.jsonl")
    row: dict[str, Any] = {
        "run_dir": str(run.run_dir),
        "job": run.job,
        "values": dict(run.values),
        "state": "done",
        "loss": _last(metrics, "loss"),
        "eval_loss": _last(metrics, "eval_loss"),
        "seconds": None,
    }
    try:
        result = judge(queue_named(submitted.to), submitted, run, jobs)
    except EffilaunchError as error:
        job = jobs.get(run.job)
        row["state"] = "gone" if job is None else job.text
        problem = error.problems[0]
        message = f"run {run.run_dir.name}: {problem.message}"
        return row, Problem(problem.code, message, problem.file, hint=problem.hint)
    row |= {"loss": result["loss"]["last"], "seconds": total_seconds(result) or result["seconds"]}
    row["eval_loss"] = (result.get("eval") or {}).get("eval_loss", row["eval_loss"])
    return row, None


def _last(rows: list[dict[str, Any]], name: str) -> float | None:
    found = [row[name] for row in rows if isinstance(row.get(name), (int, float))]
    return float(found[-1]) if found else None
