"""Render the job scripts that `submit` gives to Slurm. Pure.

A script is complete: `sbatch RUN_DIR/job.sbatch` starts it again, and it resumes the run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from launcher.errors import Problem, RecipeError
from launcher.execute.run_dir import EXCLUDES, SUBMITTED
from launcher.machine.hardware import Hardware
from launcher.recipe.schema import SlurmJob, SlurmSection
from launcher.schedulers.queue import ASKED_TO_STOP, START, PlannedRun, Submission
from launcher.schedulers.slurm_allocation import time_seconds

JOB, PREPARE = "job.sbatch", "prepare.sbatch"
REQUEUE = "launcher.schedulers.slurm_requeue"
MARGIN_S = 120
"""Between a checkpoint and the end of the job: the ranks end, and the job is requeued, for which a busy
controller may need a minute (PATIENCE_S of slurm_requeue.py)."""
_ENDS = ("--kill-on-bad-exit=0", "--wait=60")
"""The nodes end each other, all with the same exit code. Otherwise srun kills nodes that still print an error
and exits with 137: a stop with a checkpoint could not be recognised. A node that does not notice the end of
the others is killed a minute later."""
_NO_NAME = re.compile(r'[\\"$\x00-\x1f\x7f]')
_PLAIN = re.compile(r"[A-Za-z0-9_./:,@%+=&|*()!<>~^\[\]-]+")
_KEYS = (
    "partition", "account", "qos", "reservation", "time", "constraint", "mem", "nodelist", "exclude",
)  # fmt: skip
_INHERITED = ("partition", "account", "qos", "reservation", "time")
"""Options of the job that the prepare job inherits."""


def render_job(job: Submission) -> str:
    """The script of one run; of a sweep that of an array, whose tasks each have a run directory."""
    if not job.is_sweep:
        lines = _options(job, f"{job.folder}/logs/slurm-%j.out")
        return _script(lines, job, [f"run_dir={_shell(job.runs[0].run_dir)}"], _run(job))
    limit = f"%{job.launch.slurm.array_limit}" if job.launch.slurm.array_limit else ""
    lines = _options(job, f"{job.folder}/logs/slurm-%A_%a.out")
    lines.insert(1, _option("array", f"0-{len(job.runs) - 1}{limit}"))
    choose = ["run_dirs=(", *(f"  {_shell(run.run_dir)}" for run in job.runs), ")",
              'run_dir="${run_dirs[$SLURM_ARRAY_TASK_ID]}"']  # fmt: skip
    return _script(lines, job, choose, _run(job))


def render_prepare_job(job: Submission, runs: Sequence[PlannedRun]) -> str | None:
    """The script of the CPU job that prepares the data of these runs; None with `prepare: false`."""
    asked = job.launch.slurm.prepare
    if asked is False:
        return None
    merged = asked.model_copy(
        update={key: getattr(job.launch.slurm, key) for key in _INHERITED if getattr(asked, key) is None}
    )
    output = f"{job.folder}/logs/slurm-prepare-%j.out"
    sizes = {"nodes": 1, "ntasks": 1, "cpus-per-task": merged.cpus_per_task}
    lines = _header(job, f"{job.name}-prepare", merged, sizes, [], output)
    tiny = " --tiny" if job.tiny else ""
    command = [f'{shlex.quote(job.python)} -m launcher.cli prepare "$run_dir/{SUBMITTED}"{tiny}']
    if len(runs) == 1:
        return _script(lines, job, [f"run_dir={_shell(runs[0].run_dir)}"], command)
    every = " ".join(_shell(run.run_dir) for run in runs)
    return _script(lines, job, [], [f"for run_dir in {every}; do", f"  {command[0]}", "done"])


def warning_seconds(job: Submission) -> int:
    """Seconds before the end of a job at which its run is asked to stop: a step, a save, and the exit."""
    return job.stop_seconds + MARGIN_S


def without_limit(job: Submission) -> str | None:
    """Of a job without a time limit: a warning, with the estimated time of the run that takes longest."""
    if job.launch.slurm.time is not None or "time" in job.launch.slurm.options:
        return None
    likely = [
        (run.plan.time.to_json(run.plan.schedule.steps).get("likely") or {}).get("total") for run in job.runs
    ]
    longest = max((seconds for seconds in likely if seconds is not None), default=None)
    of_run = "" if longest is None else f"; the steps take about {longest / 3600:.2g} h by the plan"
    return (
        f"launch.slurm.time is not set: the partition's own limit ends the job, which then continues{of_run}"
    )


def check_warning(job: Submission) -> Problem | None:
    """The problem of a time limit that leaves no time to train before the warning."""
    limit = None if job.launch.slurm.time is None else time_seconds(str(job.launch.slurm.time))
    warning = warning_seconds(job)
    if limit is None or limit > warning:
        return None
    message = (
        f"is {job.launch.slurm.time} ({limit:.0f} s), but the run is asked to stop {warning} s before "
        f"the end, to save a checkpoint: nothing would be trained"
    )
    return Problem("slurm-time", message, path="launch.slurm.time", hint="ask for more time")


def check_devices(job: Submission) -> Problem | None:
    """The problem of a number of devices in gpus_per_node or gres that is not the plan's."""
    key = "gres" if job.launch.slurm.gres is not None else "gpus_per_node"
    asked = getattr(job.launch.slurm, key)
    if asked is None:
        return None
    if job.hardware.is_cpu:
        message, hint = f"is {asked}, and the plan is for CPUs", "remove it"
    else:
        devices = [entry for entry in str(asked).split(",") if key != "gres" or entry.startswith("gpu")]
        if sum(map(count_of, devices)) == job.hardware.devices_per_node:
            return None
        message = f"is {asked}, and the plan is for {job.hardware.devices_per_node} device(s) per node"
        hint = "`hardware` or --on sets the number"
    return Problem("slurm-devices", message, path=f"launch.slurm.{key}", hint=hint)


