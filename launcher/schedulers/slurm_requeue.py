"""Decide whether a job that was asked to stop is requeued.

`python -m launcher.schedulers.slurm_requeue RUN_DIR`, called by the job script when a signal ended the run.
Preempted: yes, since Slurm requeues only jobs that it has to kill, not those that stopped within the grace
time. Warned of the time limit (SIGUSR1): yes, if a checkpoint was saved since the last start. Cancelled, or
stopped by a person: no; `scontrol requeue` would bring a cancelled job back.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from launcher.errors import MachineError
from launcher.execute.run_dir import Stopped, read_stopped
from launcher.facts.checkpoint import complete_checkpoints
from launcher.facts.safe_files import read_jsonl
from launcher.schedulers.slurm_queue import Job, ask, read_jobs

PATIENCE_S = 60.0
"""Time during which a controller that does not answer is asked again; the job ends with this script."""
_PAUSE_S, _ANSWER_S = 5.0, 20.0
"""Between two attempts; for one answer."""
REQUEUES = "requeues.jsonl"
"""In the run directory: when its job was requeued, why, and at which checkpoint."""


def decide(job: Job | None, stopped: Stopped | None, checkpoint: int, before: int) -> tuple[bool, str]:
    """Whether the job is requeued, and why.

    job: its present state. stopped: stopped.json of rank 0. checkpoint: step of the newest complete one;
    before: of the one at the last requeue.
    """
    if job is None:
        return False, "Slurm does not know this job; submit it again to resume the run"
    if job.state != "RUNNING":
        return False, f"the job is {job.state}: Slurm decides what follows"
    if job.preempted and job.preempted >= job.start:
        return True, "the job was preempted"
    signal = None if stopped is None else stopped.signal
    if signal != "SIGUSR1":
        asked = "before its first step" if stopped is None else f"by {signal}"
        return False, f"the run was asked to stop {asked}, and not because of its time limit"
    if checkpoint <= before:
        return False, (
            f"the time limit is too short: nothing was saved after step {before} since the last start; "
            f"ask for more time, or save more often (trainer.save_steps)"
        )
    return True, f"the time limit is near, and the checkpoint of step {checkpoint} is saved"


def last_requeue(run_dir: Path) -> int:
    """Step of the checkpoint with which the job was requeued last; 0 where it never was."""
    try:
        return int(read_jsonl(run_dir / REQUEUES)[-1]["checkpoint"])
    except (ValueError, KeyError, IndexError, TypeError):
        return 0


def requeue(run_dir: Path, number: str) -> str:
    """Requeue the job if it should be; why it was not, else an empty text.

    The job is looked up before each attempt: it may have been cancelled meanwhile.
    """
    newest = max(complete_checkpoints(run_dir / "checkpoints"), default=0)
    before, is_recorded = last_requeue(run_dir), False
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            job = read_jobs([number], limit_s=_ANSWER_S).get(number)
            again, why = decide(job, read_stopped(run_dir), newest, before)
            if not again:
                return f"not requeued: {why}"
            if not is_recorded:  # before Slurm ends this script with its job
                is_recorded = True
                row = {"time": time.time(), "job": number, "checkpoint": newest, "why": why}
                with (run_dir / REQUEUES).open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(row) + "\n")
                _print(f"requeued: {why}")
            answer = ask("scontrol", "requeue", number, limit_s=_ANSWER_S)
            if answer.code == 0:
                return ""
            failure = answer.text
        except MachineError as error:
            failure = error.problems[0].message
        if time.monotonic() + _PAUSE_S > deadline:
            return f"not requeued: {failure}"
        time.sleep(_PAUSE_S)


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
    """RUN_DIR; the job's number is in the environment."""
    try:
        failure = requeue(Path(argv[0]), own_number(os.environ))
    except OSError as error:
        failure = f"not requeued: {error}"
    if failure:
        _print(failure)


if __name__ == "__main__":
    main(sys.argv[1:])
