"""Decide whether a job whose run did not finish is requeued.

`python -m launcher.schedulers.slurm_requeue RUN_DIR [--lost NODES]`, called by the job script when a signal
ended the run, or with --lost when it failed; NODES is the least number of nodes that it needs. Preempted:
yes, since Slurm requeues only jobs that it has to kill, not those that stopped within the grace time. Warned
of the time limit (SIGUSR1): yes, if a checkpoint was saved since the last start. A node is gone, or a GPU of
it is faulty: yes, without it; Slurm itself notices a lost node only after minutes (SlurmdTimeout), and until
then would start the job there again. Cancelled, stopped by a person, failed on sound nodes: no; `scontrol
requeue` would bring a cancelled job back.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import MachineError, Problem
from launcher.execute.run_dir import ENDED, FAULTY_GPU, Stopped, read_stopped
from launcher.files.checkpoint import complete_checkpoints
from launcher.files.rank_status import read_statuses
from launcher.files.safe_files import read_json, read_jsonl
from launcher.knowledge.diagnose.run_dir import rank_of
from launcher.schedulers.slurm_allocation import expand_hosts
from launcher.schedulers.slurm_commands import ask, read_rows

PATIENCE_S = 60.0
"""Time during which a controller that does not answer is asked again; the job ends with this script."""
_PAUSE_S, _ANSWER_S = 5.0, 20.0
"""Between two attempts; for one answer."""
REQUEUES = "requeues.jsonl"
"""In the run directory: when its job was requeued, why, at which checkpoint, and which nodes were lost."""
_GONE = re.compile(r"(?:failed|failure) on node (\S+?):|Node failure on (\S+)")
"""What `srun` prints about a node that starts no task."""


def decide(
    job: Mapping[str, str] | None, stopped: Stopped | None, checkpoint: int, before: int
) -> tuple[bool, str]:
    """Whether a job that was asked to stop is requeued, and why.

    job: its row of `squeue`. stopped: stopped.json of rank 0. checkpoint: step of the newest complete one;
    before: of the one at the last requeue.
    """
    if (no := _no_longer_ours(job)) or job is None:
        return False, no
    if job["PreemptTime"] and job["PreemptTime"] >= job["StartTime"]:
        return True, "the job was preempted"
    name = None if stopped is None else stopped.signal
    if name != "SIGUSR1":
        asked = "before its first step" if stopped is None else f"by {name}"
        return False, f"the run was asked to stop {asked}, and not because of its time limit"
    if checkpoint <= before:
        return False, (
            f"the time limit is too short: nothing was saved after step {before} since the last start; "
            f"ask for more time, or save more often (trainer.save_steps)"
        )
    return True, f"the time limit is near, and the checkpoint of step {checkpoint} is saved"


def decide_lost(
    job: Mapping[str, str] | None, lost: Sequence[str], checkpoint: int, last: Mapping[str, Any]
) -> tuple[bool, str]:
    """Whether a job whose run failed is requeued, and why.

    lost: its nodes that are gone or have a faulty GPU. last: the row of the last requeue.
    """
    if no := _no_longer_ours(job):
        return False, no
    if not lost:
        return False, "the run failed, and all nodes of the job answer"
    nodes = ", ".join(lost)
    if set(lost) <= set(last.get("lost", ())) and checkpoint <= last["checkpoint"]:
        return False, f"{nodes} was lost again, and nothing was saved after step {checkpoint} since then"
    return True, f"{nodes} was lost, or has a faulty GPU"


def _no_longer_ours(job: Mapping[str, str] | None) -> str:
    if job is None:
        return "Slurm does not know this job; submit it again to resume the run"
    return "" if job["State"] == "RUNNING" else f"the job is {job['State']}: Slurm decides what follows"


def lost_nodes(environ: Mapping[str, str]) -> list[str]:
    """The nodes of this job on which `srun` starts no task."""
    count = environ.get("SLURM_JOB_NUM_NODES", "1")
    each = (f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--cpus-per-task=1")
    found = _GONE.findall(ask("srun", "--overlap", *each, "true", environ=environ).err)
    return sorted({name for names in found for name in names if name})


def faulty_nodes(run_dir: Path, environ: Mapping[str, str]) -> list[str]:
    """The node of this job on which the hardware of a GPU ended the run."""
    try:
        problems = [Problem(**found) for found in read_json(run_dir / "logs" / ENDED)["problems"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    logs = [Path(problem.file) for problem in problems if problem.code in FAULTY_GPU and problem.file]
    ranks = [rank for rank in map(rank_of, logs) if rank is not None]
    statuses = read_statuses(run_dir, ranks).values()
    hosts = {name for status in statuses for name in (status.host, status.host.partition(".")[0])}
    return sorted(hosts & set(expand_hosts(environ.get("SLURM_JOB_NODELIST", ""))))


def without(job: Mapping[str, str], lost: Sequence[str], needed: int) -> str:
    """The nodes to exclude: the lost ones and those before; empty where the partition has too few others."""
    excluded = {*lost, *expand_hosts(job["exc_nodes"])} if job["exc_nodes"] else set(lost)
    words = ("--noheader", "--Node", f"--partition={job['Partition']}", "--format=%N|%T")
    rows = [line.split("|") for line in ask("sinfo", *words, limit_s=_ANSWER_S).out.split()]
    useful = {name for name, state in rows if not state.startswith(("down", "drain", "fail"))}
    return ",".join(sorted(excluded)) if len(useful - excluded) >= needed else ""


def last_requeue(run_dir: Path) -> dict[str, Any]:
    """The row of the last requeue of this run; one of step 0 where it never was."""
    try:
        row: dict[str, Any] = read_jsonl(run_dir / REQUEUES)[-1]
        return {**row, "checkpoint": int(row["checkpoint"])}
    except (ValueError, KeyError, IndexError, TypeError):
        return {"checkpoint": 0}


def requeue(run_dir: Path, number: str, *, failed: bool = False, needed: int = 1) -> str:
    """Requeue the job if it should be; why it was not, else an empty text.

    failed: whether the run failed, rather than that it was asked to stop. needed: the least nodes of the job.
    The job is looked up before each attempt: it may have been cancelled meanwhile.
    """
    newest = max(complete_checkpoints(run_dir / "checkpoints"), default=0)
    before, is_recorded = last_requeue(run_dir), False
    lost = sorted({*lost_nodes(os.environ), *faulty_nodes(run_dir, os.environ)}) if failed else []
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            job = read_rows([number], limit_s=_ANSWER_S).get(number)
            again, why = (
                decide_lost(job, lost, newest, before)
                if failed
                else decide(job, read_stopped(run_dir), newest, before["checkpoint"])
            )
            if not again or job is None:
                return f"not requeued: {why}"
            if not is_recorded:  # before Slurm ends this script with its job
                is_recorded = True
                _record(run_dir, {"job": number, "checkpoint": newest, "why": why, "lost": lost})
                _print(f"requeued: {why}")
            if not (failure := _ask_requeue(number, job, lost, needed)):
                return ""
        except MachineError as error:
            failure = error.problems[0].message
        if time.monotonic() + _PAUSE_S > deadline:
            return f"not requeued: {failure}"
        time.sleep(_PAUSE_S)


def _ask_requeue(number: str, job: Mapping[str, str], lost: Sequence[str], needed: int) -> str:
    """Requeue the job, without the lost nodes; Slurm's error, else an empty text."""
    excluded = without(job, lost, needed) if lost else ""
    # Slurm excludes nodes only from a waiting job, and ends this script as soon as the job is one.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    answer = ask("scontrol", "requeue", number, limit_s=_ANSWER_S)
    if answer.code == 0 and excluded:
        changed = ask("scontrol", "update", f"JobId={number}", f"ExcNodeList={excluded}", limit_s=_ANSWER_S)
        _print(f"excluded: {excluded}" if changed.code == 0 else f"not excluded: {changed.text}")
    return "" if answer.code == 0 else answer.text


def _record(run_dir: Path, row: Mapping[str, Any]) -> None:
    with (run_dir / REQUEUES).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"time": time.time(), **row}) + "\n")


def own_number(environ: Mapping[str, str]) -> str:
    """The job's number; 12_3 for a task of an array.

    One task of each array has the number of the array as SLURM_JOB_ID, which names all tasks to Slurm.
    """
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID", "")


def _print(text: str) -> None:
    sys.stdout.write(f"effilaunch: {text}\n")
    sys.stdout.flush()


def main(argv: list[str]) -> None:
    """RUN_DIR [--lost NODES]; the job's number is in the environment."""
    run_dir, *lost = argv
    try:
        needed = int(lost[1]) if lost else 1
        failure = requeue(Path(run_dir), own_number(os.environ), failed=bool(lost), needed=needed)
    except OSError as error:
        failure = f"not requeued: {error}"
    if failure:
        _print(failure)


if __name__ == "__main__":
    main(sys.argv[1:])