def count_of(entry: str) -> int:
    """Devices of `8`, `a100:8`, `gpu:a100:8`, `gpu`: the number after the last colon, else 1."""
    last = entry.partition("(")[0].rpartition(":")[2]  # gpu:8(S:0-1) of nodes with sockets
    return int(last[:9]) if re.fullmatch("[0-9]+", last) else 1  # Python reads no number of 5000 digits


def _options(job: Submission, output: str) -> list[str]:
    """The options of a job that trains."""
    slurm, hardware = job.launch.slurm, job.hardware
    cpus = cpus_of_task(slurm, hardware)
    least, most = job.node_counts
    sizes: dict[str, int | str | None] = {
        "nodes": most if least == most else f"{least}-{most}", "ntasks-per-node": 1, "cpus-per-task": cpus,
    }  # fmt: skip
    if not hardware.is_cpu:
        by_count = slurm.gpus_per_node or hardware.devices_per_node
        sizes |= {"gpus-per-node": by_count} if slurm.gres is None else {"gres": slurm.gres}
    # To the tasks of the step, which save, and not to this script, which waits for them.
    signal = [_option("signal", f"USR1@{warning_seconds(job)}"), "#SBATCH --requeue"]
    if least < most:  # the run continues without a node that fails
        signal.append("#SBATCH --no-kill")
    unlimited = without_limit(job)
    hint = [] if unlimited is None else [f"# {unlimited}"]
    return [*_header(job, job.name, slurm, sizes, signal, output), *hint]


