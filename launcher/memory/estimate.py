"""Peak memory of a training job on one device, in closed form: no model is built.

Four moments are compared: the start of the backward pass (kept activations and the loss), a layer
computed again, the end of the pass (all gradients), and the optimizer step. The components
reported are those of the moment that rules.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from launcher.facts.hardware import MIB, Hardware
from launcher.facts.model import ModelSpec
from launcher.memory.activations import (
    Dtypes,
    activation_bytes,
    eval_bytes,
    logits_bytes,
    working_bytes,
)
from launcher.memory.states import (
    WIDTHS,
    States,
    base_weight_bytes,
    overlap_comm_upper_bound,
    shard_states,
    state_widths,
)

CUDA_CONTEXT = 1343 * MIB
"""Context of a V100 by NVML before any tensor, from Hugging Face's perf_train_gpu_one page. Newer
devices were not measured here; the figure serves them as an upper value."""
MARGIN = 0.05
"""Share of the device left free: the caching allocator's fragmentation."""
LOW, HIGH = 0.95, 1.16
"""Range around the estimate: estimates of this kind fell short of published peaks by up to 16 %."""
ZERO3_LIVE_ELEMENTS = 1_000_000_000
"""DeepSpeed's default for both stage3_max_live_parameters and stage3_max_reuse_distance."""
PROCESS_BYTES = 1 << 30
"""Host memory of one worker beside tensors: interpreter and libraries, rounded up."""
MAX_MICRO_BATCH = 1 << 16


