"""The job scripts that `submit` gives to Slurm, as text. Pure.

A script is whole: `sbatch RUN_DIR/job.sbatch` starts it again by hand, and it goes on where the run stands.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import Problem, RecipeError
from launcher.facts.hardware import Hardware
from launcher.facts.slurm import time_seconds
from launcher.plan.plan import Plan
from launcher.recipe.schema import SlurmJob, SlurmSection

SUBMITTED = "submitted.yaml"
"""In the run directory: the recipe as it was when the job was submitted, with its parents and overrides."""
JOB, PREPARE = "job.sbatch", "prepare.sbatch"
REQUEUE = "launcher.execute.requeue"
START = "==== start "
"""Begins the line that a job writes first into its log, at every start."""
LEAST_STOP_S = 60
"""As much as a run has to stop in, where the plan expects less (launcher/execute/local.py)."""
ASKED_TO_STOP = (130, 138, 143)
"""Codes of a step that a signal ended: the run's own, and those of a Python that SIGUSR1 or SIGTERM killed
before the run could listen."""
MARGIN_S = 120
"""Between a checkpoint and the end of the job: the ranks leave, and the job is requeued, for which a busy
controller may have to be asked for a minute (PATIENCE_S of launcher/execute/requeue.py)."""
_ENDS = ("--kill-on-bad-exit=0", "--wait=60")
"""The members end each other, all with the same code. With the other setting srun kills those that still say
why, and its code is then 137: it would not be seen that the run stopped with a checkpoint. A member that does
not notice the others' end is killed a minute later."""
_NO_NAME = re.compile(r'[\\"$\x00-\x1f\x7f]')
_PLAIN = re.compile(r"[A-Za-z0-9_./:,@%+=&|*()!<>~^\[\]-]+")
_KEYS = (
    "partition", "account", "qos", "reservation", "time", "constraint", "mem", "nodelist", "exclude",
)  # fmt: skip
_INHERITED = ("partition", "account", "qos", "reservation", "time")
"""What the prepare job asks for like the job behind it, where the recipe says nothing else."""


@dataclass(frozen=True, slots=True)
class Submission:
    """What one call of `submit` makes jobs of."""

    name: str
    """The jobs are called like this."""
    python: str
    folder: str
    """Where the command was typed: the jobs' working directory."""
    hardware: Hardware
    """What the job asks for."""
    slurm: SlurmSection
    tiny: bool = False


def render_job(job: Submission, plan: Plan, run_dir: str) -> str:
    """The script of one run."""
    lines = _options(job, plan, f"{run_dir}/logs/slurm-%j.out", run_dir)
    return _script(lines, job, [f"run_dir={_shell(run_dir)}"], _run(job))


def render_array(job: Submission, plan: Plan, folder: str, run_dirs: Sequence[str]) -> str:
    """The script of a sweep: an array, of which each task has a run directory of its own.

    plan: of one of them; all need the same devices, and the longest warning.
    """
    limit = f"%{job.slurm.array_limit}" if job.slurm.array_limit else ""
    lines = _options(job, plan, f"{folder}/logs/slurm-%A_%a.out", folder)
    lines.insert(1, _option("array", f"0-{len(run_dirs) - 1}{limit}"))
    choose = ["run_dirs=(", *(f"  {_shell(path)}" for path in run_dirs), ")",
              'run_dir="${run_dirs[$SLURM_ARRAY_TASK_ID]}"']  # fmt: skip
    return _script(lines, job, choose, _run(job))


def render_prepare_job(job: Submission, folder: str, run_dirs: Sequence[str]) -> str | None:
    """The script of the CPU job that prepares the data of all runs; None where the recipe wants none."""
    asked = job.slurm.prepare
    if asked is False:
        return None
    merged = asked.model_copy(
        update={key: getattr(job.slurm, key) for key in _INHERITED if getattr(asked, key) is None}
    )
    lines = [
        _option("job-name", f"{job.name}-prepare"),
        _chdir(job),
        *_asked(merged),
        _option("nodes", 1),
        _option("ntasks", 1),
        *([_option("cpus-per-task", merged.cpus_per_task)] if merged.cpus_per_task else []),
        *_common(f"{folder}/logs/slurm-prepare-%j.out", folder),
        *_further(merged),
    ]
    word = " --tiny" if job.tiny else ""
    command = [f'{shlex.quote(job.python)} -m launcher.cli prepare "$run_dir/{SUBMITTED}"{word}']
    if len(run_dirs) == 1:
        return _script(lines, job, [f"run_dir={_shell(run_dirs[0])}"], command)
    every = [f"for run_dir in {' '.join(map(_shell, run_dirs))}; do", f"  {command[0]}", "done"]
    return _script(lines, job, [], every)


def warning_seconds(plan: Plan) -> int:
    """So long before the end of the job the run is asked to stop: a step and a save, and to leave."""
    return max(LEAST_STOP_S, plan.runtime.stop_seconds or 0) + MARGIN_S


def check_warning(job: Submission, plan: Plan) -> Problem | None:
    """The problem of a time limit that leaves no time to train before the warning."""
    limit = None if job.slurm.time is None else time_seconds(str(job.slurm.time))
    warning = warning_seconds(plan)
    if limit is None or limit > warning:
        return None
    message = (
        f"is {job.slurm.time} ({limit:.0f} s), but a stop with a checkpoint is asked for {warning} s before "
        f"the end, so that nothing would be trained"
    )
    return Problem("slurm-time", message, path="launch.slurm.time", hint="ask for more time")