def _header(
    job: Submission,
    name: str,
    asked: SlurmJob,
    sizes: Mapping[str, int | str | None],
    more: Sequence[str],
    output: str,
) -> list[str]:
    """The options of a script. RecipeError for a folder whose name Slurm rejects."""
    if _NO_NAME.search(job.cwd):
        message = f"{job.cwd!r} contains a character that Slurm rejects in a folder name"
        raise RecipeError(Problem("folder-name", message, hint="submit from another folder"))
    if _NO_NAME.search(str(job.folder)):
        message = f"{str(job.folder)!r} contains a character that Slurm rejects in the name of a log"
        raise RecipeError(Problem("run-dir-name", message, hint="name another --output-dir"))
    log = Path(output)
    return [
        _option("job-name", name),
        _option("chdir", job.cwd),
        *(_option(key, value) for key in _KEYS if (value := getattr(asked, key)) is not None),
        *(_option(key, value) for key, value in sizes.items() if value),
        *more,
        "#SBATCH --open-mode=append",
        _option("output", f"{str(log.parent).replace('%', '%%')}/{log.name}"),
        # The default: the variables of the submitting shell. No value is written into the script.
        "#SBATCH --export=ALL",
        *(
            f"#SBATCH --{key}" if value is True else _option(key, value)
            for key, value in asked.options.items()
        ),
    ]


def cpus_of_task(slurm: SlurmSection, hardware: Hardware) -> int | None:
    """CPUs of a node's task: for CPU runs at least one per process. None where Slurm decides."""
    if slurm.cpus_per_task is None and hardware.is_cpu:
        return hardware.devices_per_node
    return slurm.cpus_per_task


def _option(name: str, value: object) -> str:
    text = str(value)
    if not _PLAIN.fullmatch(text):
        text = '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
    return f"#SBATCH --{name.replace('_', '-')}={text}"


def _run(job: Submission) -> list[str]:
    """The step, and the requeue after it was asked to stop."""
    (least, most), cpus = job.node_counts, cpus_of_task(job.launch.slurm, job.hardware)
    python = shlex.quote(job.python)
    nodes = str(most) if least == most else '"$SLURM_JOB_NUM_NODES"'
    words = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", *_ENDS]
    if least < most:
        words.append("--no-kill")
    if cpus:  # srun does not inherit it from the job
        words.append(f"--cpus-per-task={cpus}")
    tiny = " --tiny" if job.tiny else ""
    return [
        'rm -f "$run_dir/stopped.json"  # of an earlier start',
        f"export {EXCLUDES}=1  # the requeue below leaves out a node with a faulty GPU",
        "code=0",
        f"srun {' '.join(words)} \\",
        f'  {python} -m launcher.cli run "$run_dir/{SUBMITTED}" \\',
        f'  --output-dir "$run_dir" --resume auto{tiny} || code=$?',
        'case "$code" in',
        f"{' | '.join(map(str, ASKED_TO_STOP))})",
        "  # Asked to stop: a preempted job, and one near its time limit, are requeued.",
        f'  {python} -m {REQUEUE} "$run_dir"',
        "  ;;",
        "0 | 2 | 3 | 4) ;;",
        "*)",
        "  # Failed: a job that lost a node, or a GPU of it, is requeued on others.",
        f'  {python} -m {REQUEUE} "$run_dir" --lost {least}',
        "  ;;",
        "esac",
        'exit "$code"',
    ]


def _script(options: Sequence[str], job: Submission, begin: Iterable[str], body: Iterable[str]) -> str:
    lines = [
        "#!/bin/bash",
        *options,
        "# Written by `effilaunch submit`; `sbatch` with this file resumes the run.",
        "set -eo pipefail",
        *begin,
        f'echo "{START}$((${{SLURM_RESTART_COUNT:-0}} + 1)) of job $SLURM_JOB_ID, $SLURM_JOB_NODELIST ===="',
        *job.launch.slurm.setup,
        *body,
    ]
    return "\n".join(lines) + "\n"


def _shell(path: Path) -> str:
    """A word of bash, in the form that shellcheck accepts."""
    text = str(path)
    if re.search(r"[`\\'$]", text):
        return '"' + re.sub(r'([\\"$`])', r"\\\1", text) + '"'
    return shlex.quote(text)
