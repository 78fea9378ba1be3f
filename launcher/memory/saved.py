"""Bytes of what a run writes: its result, and one checkpoint. Pure."""

from __future__ import annotations

from launcher.facts.model import ModelSpec
from launcher.memory.job import WIDTHS, MemoryJob
from launcher.memory.states import engine_width, state_widths


def result_bytes(model: ModelSpec, job: MemoryJob) -> int:
    """The trained weights as one save writes them: the adapter's, or the model's."""
    if job.adapter:
        return job.trainable_params * 4
    return model.loaded_params * (
        engine_width(job.precision) if job.engine == "deepspeed" else WIDTHS[job.dtype]
    )


def checkpoint_bytes(model: ModelSpec, job: MemoryJob, *, weights_alone: bool) -> int:
    """One checkpoint: weights and, unless `weights_alone`, what continues the run.

    DeepSpeed below stage 3 writes the module's states beside the model's own file.
    """
    weights = result_bytes(model, job)
    if weights_alone:
        return weights
    widths = state_widths(job.engine, job.precision, job.dtype, job.zero_stage, job.optim, job.adapter)
    copies = 2 if job.engine == "deepspeed" and job.zero_stage < 3 else 1
    return copies * weights + int(job.trainable_params * widths.optimizer)
