"""What the engine (DDP, FSDP2, ZeRO) holds on a device: sharded states, buckets, gathered layers, peaks."""

from __future__ import annotations

from dataclasses import replace

from launcher.facts.attention import holds_mask
from launcher.facts.model import ModelSpec
from launcher.memory.job import WIDTHS, MemoryJob
from launcher.memory.optimizers import (
    Moments,
    Shape,
    adapter_shapes,
    model_shapes,
    moments,
    optimizer_of,
)
from launcher.memory.states import (
    MIXED,
    States,
    base_weight_bytes,
    engine_width,
    master_width,
    shard_states,
    state_widths,
    trained_width,
)

ALLREDUCE_VALUES = 500_000_000
"""Values that DeepSpeed's stage 0 flattens at a time to reduce them (MEMORY_OPT_ALLREDUCE_SIZE)."""
SUB_GROUP_VALUES = 1_000_000_000
"""DeepSpeed's default sub_group_size: values of a partition that stage 3 updates at a time."""


def sharded_states(spec: ModelSpec, job: MemoryJob) -> States:
    """States of one rank, offloaded ones apart."""
    widths = state_widths(job.engine, job.precision, job.dtype, job.zero_stage, job.optim, job.adapter)
    kept = _optimizer_moments(spec, job)
    frozen, whole = _frozen_bytes(spec, job)
    master = master_width(job.precision, job.zero_stage) if job.engine == "deepspeed" else 0
    states = shard_states(
        job.trainable_params,
        frozen,
        widths,
        zero_stage=3 if job.engine == "fsdp" else job.zero_stage if job.engine == "deepspeed" else 0,
        data_parallel=job.data_parallel,
        optimizer_bytes=master * job.trainable_params + kept.device,
    )
    states = _with_copies(states, job)
    ranks = job.data_parallel if _shards_optimizer(job) else 1
    states = replace(states, weights=states.weights + whole, pageable=-(-kept.pageable // ranks))
    if job.engine == "fsdp":
        return _fsdp_states(states, job)
    if job.engine == "deepspeed" and job.zero_stage == 1 and job.accumulation == 1:
        # Each gradient moves through the bucket into the rank's partition, as in stage 2.
        states = replace(states, gradients=-(-states.gradients // job.data_parallel))
    if job.engine == "deepspeed" and job.offload_optimizer != "none":
        states = _offload_optimizer(states, spec, job)
    if job.engine == "deepspeed" and job.offload_param != "none":
        states = _offload_params(states, spec, job)
    return states


def _with_copies(states: States, job: MemoryJob) -> States:
    """Embedding copies that are trained stay in the engine's width, unlike the adapter beside them."""
    owned, width = -(-job.whole_copies // job.data_parallel), engine_width(job.precision)
    kept = optimizer_of(job.optim, job.optim_args).per_value(4)
    return replace(
        states,
        weights=states.weights + width * owned,
        gradients=states.gradients + width * owned,
        optimizer=states.optimizer + int((master_width(job.precision, job.zero_stage) + kept) * owned),
    )


def _shards_optimizer(job: MemoryJob) -> bool:
    return job.engine == "fsdp" or (job.engine == "deepspeed" and job.zero_stage > 0)


def keeps_gradients(job: MemoryJob) -> bool:
    """Whether the gradients' place is taken before they are there.

    They wait for the next micro-batch, or lie in ZeRO-3's partition, which is allocated for the whole run.
    """
    partition = job.engine == "deepspeed" and job.zero_stage == 3 and job.offload_optimizer == "none"
    return job.accumulation != 1 or partition


def waits_unsharded(job: MemoryJob) -> bool:
    """Whether FSDP2 keeps whole gradients between the micro-batches of a step."""
    accumulates = job.accumulation != 1 and not job.reduces_each
    return job.engine == "fsdp" and accumulates and job.data_parallel > 1


def trained_shapes(spec: ModelSpec, job: MemoryJob) -> list[Shape]:
    """The trained tensors as the optimizer sees them: ZeRO gives it one flat vector."""
    if job.engine == "deepspeed" and job.zero_stage:
        return [Shape(job.trainable_params)]
    if job.adapter:
        return adapter_shapes(spec, job.trainable_params, job.adapted)
    return model_shapes(spec)


def _optimizer_moments(spec: ModelSpec, job: MemoryJob) -> Moments:
    optimizer = optimizer_of(job.optim, job.optim_args)
    if job.engine == "deepspeed":
        width = 4
    else:
        width = trained_width(job.engine, job.precision, job.dtype, job.adapter)
    trained = job.trainable_params
    if optimizer.library == "torch":
        return Moments(int(optimizer.per_value(width) * trained))
    shapes = trained_shapes(spec, job)
    counted = sum(shape.values * shape.count for shape in shapes)
    kept = moments(optimizer, shapes, width, named=job.engine != "deepspeed")
    # Adapters are counted at their mean rank, and a part of a model may be frozen.
    return Moments(kept.device * trained // counted, kept.pageable * trained // counted)


def _frozen_bytes(spec: ModelSpec, job: MemoryJob) -> tuple[int, int]:
    """Bytes of frozen weights before sharding, and of those that each device holds whole."""
    width = engine_width(job.precision) if job.engine == "deepspeed" else WIDTHS[job.dtype]
    frozen = 0
    if job.adapter:
        dtype = job.dtype
        if job.engine == "deepspeed":
            dtype = "float32" if job.precision == "fp32" else "bfloat16"
        frozen = base_weight_bytes(
            spec, dtype, job.quantization, double_quant=job.double_quant, upcast_rest=True
        )
    elif job.trainable_params < spec.loaded_params:
        frozen = (spec.loaded_params - job.trainable_params) * width
    if job.reference_model:
        frozen += spec.loaded_params * width
    if not job.whole_copies and job.engine != "fsdp":  # there they come and go with the table (held.py)
        frozen += job.extra_frozen
    # FSDP2 leaves quantised weights unsharded (accelerate ignores Params4bit whose storage is uint8).
    return (0, frozen) if job.engine == "fsdp" and job.quantization != "none" else (frozen, 0)


def _fsdp_states(states: States, job: MemoryJob) -> States:
    if job.offload_param != "none":
        # CPUOffloadPolicy moves parameters, gradients and optimizer states as one.
        return replace(states, weights=0, gradients=0, optimizer=0, host=states.total)
    if waits_unsharded(job):
        # Between the micro-batches of a step nothing is reduced: gradients wait unsharded, until the last
        # backward pass turns them into shards layer by layer.
        waiting = job.trainable_params * (2 if job.precision in MIXED else WIDTHS[job.dtype])
        states = replace(states, gradients=max(states.gradients, waiting))
    return states


def _offload_optimizer(states: States, spec: ModelSpec, job: MemoryJob) -> States:
    """Master copy, its gradients and the moments leave the device; so do gradients, from stage 2 on."""
    width, ranks = engine_width(job.precision), job.data_parallel
    owned = -(-(job.trainable_params + job.whole_copies) // ranks)
    updated = states.optimizer + 4 * owned
    if job.zero_stage == 3:
        # The partition of 16-bit gradients is page-locked for the whole run.
        staging = width * owned
        if job.offload_optimizer == "nvme":
            staging += job.optimizer_buffers * 4 * _sub_group(spec, job, owned)
            return replace(states, gradients=0, optimizer=0, staging=staging, nvme=updated)
        return replace(states, gradients=0, optimizer=0, host=updated, staging=staging)
    # What travels back in 16 bits and one gradient; stage 2 accumulates its partition there, too.
    staging = width * (owned + largest_tensor(spec))
    if job.zero_stage == 2 and job.accumulation != 1:
        staging += width * owned
    gradients = 0 if job.zero_stage == 2 or job.accumulation == 1 else states.gradients
    return replace(states, gradients=gradients, optimizer=0, host=updated, staging=staging)


def _sub_group(spec: ModelSpec, job: MemoryJob, owned: int) -> int:
    """Values of a rank's largest sub-group: it is closed by the parameter that fills it."""
    return min(owned, SUB_GROUP_VALUES + -(-largest_tensor(spec) // job.data_parallel))


def _offload_params(states: States, spec: ModelSpec, job: MemoryJob) -> States:
    width = engine_width(job.precision)
    if job.offload_param == "cpu":
        return replace(states, weights=0, host=states.host + states.weights)
    stays = min(states.weights, width * job.params_in_host)
    staging = states.staging + job.param_buffers * job.param_buffer_values * width
    if stays < states.weights:
        # What an updated sub-group is written through.
        staging += width * _sub_group(spec, job, -(-job.trainable_params // job.data_parallel))
    return replace(
        states,
        weights=0,
        host=states.host + stays,
        staging=staging,
        # Each parameter is written when it is made, also one that is then kept in host memory.
        nvme=states.nvme + states.weights,
    )


def largest_tensor(spec: ModelSpec) -> int:
    """Values of the largest single parameter."""
    return max(shape.values for shape in model_shapes(spec))


def engine_buffers(spec: ModelSpec, job: MemoryJob) -> int:
    """The model's own buffers, and what the engine allocates to reduce for the whole run (see held.py)."""
    held = spec.layout.mask_buffer
    width = 4 if job.precision == "fp32" else 2
    if job.document_mask and holds_mask(job.attention):
        rows, length = job.rows
        held += rows * length**2 * (width if job.attention == "eager" else 1)
    trained = job.trainable_params
    if job.engine == "ddp":
        # The reducer's buckets copy every gradient (gradient_as_bucket_view stays off).
        own = trained_width(job.engine, job.precision, job.dtype, job.adapter)
        return held + (own * trained if job.data_parallel > 1 else 0)
    if job.engine == "fsdp":
        return held
    if job.zero_stage == 0:
        return held + (width * min(ALLREDUCE_VALUES, trained) if job.data_parallel > 1 else 0)
    if job.zero_stage == 3:
        return held + width * job.reduce_bucket_size
    return held + (width * largest_tensor(spec) if job.offload_optimizer != "none" else 0)


def _gathered_module(spec: ModelSpec) -> int:
    """Values of the largest module that ZeRO-3 gathers on its own: all experts of a layer are one."""
    return max(largest_tensor(spec), *(stack.experts for stack in spec.layout.stacks))


def save_peak(spec: ModelSpec, job: MemoryJob, resident: int) -> int:
    """Bytes on one device while it saves: sharded engines gather module by module, others what they hold."""
    if job.engine == "deepspeed" and job.zero_stage == 3:
        return resident + engine_width(job.precision) * _gathered_module(spec)
    if job.engine == "fsdp" and job.data_parallel > 1:
        width = trained_width(job.engine, job.precision, job.dtype, job.adapter)
        return resident + width * largest_tensor(spec)
    return resident


def load_peak(spec: ModelSpec, job: MemoryJob, weights: int) -> int:
    """Bytes on one device while the weights, of which it will hold `weights`, come in; no context."""
    if job.quantization != "none":
        # transformers shards no quantised base while it loads it (from_pretrained:
        # is_deepspeed_zero3_enabled() and not is_quantized): each rank has all of it until ZeRO-3 shards it.
        whole = sum(_frozen_bytes(spec, job))
        # A matrix is read in 16 bits, then quantised on the device.
        return max(weights, whole) + 2 * max(linear.weights for linear in spec.linears)
    if job.engine == "deepspeed" and job.zero_stage == 3:
        return weights + engine_width(job.precision) * _gathered_module(spec)
    if job.engine == "fsdp":
        return weights + WIDTHS[job.dtype] * largest_tensor(spec)
    return weights
