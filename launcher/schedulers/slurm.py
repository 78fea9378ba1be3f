"""Slurm: the jobs of `submit`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from launcher.errors import EffilaunchError, MachineError, Problem, RecipeError
from launcher.machine.bash_syntax import check_shell
from launcher.machine.hardware import Hardware
from launcher.recipe.schema import LaunchSection
from launcher.schedulers.queue import Checked, Ids, PlannedRun, Queue, QueuedJob, Submission, asked
from launcher.schedulers.slurm_check import check_scripts
from launcher.schedulers.slurm_commands import as_job, ask, has_slurm, read_rows, sbatch
from launcher.schedulers.slurm_script import (
    JOB,
    PREPARE,
    check_devices,
    check_warning,
    cpus_of_task,
    render_job,
    render_prepare_job,
    without_limit,
)

_NOT_DATA = ("trainer.", "adapter.", "sharding.", "launch.", "deepspeed.", "fsdp.", "runtime.", "precision")
"""Beginnings of the settings that do not change the prepared data."""


class Slurm(Queue):
    """A cluster on whose login node `sbatch` is installed."""

    name = "slurm"

    def require(self) -> None:
        if not has_slurm():
            message = "`sbatch` is not installed on this machine"
            hint = "run it on a login node of the cluster; --dry-run shows the scripts anywhere"
            raise MachineError(Problem("slurm-missing", message, hint=hint))

    def cpus_per_node(self, launch: LaunchSection, hardware: Hardware) -> int | None:
        return cpus_of_task(launch.slurm, hardware)

    def render(self, job: Submission) -> dict[str, str]:
        prepare = render_prepare_job(job, unlike_data(job.runs))
        return ({PREPARE: prepare} if prepare else {}) | {JOB: render_job(job)}

    def check(self, job: Submission, files: Mapping[str, str], *, dry_run: bool) -> Checked:
        slurm, warnings = job.launch.slurm, []
        setup = check_shell(slurm.setup, "launch.slurm.setup")
        found = [check_warning(job), check_devices(job), setup]
        if job.launch.hostfile is not None:
            hint = "remove it for Slurm: --set launch.hostfile=null"
            message = "names the nodes, which Slurm chooses"
            found.append(Problem("slurm-hostfile", message, path="launch.hostfile", hint=hint))
        if slurm.cpus_per_task is None and not job.hardware.is_cpu and "exclusive" not in slurm.options:
            warnings.append(
                "launch.slurm.cpus_per_task is not set: most clusters then give the task of a node one CPU, "
                "which all its devices share"
            )
        if (unlimited := without_limit(job)) is not None:
            warnings.append(unlimited)
        problems = [problem for problem in found if problem is not None]
        if problems or (dry_run and not has_slurm()):
            return Checked(problems, warnings, unasked="Slurm is not installed on this machine")
        return asked(partial(check_scripts, job, files), warnings, dry_run=dry_run)

    def submit(self, job: Submission, files: Mapping[str, str]) -> Ids:
        prepare = _submit(job.folder / PREPARE) if PREPARE in files else None
        try:
            number = _submit(job.folder / JOB, prepare)
        except EffilaunchError:
            if prepare:
                ask("scancel", prepare)
            raise
        runs = [f"{number}_{index}" for index in range(len(job.runs))] if job.is_sweep else [number]
        return Ids(number, runs, prepare)

    def jobs(self, ids: Sequence[str]) -> Mapping[str, QueuedJob]:
        return {number: as_job(row) for number, row in read_rows(ids).items()}

    def cancel(self, ids: Sequence[str]) -> None:
        answer = ask("scancel", *ids)
        if answer.code != 0:
            raise MachineError(Problem("slurm-no-answer", f"the job cannot be cancelled: {answer.text}"))

    def requeue(self, run_dir: Path, job: str) -> str:
        return _submit(run_dir / JOB)


QUEUE = Slurm()


def unlike_data(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Runs whose data differs according to their plans: the data of each is prepared."""
    found: dict[str, PlannedRun] = {}
    for run in runs:
        decides = {name: run.plan.at(name) for name in run.plan.names if not name.startswith(_NOT_DATA)}
        found.setdefault(repr(sorted(decides.items(), key=lambda item: item[0])), run)
    return list(found.values())


def _submit(script: Path, dependency: str | None = None) -> str:
    """Submit a script; the number of its job. RecipeError where Slurm rejects it."""
    answer = sbatch(script, dependency=dependency)
    number = answer.out.strip().partition(";")[0]
    if answer.code == 0 and re.fullmatch("[0-9]+", number):
        return number
    if answer.code == 124:  # the controller may have accepted it, and been too slow to answer
        message = f"{answer.text}: the job of {script.name} may have been submitted"
        hint = "`squeue --me` shows whether it was; `scancel` removes it"
        raise MachineError(Problem("slurm-no-answer", message, file=str(script), hint=hint))
    kind = MachineError if answer.code == 127 else RecipeError
    message = f"Slurm rejects the job: {answer.text}"
    raise kind(Problem("slurm-refused", message, file=str(script), hint="nothing was submitted"))
