"""Slurm: runs as the tasks of a step of `srun`, and the jobs of `submit`."""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.errors import EffilaunchError, MachineError, Problem, RecipeError
from launcher.facts.bash_syntax import check_shell
from launcher.facts.hardware import Hardware
from launcher.recipe.schema import LaunchSection
from launcher.schedulers.rendezvous import Gathering, Request
from launcher.schedulers.scheduler import PlannedRun, Queue, Submission
from launcher.schedulers.slurm_allocation import (
    forgotten_srun,
    place_in,
    read_allocation,
    runs_alone,
    wrong_tasks,
)
from launcher.schedulers.slurm_queue import Job, ask, check_queue, has_slurm, node_address, read_jobs, submit
from launcher.schedulers.slurm_script import (
    JOB,
    PREPARE,
    check_devices,
    check_warning,
    cpus_of_task,
    render_array,
    render_job,
    render_prepare_job,
    warning_seconds,
)
from launcher.schedulers.submitted import Run, Submitted

_NOT_DATA = ("trainer.", "adapter.", "sharding.", "launch.", "deepspeed.", "fsdp.", "runtime.", "precision")
"""Beginnings of the settings that do not change the prepared data."""


class Slurm(Queue):
    """A cluster on whose login node `sbatch` is installed, or one of its jobs."""

    name = "slurm"
    job_file = JOB

    # --- a run's nodes

    def starts(self, request: Request) -> bool:
        elsewhere = request.is_manual or request.alone == "--dry-run"
        return not elsewhere and read_allocation(os.environ) is not None

    def gathering(self, request: Request) -> Gathering | None:
        allocation = read_allocation(os.environ, socket.gethostname())
        assert allocation is not None, "asked inside a job"
        line = _line(request.words)
        if (forgotten := forgotten_srun(allocation, line)) is not None:
            raise RecipeError(forgotten)
        if allocation.step is None:
            request.say(runs_alone(allocation))
            return None
        hardware = request.hardware()
        # A rehearsal runs on one node, with the devices that it finds there.
        nodes, devices = (1, 1) if request.alone else (hardware.num_nodes, hardware.devices_per_node)
        fewer = replace(hardware, num_nodes=allocation.job_nodes).label
        other = _line(_with_hardware(request.words, fewer))
        if (wrong := wrong_tasks(allocation, nodes, devices, line, other)) is not None:
            raise RecipeError(wrong)
        return None if allocation.tasks == 1 else Gathering(place_in(allocation, node_address))

    # --- submit

    def require(self) -> None:
        if not has_slurm():
            message = "`sbatch` is not installed on this machine"
            hint = "run it on a login node of the cluster; --dry-run shows the scripts anywhere"
            raise MachineError(Problem("slurm-missing", message, hint=hint))

    def cpus_per_node(self, launch: LaunchSection, hardware: Hardware) -> int | None:
        return cpus_of_task(launch.slurm, hardware)

    def render(self, job: Submission, folder: Path, runs: Sequence[PlannedRun]) -> dict[str, str]:
        files: dict[str, str] = {}
        prepare = render_prepare_job(job, str(folder), _unlike_data(runs))
        if prepare is not None:
            files[PREPARE] = prepare
        if runs[0].values:
            run_dirs = [str(run.run_dir) for run in runs]
            files[JOB] = render_array(job, _longest(runs).plan, str(folder), run_dirs)
        else:
            files[JOB] = self.render_run(job, runs[0])
        return files

    def render_run(self, job: Submission, run: PlannedRun) -> str:
        return render_job(job, run.plan, str(run.run_dir))

    def check(self, job: Submission, runs: Sequence[PlannedRun]) -> list[Problem]:
        setup = check_shell(job.launch.slurm.setup, "launch.slurm.setup")
        found = [check_warning(job, _longest(runs).plan), check_devices(job), setup]
        if job.launch.hostfile is not None:
            hint = "remove it for Slurm: --set launch.hostfile=null"
            message = "names the nodes, which Slurm chooses"
            found.append(Problem("slurm-hostfile", message, path="launch.hostfile", hint=hint))
        return [problem for problem in found if problem is not None]

    def warnings(self, job: Submission) -> list[str]:
        slurm = job.launch.slurm
        if slurm.cpus_per_task is None and not job.hardware.is_cpu and "exclusive" not in slurm.options:
            return [
                "launch.slurm.cpus_per_task is not set: most clusters then give the task of a node one CPU, "
                "which all its devices share"
            ]
        return []

    def ask(
        self, job: Submission, files: Mapping[str, str], *, dry_run: bool
    ) -> tuple[list[Problem], list[str], str]:
        if dry_run and not has_slurm():
            return [], [], "Slurm is not installed on this machine"
        try:
            return *check_queue(job, files), ""
        except MachineError as error:
            if not dry_run:
                raise
            return [], [], error.problems[0].message

    def submit(
        self, folder: Path, recipe: str, files: Collection[str], runs: Sequence[PlannedRun]
    ) -> Submitted:
        prepare = _submit(folder / PREPARE, None) if PREPARE in files else None
        queued = [prepare] if prepare else []
        try:
            job = _submit(folder / JOB, prepare)
            queued.append(job)
            submitted = tuple(
                Run(run.run_dir, number, folder / "logs" / f"slurm-{number}.out", run.values)
                for index, run in enumerate(runs)
                for number in [f"{job}_{index}" if run.values else job]
            )
            done = Submitted(folder, recipe, prepare, job, submitted, self.name)
            done.write()
        except EffilaunchError:
            if queued:
                ask("scancel", *queued)
            raise
        return done

    def jobs(self, ids: Sequence[str]) -> Mapping[str, Job]:
        return read_jobs(ids)

    def cancel(self, ids: Sequence[str]) -> None:
        answer = ask("scancel", *ids)
        if answer.code != 0:
            raise MachineError(Problem("slurm-no-answer", f"the job cannot be cancelled: {answer.text}"))

    def restart_hint(self, run_dir: Path) -> str:
        return f"`sbatch {run_dir / JOB}` resumes the run"


SCHEDULER = Slurm()


def _line(words: Sequence[str]) -> str:
    return shlex.join(["effilaunch", *words])


def _with_hardware(words: Sequence[str], label: str) -> list[str]:
    """The command with another --on; without one it comes after the command's name."""
    given = [at for at, word in enumerate(words) if word == "--on" or word.startswith("--on=")]
    if not given:
        return [*words[:1], "--on", label, *words[1:]]
    at = given[-1]
    after = at + (2 if words[at] == "--on" else 1)
    return [*words[:at], "--on", label, *words[after:]]


def _longest(runs: Sequence[PlannedRun]) -> PlannedRun:
    """The run that takes longest to stop."""
    return max(runs, key=lambda run: warning_seconds(run.plan))


def _unlike_data(runs: Sequence[PlannedRun]) -> list[str]:
    """Run directories whose data differs according to their plans: the data of each is prepared."""
    found: dict[str, str] = {}
    for run in runs:
        decides = {name: run.plan.at(name) for name in run.plan.names if not name.startswith(_NOT_DATA)}
        found.setdefault(repr(sorted(decides.items(), key=lambda item: item[0])), str(run.run_dir))
    return list(found.values())


def _submit(script: Path, dependency: str | None) -> str:
    """Submit a script; the number of its job. RecipeError where Slurm rejects it."""
    answer = submit(script, dependency=dependency)
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
