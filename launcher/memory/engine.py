"""What the engine (DDP, ZeRO) holds: sharded states, buckets, gathered layers, host memory, saving."""

from __future__ import annotations

from launcher.facts.hardware import Hardware
from launcher.facts.model import ModelSpec
from launcher.memory.job import MemoryJob
from launcher.memory.states import WIDTHS, States, base_weight_bytes, shard_states, state_widths

ZERO3_LIVE_ELEMENTS = 1_000_000_000
"""DeepSpeed's default for both stage3_max_live_parameters and stage3_max_reuse_distance."""
PROCESS_BYTES = 1 << 30
"""Host memory of one worker beside tensors: interpreter and libraries, rounded up."""


def sharded_states(spec: ModelSpec, job: MemoryJob) -> States:
    widths = state_widths(job.engine, job.precision, job.dtype, job.zero_stage, job.optim, job.adapter)
    frozen = 0
    if job.adapter:
        dtype = job.dtype
        if job.engine == "deepspeed":
            dtype = "float32" if job.precision == "fp32" else "bfloat16"
        frozen = base_weight_bytes(
            spec, dtype, job.quantization, double_quant=job.double_quant, upcast_rest=True
        )
    elif job.trainable_params < spec.loaded_params:
        frozen = int((spec.loaded_params - job.trainable_params) * widths.weight)
    if job.reference_model:
        frozen += int(spec.loaded_params * widths.weight)
    return shard_states(
        job.trainable_params,
        frozen,
        widths,
        zero_stage=job.zero_stage if job.engine == "deepspeed" else 0,
        data_parallel=job.data_parallel,
        devices_per_node=job.devices_per_node,
        offload_optimizer=job.offload_optimizer != "none",
        offload_param=job.offload_param != "none",
    )


def engine_buffers(spec: ModelSpec, job: MemoryJob) -> int:
    """The model's own buffers, and what the engine allocates to reduce and gather."""
    held = spec.layout.mask_buffer
    width = 4 if job.precision == "fp32" else 2
    if job.document_mask and job.attention != "flash_attention_2":
        rows, length = job.rows
        held += rows * length**2 * (width if job.attention == "eager" else 1)
    if job.engine != "deepspeed":
        # The reducer's buckets copy every gradient.
        trained = 4 if job.adapter else WIDTHS[job.dtype]
        return held + (job.trainable_params * trained if job.data_parallel > 1 else 0)
    if job.zero_stage == 0:
        bucket = min(job.reduce_bucket_size, job.trainable_params)
        return held + (width * bucket if job.data_parallel > 1 else 0)
    buckets = 2 if job.overlap_comm and job.zero_stage < 3 else 1
    held += buckets * width * job.reduce_bucket_size
    if job.zero_stage == 3:
        held += width * min(ZERO3_LIVE_ELEMENTS, spec.params)
    return held


def save_peak(spec: ModelSpec, job: MemoryJob, resident: int) -> int:
    """ZeRO-3 gathers module by module to save; other engines write what they hold."""
    if job.engine != "deepspeed" or job.zero_stage < 3:
        return resident
    largest = max(spec.vocab_size * spec.layout.embed_width, spec.linear_weights // spec.num_layers)
    return resident + (4 if job.precision == "fp32" else 2) * largest


def host_bytes(spec: ModelSpec, job: MemoryJob, hardware: Hardware, total: int) -> int:
    """Host memory of a node: workers, offloaded states, a ZeRO-3 model gathered to be saved."""
    local = min(job.devices_per_node, job.data_parallel)
    host = local * PROCESS_BYTES + sharded_states(spec, job).host
    if hardware.is_cpu:
        host += local * total
    if job.engine == "deepspeed" and job.zero_stage == 3:
        host += spec.params * (4 if job.precision == "fp32" else 2)
    return host
