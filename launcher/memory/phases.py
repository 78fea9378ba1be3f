"""The moments of a training step that may hold the peak, each with its components."""

from __future__ import annotations

from dataclasses import replace

from launcher.facts.hardware import MIB, Hardware
from launcher.facts.model import ModelSpec
from launcher.memory.activations import Dtypes, activation_bytes, logits_bytes, working_bytes
from launcher.memory.engine import engine_buffers, sharded_states
from launcher.memory.job import Components, MemoryJob
from launcher.memory.states import WIDTHS, States

CUDA_CONTEXT = 1343 * MIB
"""Context of a V100 by NVML before any tensor, from Hugging Face's perf_train_gpu_one page. Newer
devices were not measured here; the figure serves them as an upper value."""


def flow_dtypes(job: MemoryJob, hardware: Hardware) -> Dtypes:
    base = 4 if job.quantization != "none" else WIDTHS[job.dtype]
    if job.engine == "deepspeed":
        # The engine casts the whole module, adapters included.
        width = 4 if job.precision == "fp32" else 2
        adapter = width if job.adapter else None
        residual = base if job.quantization != "none" else width
        return Dtypes(width, residual, False, adapter, hardware.is_cpu)
    adapter = 4 if job.adapter else None
    if job.precision in ("bf16", "fp16"):
        return Dtypes(2, base, True, adapter, hardware.is_cpu)
    return Dtypes(base, base, False, adapter, hardware.is_cpu)


def _lora_rank(spec: ModelSpec, job: MemoryJob) -> int:
    """Mean rank over all linears that gives this number of trainable parameters."""
    if not job.adapter:
        return 0
    widths = sum((x.in_features + x.out_features) * x.count for x in spec.linears)
    adapter = job.trainable_params - (spec.head.own_params if spec.head.saved else 0)
    return max(1, adapter // max(widths, 1))


def _forward_temporary(spec: ModelSpec, job: MemoryJob, dtypes: Dtypes) -> int:
    """Weights in another dtype that live beside the stored ones."""
    largest = max(linear.weights for linear in spec.linears)
    head = spec.head.in_features * spec.head.out_features
    if job.quantization != "none":
        return 2 * max(largest, head if dtypes.autocast else 0)
    if not (dtypes.autocast and WIDTHS[job.dtype] == 4):
        return 0
    if job.adapter and job.checkpointing:
        return 2 * (spec.linear_weights // spec.num_layers + head)
    return 2 * (spec.linear_weights + spec.num_layers * spec.layout.experts + head)


def _step_temporary(spec: ModelSpec, job: MemoryJob, hardware: Hardware) -> int:
    """What the optimizer step allocates and frees."""
    if job.offload_optimizer != "none":
        return 0
    shards = job.data_parallel if job.engine == "deepspeed" and job.zero_stage else 1
    updated = -(-job.trainable_params // shards)
    temporary = 0
    if job.engine == "deepspeed" and (job.zero_stage or job.precision != "fp32"):
        temporary += 4 * updated  # gradients in float32, beside the master copy
    if job.optim == "adamw_torch":
        # On CUDA all tensors at once; on a CPU one after another.
        at_once = updated
        if hardware.is_cpu:
            largest = max(spec.vocab_size * spec.layout.embed_width, spec.linears[0].weights)
            at_once = min(updated, largest)
        temporary += 4 * at_once
    return temporary


def _early_gradients(spec: ModelSpec, job: MemoryJob, states: States) -> int:
    """Gradients that the head and the first layer computed again have by then."""
    if job.adapter or not job.checkpointing:
        return 0
    last = spec.layout.stacks[-1]
    layer = sum(linear.weights for linear in last.linears) // last.layers
    head = spec.head.in_features * spec.head.out_features
    return states.gradients * (head + layer) // spec.params


def training_phases(spec: ModelSpec, job: MemoryJob, hardware: Hardware) -> dict[str, Components]:
    states, dtypes = sharded_states(spec, job), flow_dtypes(job, hardware)
    rows, length = job.rows
    activations = activation_bytes(
        spec,
        dtypes,
        micro_batch=rows,
        sequence=length,
        attention=job.attention,
        checkpointing=job.checkpointing,
        rank=_lora_rank(spec, job),
        adapter_dropout=job.adapter_dropout > 0,
        masked=job.document_mask,
    )
    working = working_bytes(spec, dtypes, rows * length)
    resident = Components(
        weights=states.weights,
        gradients=states.gradients,
        optimizer=states.optimizer,
        buffers=engine_buffers(spec, job),
        context=0 if hardware.is_cpu else CUDA_CONTEXT,
    )
    backward = replace(
        resident,
        gradients=0 if job.accumulation == 1 else states.gradients,
        activations=activations.start,
        logits=max(logits_bytes(spec, dtypes, rows, length), working),
        temporary=_forward_temporary(spec, job, dtypes),
    )
    # The first layer's activations are freed before its own gradients and the embedding's exist.
    still_missing = 0
    if not job.adapter and states.gradients and job.zero_stage < 2:
        later = spec.embedding_params + spec.linear_weights // spec.num_layers
        still_missing = later * states.gradients // max(spec.params, 1)
    left = max(0, activations.last_layer + working - still_missing)
    return {
        "backward": backward,
        "recompute": replace(
            backward,
            activations=activations.recompute,
            logits=working,
            gradients=max(backward.gradients, _early_gradients(spec, job, states)),
        ),
        "gradients": replace(resident, activations=left),
        "step": replace(resident, temporary=_step_temporary(spec, job, hardware)),
    }
