"""`submit`: a recipe as jobs of a Slurm, checked before they wait in a queue, submitted and followed."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.commands.checking_queue import check_queue, placed
from launcher.commands.first_rows import data_problems
from launcher.commands.following import cancel_command, follow_command, follow_submitted
from launcher.commands.gather import find_hardware, gather
from launcher.commands.room import check_room
from launcher.commands.sweeping import Values, combine, folder_name, refuse_same, said, swept_overrides
from launcher.errors import DoesNotFit, EffilaunchError, MachineError, Problem, RecipeError
from launcher.execute.run_dir import claimed, default_run_dir, unwritable, write_run_dir
from launcher.execute.submit import RECORD, SWEEP, Submitted, submit_scripts
from launcher.facts.atomic_writes import write_text
from launcher.facts.hardware import Hardware
from launcher.facts.queue import has_slurm
from launcher.facts.shell import check_shell
from launcher.plan.planner import make_plan
from launcher.recipe.loading import LoadedRecipe, load_recipe
from launcher.recipe.snapshot import snapshot
from launcher.render.bundle import Bundle, render
from launcher.render.slurm import (
    JOB,
    PREPARE,
    SUBMITTED,
    Submission,
    check_devices,
    check_warning,
    cpus_of_task,
    render_array,
    render_job,
    render_prepare_job,
    warning_seconds,
)
from launcher.report.outcome import Outcome, echo, note
from launcher.report.submit_text import dry_run_text, submitted_text
from launcher.report.text import plan_text


@dataclass(frozen=True, slots=True)
class Configuration:
    """One run of a submission, before anything is written."""

    values: Values
    """What the sweep sets; empty for a single run."""
    loaded: LoadedRecipe
    bundle: Bundle
    hardware: Hardware
    """What its job asks for."""
    run_dir: Path


def submit_command(
    target: str,
    overrides: Sequence[str],
    *,
    on: str | None,
    sweeps: Sequence[str],
    dry_run: bool,
    tiny: bool,
    output_dir: str | None,
    detach: bool,
    follow: bool,
    cancel: bool,
    as_json: bool,
) -> Outcome:
    """Submit a recipe, and follow it unless `detach`; or follow or cancel what was submitted before."""
    say = note if as_json else echo
    if follow or cancel:
        return cancel_command(target) if cancel else follow_command(target, say)
    _refuse_run_dir(Path(target))
    if not dry_run:
        _require_slurm()
    recipe = load_recipe(target, overrides).path
    with _own_folder(str(recipe), output_dir, dry_run=dry_run) as folder:
        configurations = _configurations(target, overrides, on, sweeps, tiny, folder, dry_run=dry_run)
        job = _submission(configurations[0], tiny)
        for warning in _warnings(job):
            note(warning)
        scripts = _scripts(job, configurations, folder)
        _check_job(job, configurations)
        heard = _ask_slurm(configurations[0].loaded, job, scripts, dry_run=dry_run)
        files = _files(configurations, folder, scripts)
        if dry_run:
            data = {"folder": str(folder), "files": files}
            return Outcome(data, dry_run_text(configurations[0].bundle, scripts, heard))
        say(plan_text(configurations[0].bundle))
        for line in heard:
            say(line)
        submitted = _submit(configurations, folder, scripts, tiny=tiny)
    say(submitted_text(submitted))
    if detach:
        return Outcome({"folder": str(folder), **submitted.to_json()}, "")
    return follow_submitted(submitted, say)


@contextlib.contextmanager
def _own_folder(recipe: str, output_dir: str | None, *, dry_run: bool) -> Iterator[Path]:
    """The folder of a submission, which no other one gets; gone again where nothing came to lie in it."""
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
        hint = f"--follow follows it, --cancel ends it; `sbatch {target / JOB}` starts it again by hand"
        raise RecipeError(Problem("already-submitted", message, hint=hint))


def _require_slurm() -> None:
    if not has_slurm():
        hint = "run it on a login node of the cluster; --dry-run shows the scripts anywhere"
        raise MachineError(Problem("slurm-missing", "no `sbatch` is on this machine", hint=hint))


def _configurations(
    target: str,
    overrides: Sequence[str],
    on: str | None,
    sweeps: Sequence[str],
    tiny: bool,
    folder: Path,
    *,
    dry_run: bool,
) -> list[Configuration]:
    """All runs, planned; the problems of all of them at once."""
    found: list[Configuration] = []
    errors: list[tuple[Values, EffilaunchError]] = []
    every = combine(sweeps)
    for index, values in enumerate(every):
        run_dir = folder / folder_name(index, values, len(every)) if values else folder
        try:
            found.append(_configuration(target, overrides, on, values, run_dir, tiny, dry_run=dry_run))
        except (RecipeError, DoesNotFit) as error:
            errors.append((values, error))
    if errors:
        raise _all_at_once(errors)
    _check_sizes(found)
    refuse_same((c.values, c.loaded.recipe.model_dump()) for c in found)
    return found


def _configuration(
    target: str,
    overrides: Sequence[str],
    on: str | None,
    values: Values,
    run_dir: Path,
    tiny: bool,
    *,
    dry_run: bool,
) -> Configuration:
    loaded = load_recipe(target, overrides, swept_overrides(values))
    absent = [] if dry_run or tiny else data_problems(loaded)
    if absent:
        raise RecipeError(absent)
    if on is None and loaded.recipe.hardware is None:
        hint = "write --on, e.g. --on 2x8xA100-80GB, or `hardware:` in the recipe"
        message = "a job needs to know its hardware, which this machine does not say"
        raise RecipeError(Problem("submit-hardware", message, file=str(loaded.path), hint=hint))
    hardware = find_hardware(loaded.recipe, on)
    planned, facts = gather(loaded, on, tiny=tiny)
    if cpus := cpus_of_task(loaded.recipe.launch.slurm, facts.hardware):
        # What the job has, and not this machine.
        facts = replace(facts, cpu_cores=cpus, processor=None)
    bundle = render(make_plan(planned, facts))
    if tiny:  # a rehearsal takes one node, and finds its devices there
        hardware = replace(hardware, num_nodes=1)
    if not dry_run:
        check_room(bundle.plan, run_dir)
    return Configuration(values, loaded, bundle, hardware, run_dir)


def _all_at_once(errors: Sequence[tuple[Values, EffilaunchError]]) -> EffilaunchError:
    """The problems of all configurations; what several have in common once, else with their values."""
    if len(errors) == 1 and not errors[0][0]:
        return errors[0][1]
    problems: dict[Problem, list[Values]] = {}
    for values, error in errors:
        for problem in error.problems:
            problems.setdefault(problem, []).append(values)
    told = [
        problem
        if len(holders) == len(errors) > 1
        else replace(problem, message=f"with {' or '.join(map(said, holders))}: {problem.message}")
        for problem, holders in problems.items()
    ]
    wrong = any(isinstance(error, RecipeError) for _, error in errors)
    return RecipeError(told) if wrong else DoesNotFit(told, errors[0][1].nearest_miss)  # type: ignore[attr-defined]


def _check_sizes(found: Sequence[Configuration]) -> None:
    sizes = {c.hardware.label for c in found}
    slurm = {repr(c.loaded.recipe.launch.slurm) for c in found}
    if len(sizes) > 1:
        alike = "the runs of a sweep are one array, whose jobs are alike"
        message = f"{alike}: this one needs {', '.join(sorted(sizes))}"
        hint = "submit each size on its own"
        raise RecipeError(Problem("sweep-sizes", message, path="hardware", hint=hint))
    if len(slurm) > 1:
        message = "the runs of a sweep are one array, whose jobs are alike"
        raise RecipeError(Problem("sweep-sizes", message, path="launch.slurm", hint="sweep another key"))


def _submission(first: Configuration, tiny: bool) -> Submission:
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", first.loaded.path.stem).strip("-") or "effilaunch"
    return Submission(
        stem, sys.executable, str(Path.cwd()), first.hardware, first.loaded.recipe.launch.slurm, tiny
    )


def _warnings(job: Submission) -> list[str]:
    if job.slurm.cpus_per_task is None and not job.hardware.is_cpu and "exclusive" not in job.slurm.options:
        return [
            "launch.slurm.cpus_per_task is not given: most Slurms then give a node's task one CPU, which "
            "all its devices share"
        ]
    return []


def _scripts(job: Submission, configurations: Sequence[Configuration], folder: Path) -> dict[str, str]:
    """Name -> text; the one that prepares first."""
    run_dirs = [str(c.run_dir) for c in configurations]
    longest = max((c.bundle.plan for c in configurations), key=warning_seconds)
    scripts: dict[str, str] = {}
    prepare = render_prepare_job(job, str(folder), _unlike_data(configurations))
    if prepare is not None:
        scripts[PREPARE] = prepare
    if configurations[0].values:
        scripts[JOB] = render_array(job, longest, str(folder), run_dirs)
    else:
        scripts[JOB] = render_job(job, longest, run_dirs[0])
    return scripts


def _unlike_data(configurations: Sequence[Configuration]) -> list[str]:
    """Run directories whose data differs, as far as the recipe says: one of each kind is prepared."""
    found: dict[str, str] = {}
    for c in configurations:
        plan = c.bundle.plan
        decides = {name: plan.at(name) for name in plan.names if not name.startswith(_NOT_DATA)}
        found.setdefault(repr(sorted(decides.items(), key=lambda item: item[0])), str(c.run_dir))
    return list(found.values())


_NOT_DATA = ("trainer.", "adapter.", "sharding.", "launch.", "deepspeed.", "fsdp.", "runtime.", "precision")


def _check_job(job: Submission, configurations: Sequence[Configuration]) -> None:
    longest = max((c.bundle.plan for c in configurations), key=warning_seconds)
    loaded = configurations[0].loaded
    setup = check_shell(job.slurm.setup, "launch.slurm.setup")
    found = [check_warning(job, longest), check_devices(job), setup]
    if loaded.recipe.launch.hostfile is not None:
        hint = "take it away for Slurm: --set launch.hostfile=null"
        message = "names the machines, which Slurm chooses"
        found.append(Problem("slurm-hostfile", message, path="launch.hostfile", hint=hint))
    if problems := [placed(problem, loaded) for problem in found if problem is not None]:
        raise RecipeError(problems)


def _ask_slurm(
    loaded: LoadedRecipe, job: Submission, scripts: Mapping[str, str], *, dry_run: bool
) -> list[str]:
    """What Slurm says of the scripts; a dry run does without one, and tells so."""
    if dry_run and not has_slurm():
        note("no Slurm is on this machine: its own checks of the job scripts were not made")
        return []
    try:
        problems, heard = check_queue(loaded, job, list(scripts.items()))
    except MachineError as error:
        if not dry_run:
            raise
        note(f"{error.problems[0].message}: its own checks of the job scripts were not made")
        return []
    if problems:
        raise RecipeError(problems)
    return heard


def _files(
    configurations: Sequence[Configuration], folder: Path, scripts: Mapping[str, str]
) -> dict[str, str]:
    """Every file that a submission writes, relative to its folder."""
    files = dict(scripts)
    for c in configurations:
        place = "" if c.run_dir == folder else f"{c.run_dir.name}/"
        files |= {f"{place}{name}": text for name, text in c.bundle.files.items()}
        files[f"{place}{SUBMITTED}"] = snapshot(c.loaded, c.hardware)
    return files


def _submit(
    configurations: Sequence[Configuration], folder: Path, scripts: Mapping[str, str], *, tiny: bool
) -> Submitted:
    """Write all that the jobs need, and submit them. Never into a folder in which something lies."""
    if configurations[0].values and folder.exists() and any(folder.iterdir()):
        hint = "name another --output-dir"
        raise RecipeError(Problem("run-dir-not-empty", f"the folder {folder} is not empty", hint=hint))
    for c in configurations:
        write_run_dir(c.bundle, c.run_dir, resume=False)
    try:
        (folder / "logs").mkdir(exist_ok=True)
        for name, text in scripts.items():
            write_text(folder / name, text)
        for c in configurations:
            write_text(c.run_dir / SUBMITTED, snapshot(c.loaded, c.hardware))
            if c.values:  # to start one of them again by hand
                write_text(c.run_dir / JOB, render_job(_submission(c, tiny), c.bundle.plan, str(c.run_dir)))
    except OSError as error:
        raise unwritable(folder, error) from error
    prepare = folder / PREPARE if PREPARE in scripts else None
    values: list[Mapping[str, Any]] = [c.values for c in configurations if c.values]
    run_dirs = [c.run_dir for c in configurations]
    return submit_scripts(
        folder, (prepare, folder / JOB), str(configurations[0].loaded.path.absolute()), run_dirs, values
    )