def check_devices(job: Submission) -> Problem | None:
    """The problem of a number of devices in gpus_per_node or gres that is not the plan's."""
    key = "gres" if job.slurm.gres is not None else "gpus_per_node"
    asked = getattr(job.slurm, key)
    if asked is None:
        return None
    if job.hardware.is_cpu:
        message = f"is {asked}, and the plan is for CPUs"
        return Problem("slurm-devices", message, path=f"launch.slurm.{key}", hint="leave it out")
    count = sum(
        count_of(entry) for entry in str(asked).split(",") if key != "gres" or entry.startswith("gpu")
    )
    if count == job.hardware.devices_per_node:
        return None
    message = f"is {asked}, and the plan is for {job.hardware.devices_per_node} device(s) of each node"
    return Problem(
        "slurm-devices", message, path=f"launch.slurm.{key}", hint="`hardware` or --on says how many"
    )


def count_of(entry: str) -> int:
    """Devices of `8`, `a100:8`, `gpu:a100:8`, `gpu`: the number behind the last colon, else one."""
    last = entry.partition("(")[0].rpartition(":")[2]  # gpu:8(S:0-1), as nodes with sockets have it
    return int(last[:9]) if re.fullmatch("[0-9]+", last) else 1  # Python reads no number of 5000 digits


def _options(job: Submission, plan: Plan, output: str, folder: str) -> list[str]:
    """The options of a job that trains."""
    slurm, hardware = job.slurm, job.hardware
    cpus = cpus_of_task(job.slurm, job.hardware)
    return [
        _option("job-name", job.name),
        _chdir(job),
        *_asked(slurm),
        _option("nodes", hardware.num_nodes),
        _option("ntasks-per-node", 1),
        *([_option("cpus-per-task", cpus)] if cpus else []),
        *_devices(job),
        # To the tasks of the step, which save, and not to this script, which waits for them.
        _option("signal", f"USR1@{warning_seconds(plan)}"),
        "#SBATCH --requeue",
        *_common(output, folder),
        *_further(slurm),
    ]


def cpus_of_task(slurm: SlurmSection, hardware: Hardware) -> int | None:
    """CPUs of a node's task: on a CPU at least one a process. None where Slurm decides."""
    if slurm.cpus_per_task is None and hardware.is_cpu:
        return hardware.devices_per_node
    return slurm.cpus_per_task


def _devices(job: Submission) -> list[str]:
    if job.hardware.is_cpu:
        return []
    if job.slurm.gres is not None:
        return [_option("gres", job.slurm.gres)]
    return [_option("gpus-per-node", job.slurm.gpus_per_node or job.hardware.devices_per_node)]


def _asked(job: SlurmJob) -> list[str]:
    return [_option(key, value) for key in _KEYS if (value := getattr(job, key)) is not None]


def _chdir(job: Submission) -> str:
    if _NO_NAME.search(job.folder):
        message = f"{job.folder!r} holds a sign that Slurm does not take in the name of a folder"
        raise RecipeError(Problem("folder-name", message, hint="submit it from another folder"))
    return _option("chdir", job.folder)


def _common(output: str, folder: str) -> list[str]:
    if _NO_NAME.search(folder):
        message = "holds a sign that Slurm does not take in the name of a log"
        raise RecipeError(Problem("run-dir-name", f"{folder!r} {message}", hint="name another --output-dir"))
    kept = Path(output)
    name = str(kept.parent).replace("%", "%%") + "/" + kept.name
    return [
        "#SBATCH --open-mode=append",
        _option("output", name),
        # As every job starts: with the variables of the shell that submits it. No value is written here.
        "#SBATCH --export=ALL",
    ]


def _further(job: SlurmJob) -> list[str]:
    return [
        f"#SBATCH --{name}" if value is True else _option(name, value) for name, value in job.options.items()
    ]


def _option(name: str, value: object) -> str:
    text = str(value)
    if not _PLAIN.fullmatch(text):
        text = '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
    return f"#SBATCH --{name.replace('_', '-')}={text}"


def _run(job: Submission) -> list[str]:
    """The step, and what is done when it was asked to stop."""
    nodes, cpus = job.hardware.num_nodes, cpus_of_task(job.slurm, job.hardware)
    python = shlex.quote(job.python)
    words = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", *_ENDS]
    if cpus:  # srun does not take it over from the job
        words.append(f"--cpus-per-task={cpus}")
    tiny = " --tiny" if job.tiny else ""
    return [
        'rm -f "$run_dir/stopped.json"  # of an earlier start: what follows is about this one',
        "code=0",
        f"srun {' '.join(words)} \\",
        f'  {python} -m launcher.cli run "$run_dir/{SUBMITTED}" \\',
        f'  --output-dir "$run_dir" --resume auto{tiny} || code=$?',
        'case "$code" in',
        f"{' | '.join(map(str, ASKED_TO_STOP))})",
        "  # Asked to stop: a preempted job, and one that reaches its time limit, are requeued.",
        f'  {python} -m {REQUEUE} "$run_dir"',
        "  ;;",
        "esac",
        'exit "$code"',
    ]


def _script(options: Sequence[str], job: Submission, begin: Iterable[str], body: Iterable[str]) -> str:
    lines = [
        "#!/bin/bash",
        *options,
        "# Written by `effilaunch submit`; `sbatch` with this file starts it again, where the run stands.",
        "set -eo pipefail",
        *begin,
        f'echo "{START}$((${{SLURM_RESTART_COUNT:-0}} + 1)) of job $SLURM_JOB_ID, $SLURM_JOB_NODELIST ===="',
        *job.slurm.setup,
        *body,
    ]
    return "\n".join(lines) + "\n"


def _shell(text: str) -> str:
    """A word of bash; shellcheck takes an apostrophe in single quotes for a slip."""
    if re.search(r"[`\\'$]", text):
        return '"' + re.sub(r'([\\"$`])', r"\\\1", text) + '"'
    return shlex.quote(text)
