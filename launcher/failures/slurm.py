"""Known failures of jobs: what a Slurm ends, and says so in the job's log."""

from __future__ import annotations

from launcher.failures.failure import Failure, Place

_WARNING = Place("worker", "launcher.schedulers.slurm_script:warning_seconds")
_REQUEUE = Place("worker", "launcher.schedulers.slurm_requeue:decide")

SLURM = (
    Failure(
        id="slurm-time-limit",
        title="the job reached its time limit",
        cause="Slurm kills a job at its limit of time. What was trained since the last checkpoint is lost, "
        "unless the job asked for a signal before (--signal) and answered it with one.",
        mend="`effilaunch submit` asks for the signal, saves and goes on; in a script of your own write "
        "`#SBATCH --signal=USR1@180` and `--resume auto`; or ask for more time",
        source="slurm/src/slurmd/slurmstepd/req.c _handle_terminate; `man sbatch`, --time and --signal",
        places=(_WARNING, _REQUEUE, Place("refusal", "slurm-time"), Place("diagnose")),
        patterns=(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ DUE TO TIME LIMIT",),
    ),
    Failure(
        id="slurm-preempted",
        title="the job had to make room for another one",
        cause="A job of a higher priority needed the nodes, and this one did not end in the grace time that "
        "the partition gives. Slurm requeues only jobs that it kills so, where they may be requeued.",
        mend="`effilaunch submit` saves at the signal and requeues the job; in a script of your own write "
        "`#SBATCH --requeue` and `--resume auto`",
        source="slurm/src/slurmctld/preempt.c; `man slurm.conf`, PreemptMode and GraceTime",
        places=(_REQUEUE, Place("diagnose")),
        patterns=(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ DUE TO PREEMPTION",),
    ),
)
