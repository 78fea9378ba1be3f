"""The estimate for a run as it was: rows may have been shorter than planned. Pure."""

from __future__ import annotations

from dataclasses import replace

from launcher.memory.estimate import MemoryEstimate, estimate_memory
from launcher.plan.inputs import Facts
from launcher.plan.plan import Plan


def predict_as_run(plan: Plan, facts: Facts, tokens: int | None) -> MemoryEstimate:
    """What the planner predicts for batches as they were, where rows are shorter than data.max_length.

    tokens: of the largest micro-batch, padding included; None where it is not made of tokens.
    """
    job = plan.job
    if tokens is not None:
        job = replace(job, sequence_length=-(-tokens // (job.micro_batch * job.sequences_per_sample)))
    return estimate_memory(plan.spec, job, plan.hardware, trace=facts.trace, calibration=facts.calibration)
