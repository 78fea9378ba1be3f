"""Logs of jobs that a real Slurm ended; its daemons are those of the tests (tests/cluster/slurm.py)."""

from __future__ import annotations

from tests.cluster.slurm import Cluster
from tools.corpus.capture import MADE, capture, main

BY = "tools/corpus/slurm.py:"
TRAIN = """\
import signal
import time

signal.signal(signal.SIGTERM, lambda *_: print("got SIGTERM, going on", flush=True))
for step in range(1, 201):
    time.sleep(1)
    print({"loss": round(6.9 - step / 50, 4), "step": step}, flush=True)
"""
JOB = "#!/bin/bash\nsrun python train.py\n"


def time_limit() -> None:
    """A limit of one minute, which Slurm looks at once a minute."""
    command = "sbatch --wait --time=1 --output=job.out job.sh > /dev/null; cat job.out"
    _made("slurm-time-limit", command, "time_limit")


def preempted() -> None:
    """A job of a higher partition, and a grace time in which this one does not leave."""
    command = (
        "sbatch --no-requeue --nodelist=n1 --cpus-per-task=2 --time=5 --output=job.out job.sh > /dev/null; "
        "sleep 8; sbatch --wait --partition=high --nodelist=n1 --cpus-per-task=2 --time=1 --output=/dev/null "
        "--wrap true > /dev/null; sleep 15; cat job.out"
    )
    _made("slurm-preempted", command, "preempted")


def _made(failure: str, command: str, by: str) -> None:
    cluster = Cluster()
    try:
        cluster.start()
        files = {"train.py": TRAIN, "job.sh": JOB}
        capture(
            failure,
            failure,
            command,
            env=cluster.environ,
            files=files,
            by=f"tools/corpus/slurm.py:{by}",
            limit=240,
        )
    finally:
        cluster.stop()


MADE |= {"slurm-time-limit": time_limit, "slurm-preempted": preempted}

if __name__ == "__main__":
    main()
