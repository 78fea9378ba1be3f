"""The moments of a step from a trace: the engine's states, and what the real model keeps. Pure.

A trace knows one device that shards nothing. Weights, optimizer states and buffers are the engine's
(engines/), gradients are sharded as the engine shards them; activations, logits and temporaries are traced.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from launcher.machine.hardware import AMPERE, Hardware
from launcher.memory.job import Components, Held, MemoryJob
from launcher.memory.phases import CUDA_CONTEXT, buffers, fragmented
from launcher.models.memory_trace import Trace, TracedStep
from launcher.models.model import ModelSpec
from launcher.tasks import task_named

# What of a job changes its activations, besides the micro-batch.
_CHOICES = (
    "sequence_length", "precision", "dtype", "quantization", "kbit_norms", "trainable_params", "adapter",
    "adapted", "uneven", "whole", "adapter_dropout", "checkpointing", "attention", "optim", "document_mask",
    "one_row", "padded", "one_by_one", "cast_inputs", "chunked",
)  # fmt: skip


def choices_of(job: MemoryJob, hardware: Hardware) -> dict[str, Any]:
    """What a trace of this job depends on: a trace holds for the jobs that choose alike."""
    capability = hardware.compute_capability
    return {
        **{name: getattr(job, name) for name in _CHOICES},
        "cast_by": job.engine.name if job.engine.casts(job.precision) else None,
        "keeps_gradients": job.accumulation != 1 and not job.reduces_each,
        "on_cpu": hardware.is_cpu,
        "flash": capability is not None and capability >= AMPERE,
    }


def why_not(job: MemoryJob, task: str) -> str | None:
    """Why a job cannot be traced; None when it can be."""
    if own := task_named(task).untraceable or job.engine.untraceable(job):
        return own
    if job.offload_activations != "none":
        return "a trace has the inputs of layers on the device"
    if job.liger:
        return "Liger's kernels are compiled on the device"
    if job.tensor_parallel > 1:
        return "tensor parallelism splits the layers"
    if job.sequence_parallel > 1:
        return "each rank has a part of the tokens"
    if job.spread > 1:
        return "model.device_map spreads the layers over devices"
    return None


def traced_phases(
    trace: Trace | None, spec: ModelSpec, job: MemoryJob, hardware: Hardware
) -> dict[str, Components] | None:
    """Components at each moment that may hold the peak; None where the trace does not cover the job."""
    if trace is None or why_not(job, spec.task) is not None:
        return None
    step = trace.step_for(choices_of(job, hardware))
    if step is None:
        return None
    engine = job.engine
    states = engine.states(spec, job)
    resident = Components(
        weights=states.weights,
        optimizer=states.optimizer,
        # The mask over documents is an activation of the trace.
        buffers=buffers(spec, replace(job, document_mask=False), hardware),
        context=0 if hardware.is_cpu else CUDA_CONTEXT,
    )
    gradients = states.gradients
    if job.accumulation == 1 and engine.keeps_gradients(job):
        # Their partition is there from the start.
        resident, gradients = replace(resident, gradients=gradients), 0
    phases = _fullest(step, resident, job.micro_batch, gradients, engine.held(spec, job))
    if engine.steps_on_shards or "step" not in phases:
        # Only torch's optimizers are traced.
        phases["step"] = engine.at_step(resident, states.gradients, spec, job, hardware)
    if step.fragmentation is None:
        return phases if job.expandable else {name: fragmented(parts) for name, parts in phases.items()}
    lost = step.fragmentation.at(job.micro_batch)
    return {name: replace(parts, temporary=parts.temporary + lost) for name, parts in phases.items()}


def _fullest(
    step: TracedStep, resident: Components, micro_batch: int, gradients: int, held: Held
) -> dict[str, Components]:
    """The fullest moment of each phase; `gradients`: bytes of all of them as the engine keeps them."""
    share = gradients / step.gradients if step.gradients else 0.0
    phases: dict[str, Components] = {}
    for moment in step.moments:
        logits = moment.logits.at(micro_batch)
        parts = replace(
            resident,
            gradients=resident.gradients + round(share * moment.gradients.at(micro_batch)),
            activations=moment.activations.at(micro_batch),
            logits=logits,
            buffers=resident.buffers + _held_at(moment.phase, logits, held),
            temporary=moment.temporary.at(micro_batch),
        )
        if moment.phase not in phases or parts.total > phases[moment.phase].total:
            phases[moment.phase] = parts
    return phases


def _held_at(phase: str, logits: int, held: Held) -> int:
    """What the engine holds at a traced moment; the loss differs from the layers by its logits."""
    if phase == "forward":
        return held.forward
    if phase != "backward":
        return 0
    return held.head if logits else held.layers