@dataclass(frozen=True, slots=True)
class MemoryJob:
    """What of a plan decides its memory; lengths in tokens, buckets in elements."""

    micro_batch: int
    sequence_length: int
    data_parallel: int
    devices_per_node: int
    precision: str
    """fp32 | bf16 | fp16 | bf16-true | fp16-true"""
    dtype: str
    """Dtype of the loaded weights."""
    quantization: str
    """none | int8 | nf4 | fp4"""
    double_quant: bool
    trainable_params: int
    adapter: bool
    engine: str
    """ddp | deepspeed"""
    zero_stage: int
    offload_optimizer: str
    offload_param: str
    optim: str
    checkpointing: bool
    attention: str
    """eager | sdpa | flash_attention_2"""
    reduce_bucket_size: int
    allgather_bucket_size: int
    overlap_comm: bool
    eval_batch: int
    accumulation: int | None = None
    """Micro-batches per step; at 1 no gradient outlives a step. None: gradients are assumed to."""
    adapter_dropout: float = 0.0
    sequences_per_sample: int = 1
    """Sequences of `sequence_length` that one sample of a micro-batch brings: 2 for preference pairs."""
    reference_model: bool = False
    """A frozen second copy of the weights is held on the device."""
    document_mask: bool = False
    """Rows hold several documents, which a mask keeps apart (FlashAttention does without)."""
    spread: int = 1
    """Devices over which one process spreads its layers (device_map)."""
    one_row: bool = False
    """The sequences of a micro-batch lie side by side in one row."""

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of a micro-batch, and tokens of each."""
        sequences = self.micro_batch * self.sequences_per_sample
        if self.one_row:
            return 1, sequences * self.sequence_length
        return sequences, self.sequence_length


@dataclass(frozen=True, slots=True)
class Components:
    """Bytes on one device at the moment that rules."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    buffers: int = 0
    temporary: int = 0
    context: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on one device; `host_bytes` on one node."""

    device_bytes: int | None
    fits: bool | None
    """`total` and `margin` together are at most `device_bytes`; None where that is unknown."""
    margin: int
    low: int
    high: int
    components: Components
    total: int
    save_peak: int
    eval_peak: int
    host_bytes: int
    phase: str
    """backward | recompute | gradients | step: the moment that rules."""
    trainable_params: int

    def to_json(self) -> dict[str, Any]:
        """The `memory` object of `plan --json`."""
        fields: dict[str, Any] = asdict(self)
        del fields["trainable_params"]
        return fields


def _dtypes(job: MemoryJob, hardware: Hardware) -> Dtypes:
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


def _states(spec: ModelSpec, job: MemoryJob) -> States:
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


def _lora_rank(spec: ModelSpec, job: MemoryJob) -> int:
    """Mean rank over all linears that gives this number of trainable parameters."""
    if not job.adapter:
        return 0
    widths = sum((x.in_features + x.out_features) * x.count for x in spec.linears)
    adapter = job.trainable_params - (spec.head.own_params if spec.head.saved else 0)
    return max(1, adapter // max(widths, 1))


def _buffers(spec: ModelSpec, job: MemoryJob) -> int:
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


def _phases(spec: ModelSpec, job: MemoryJob, hardware: Hardware) -> dict[str, Components]:
    states, dtypes = _states(spec, job), _dtypes(job, hardware)
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
        buffers=_buffers(spec, job),
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


def _share(parts: Components, devices: int) -> Components:
    """What one of the devices holds that share the layers; the head with its logits sits on one of them."""
    divided = ("weights", "gradients", "optimizer", "activations")
    return replace(parts, **{name: -(-getattr(parts, name) // devices) for name in divided})


def _save_peak(spec: ModelSpec, job: MemoryJob, resident: int) -> int:
    """ZeRO-3 gathers module by module to save; other engines write what they hold."""
    if job.engine != "deepspeed" or job.zero_stage < 3:
        return resident
    largest = max(spec.vocab_size * spec.layout.embed_width, spec.linear_weights // spec.num_layers)
    return resident + (4 if job.precision == "fp32" else 2) * largest


def _host_bytes(spec: ModelSpec, job: MemoryJob, hardware: Hardware, total: int) -> int:
    """Host memory of a node: workers, offloaded states, a ZeRO-3 model gathered to be saved."""
    local = min(job.devices_per_node, job.data_parallel)
    host = local * PROCESS_BYTES + _states(spec, job).host
    if hardware.is_cpu:
        host += local * total
    if job.engine == "deepspeed" and job.zero_stage == 3:
        host += spec.params * (4 if job.precision == "fp32" else 2)
    return host


def estimate_memory(spec: ModelSpec, job: MemoryJob, hardware: Hardware) -> MemoryEstimate:
    """Peak bytes of `job` on one device of `hardware`."""
    phases = {name: _share(parts, job.spread) for name, parts in _phases(spec, job, hardware).items()}
    phase, components = max(phases.items(), key=lambda item: item[1].total)
    total = components.total
    device = hardware.device_bytes
    margin = int(MARGIN * device) if device is not None else 0
    step = phases["step"]
    resident = step.total - step.temporary
    evaluation = eval_bytes(
        spec,
        _dtypes(job, hardware),
        batch=job.eval_batch * job.sequences_per_sample,
        sequence=job.sequence_length,
        attention=job.attention,
    )
    high = int(HIGH * total)
    if job.engine == "deepspeed" and job.overlap_comm:
        high = max(high, total + overlap_comm_upper_bound(job.reduce_bucket_size))
    return MemoryEstimate(
        device_bytes=device,
        fits=None if device is None else total + margin <= device,
        margin=margin,
        low=int(LOW * total),
        high=high,
        components=components,
        total=total,
        save_peak=_save_peak(spec, job, resident),
        eval_peak=resident - step.gradients + evaluation,
        host_bytes=_host_bytes(spec, job, hardware, total),
        phase=phase,
        trainable_params=job.trainable_params,
    )


def max_micro_batch(spec: ModelSpec, job: MemoryJob, hardware: Hardware) -> int:
    """Largest micro-batch that fits, 0 when none does; bounded by 65536 where memory is unknown."""

    def fits(size: int) -> bool:
        return estimate_memory(spec, replace(job, micro_batch=size), hardware).fits is not False

    if not fits(1):
        return 0
    low = 1
    while low < MAX_MICRO_BATCH and fits(2 * low):
        low *= 2
    if low >= MAX_MICRO_BATCH:
        return MAX_MICRO_BATCH
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
