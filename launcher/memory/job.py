"""What an estimate is computed from: the job, and what its engine holds in memory or sends between ranks.

The base class of engines describes one that keeps a complete copy of the model on each rank;
`launcher/engines/` has the engines, which override what they shard, cast or gather. Pure arithmetic in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from launcher.machine.hardware import Hardware
from launcher.memory.states import (
    MIXED,
    Moments,
    Shape,
    States,
    StateWidths,
    adapter_shapes,
    base_weight_bytes,
    largest_tensor,
    model_shapes,
    moments,
    optimizer_of,
    read_experts,
    shard_states,
)
from launcher.models.capabilities import holds_mask
from launcher.models.layers.feed_forward import FOUR_BITS
from launcher.models.layers.layout import WIDTHS, Dtypes
from launcher.models.model import ModelSpec

SAVED_FILE_BYTES = 50 * 10**9
"""transformers' default max_shard_size: copied to the host at a time to be written."""

_FOREACH_COPIES = {"adamw_torch": 1, "adagrad": 2, "rmsprop": 1}
"""Copies of all values that torch's `foreach` makes: denominators, and of Adagrad the scaled gradients."""
_LOOP_COPIES = {"adamw_torch": 2, "adagrad": 1, "rmsprop": 1, "adafactor": 2}
"""Copies of the values of the tensor that is updated; one of the previous tensor still has a name."""
_WIDENED = 2
"""Further copies that Adafactor makes of 16-bit values: gradient and parameter in float32."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """How completions are generated; lengths in tokens."""

    completion_length: int
    steps_per_generation: int | None
    """Micro-batches of one generation; None: those of a step."""
    iterations: int
    """Steps over each generation."""
    vllm_share: float
    """Of the device, which vLLM takes in the same process; 0 without."""
    vllm_sleeps: bool
    """Its memory is freed while the model trains."""
    vllm_tensor_parallel: int
    elsewhere: bool
    """A server generates."""

    def rows(self, job: MemoryJob) -> int:
        """Completions of one generation on one device."""
        return job.micro_batch * (self.steps_per_generation or job.accumulation or 1)

    def per_step(self, job: MemoryJob) -> float:
        """Generations of one optimizer step."""
        accumulation = job.accumulation or 1
        return accumulation / ((self.steps_per_generation or accumulation) * self.iterations)

    @property
    def itself(self) -> bool:
        """Whether the trained model generates, with a cache in its own memory."""
        return not self.vllm_share and not self.elsewhere


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
    engine: EngineMemory
    zero_stage: int
    offload_optimizer: str
    """none | cpu | nvme"""
    offload_param: str
    """none | cpu | nvme"""
    optim: str
    checkpointing: bool
    attention: str
    """eager | sdpa | flash_attention_2 | flex_attention | varlen"""
    reduce_bucket_size: int
    allgather_bucket_size: int
    overlap_comm: bool
    eval_batch: int
    """Samples of an evaluation batch on one device; 0: the job does not evaluate."""
    accumulation: int | None = None
    """Micro-batches per step; at 1 no gradient outlives a step. None: gradients are assumed to."""
    offload_activations: str = "none"
    """none | cpu: where checkpoints keep the inputs of layers."""
    in_backward: bool = False
    """Each weight is updated as soon as its gradient is complete, which is freed then."""
    adapter_dropout: float = 0.0
    sequences_per_sample: int = 1
    """Sequences of `sequence_length` that one sample of a micro-batch brings: 2 for preference pairs."""
    passes: int = 1
    """Forward passes over which the sequences of a sample are spread; the activations of all are kept."""
    mini_batch: int = 0
    """Sequences whose activations are held at a time (GradCache); 0: those of the whole micro-batch."""
    gathered: int = 1
    """Ranks whose samples each sample is compared with."""
    matryoshka: int = 0
    """Widths of an embedding that MatryoshkaLoss trains; 0: there is no such loss."""
    reference_model: bool = False
    """A frozen second copy of the weights is held on the device."""
    loaded_copies: int = 1
    """Copies of the weights in host memory before they move to the devices."""
    extra_forwards: int = 0
    """Forward passes without gradients of each micro-batch, besides the one of training."""
    document_mask: bool = False
    """Rows hold several documents, which a mask keeps apart (FlashAttention does without)."""
    spread: int = 1
    """Devices over which one process spreads its layers (device_map)."""
    one_row: bool = False
    """The sequences of a micro-batch are laid end to end in one row."""
    liger: bool = False
    """Liger's kernels: no logits of the complete vocabulary, leaner norms and feed-forward blocks."""
    chunked: bool = False
    """The loss takes the logits of some hundred tokens at a time (model.loss)."""
    one_by_one: bool = False
    """Attention varlen calls torch's kernel for each document, where none takes all of them."""
    grouped: bool = True
    """CUDA's 16-bit kernel of this attention takes keys of groups of heads."""
    cast_inputs: bool = True
    """Adapters copy their input into their own dtype (adapter.cast_input_dtype_enabled)."""
    padded: bool = False
    """A batch carries a mask of its padding."""
    kbit_norms: str = "float32"
    """Dtype of what a quantised base has beside its quantised matrices."""
    tensor_parallel: int = 1
    """Devices that share one copy's matrices; `data_parallel` counts copies."""
    sequence_parallel: int = 1
    """Devices that share each sample's tokens (Ulysses, context parallelism); see `tensor_parallel`."""
    adapted: tuple[str, ...] | None = None
    """Paths of the modules that have an adapter (`adapted_paths`); None: all linears."""
    adapter_rank: int = 0
    """Mean rank over these modules; 0: the one that gives `trainable_params`."""
    uneven: bool = False
    """Layers have different adapters: in closed form all count as if they had the mean of them."""
    whole: tuple[str, ...] = ()
    """Paths of modules that are trained completely beside an adapter."""
    extra_frozen: int = 0
    """Bytes of embedding copies that adapters over added tokens hold; ZeRO-3 trains them (`whole_copies`)."""
    reduces_each: bool = False
    """FSDP2: gradients become shards after every micro-batch, not after the last one of a step."""
    each_loads: bool = False
    """FSDP2: every rank reads all weights, not one rank for all."""
    optim_args: str = ""
    """trainer.optim_args, which gives SGD and RMSprop a momentum."""
    own_states: float | None = None
    """Bytes that the optimizer of `python:` keeps of each trained value; None: `optim` decides."""
    optimizer_buffers: int = 4
    """Offload to NVMe: page-locked buffers of a sub-group of the optimizer's each."""
    param_buffers: int = 5
    """Offload to NVMe: page-locked buffers of a parameter each."""
    param_buffer_values: int = 100_000_000
    """Values of one of those; DeepSpeed's default."""
    params_in_host: int = 1_000_000_000
    """Offload to NVMe: values of a rank's parameters that stay in host memory all the same (max_in_cpu)."""

    maps_weights: bool = False
    """Weights are read through memory maps, and stay in the file's pages until they move to the device."""
    rounds_pinned: bool = False
    """Page-locked buffers are rounded up to powers of two."""
    expandable: bool = True
    """The allocator's segments grow (PYTORCH_ALLOC_CONF), so that little between blocks is lost."""

    pixels: tuple[int, ...] = ()
    """Pixel values of the prepared samples with the most, descending; (): the rows are not prepared."""
    pixels_of_image: int = 0
    """Of the largest image, where `pixels` are known."""

    rollout: Rollout | None = None
    """How the model writes its own samples; None: it does not."""

    def to_json(self) -> dict[str, Any]:
        """Its fields, with the engine's name."""
        return {**asdict(self), "engine": self.engine.name}

    @property
    def sequences(self) -> int:
        """Of a micro-batch."""
        return self.micro_batch * self.sequences_per_sample

    @property
    def forwards(self) -> int:
        """Forward passes of a micro-batch that are followed by a backward pass."""
        if not self.mini_batch:
            return self.passes
        return self.passes * -(-self.sequences // self.passes // self.mini_batch)

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of a forward pass, and tokens of each."""
        sequences = self.sequences // self.passes
        if self.mini_batch:
            sequences = min(self.mini_batch, sequences)
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
    nccl: int = 0
    """Buffers of NCCL's communicators."""

    @property
    def outside(self) -> int:
        """Not in tensors: what no estimate of them scales."""
        return self.context + self.nccl

    @property
    def total(self) -> int:
        resident = self.weights + self.gradients + self.optimizer + self.buffers + self.outside
        return resident + self.activations + self.logits + self.temporary


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that an engine gathers and reduces at the moments of a step; zero when the optimizer runs."""

    forward: int = 0
    """At the loss."""
    head: int = 0
    """In the backward pass of the loss."""
    layers: int = 0
    """In the backward pass of a layer."""
    bottom: int = 0
    """In that of the first layer."""
    embedding: int = 0
    unsharded: float = 0.0
    """Bytes of a trained value's gradient while its layer runs; 0 where it is sharded at once."""


class EngineMemory:
    """An engine that keeps a complete copy of the model on each rank."""

    name: ClassVar[str]
    """As in `sharding.engine`. In capitals it names the engine's only instance in its module."""
    has_stages: ClassVar[bool] = False
    """Whether `sharding.zero_stage` decides what is sharded."""
    ring_attention: ClassVar[bool] = False
    """Whether ranks that share a sample pass keys and values round; else they swap tokens for heads."""
    steps_on_shards: ClassVar[bool] = False
    """The optimizer updates shards, so a traced step of one complete copy does not predict it."""
    named_parameters: ClassVar[bool] = True
    """The optimizer gets the model's own parameters, by which bitsandbytes finds the embeddings."""
    splits_tied_head: ClassVar[bool] = False
    """Tensor parallelism leaves the logits of a tied head distributed, and computes the loss of them."""

    def __reduce__(self) -> str:
        """Pickle and copy as the engine's only instance."""
        return self.name.upper()

    def __repr__(self) -> str:
        return self.name

    def label(self, zero_stage: int | None) -> str:
        """Name of the strategy in tables."""
        raise NotImplementedError

    # What is sharded.

    def stage(self, job: MemoryJob) -> int:
        """What ranks share, as ZeRO counts: 0 nothing, 1 optimizer states, 2 gradients, 3 weights as well."""
        return 0

    def stages(self, job: MemoryJob) -> Sequence[int]:
        """Stages that a recipe which sets none may choose between."""
        return (job.zero_stage,)

    def reduces_each(self, job: MemoryJob) -> bool:
        """Whether gradients are reduced after every micro-batch, not after the last one of a step."""
        return False

    def offloads(self) -> Sequence[tuple[str, str]]:
        """(optimizer, parameters): offloading that a recipe which sets none may choose between."""
        return ()

    def overlaps(self, job: MemoryJob) -> bool:
        """Whether gradients are sent while the backward pass computes further ones."""
        return True

    def communicators(self, job: MemoryJob) -> tuple[int, ...]:
        """Ranks of each of NCCL's communicators that a rank is in: of all, and of those that share a copy."""
        group = job.tensor_parallel * job.sequence_parallel
        return (job.data_parallel * group, *((job.data_parallel, group) if group > 1 else ()))

    def casts(self, precision: str) -> bool:
        """Whether the engine casts the weights for the forward pass."""
        return False

    def casts_frozen(self, precision: str) -> bool:
        """Whether it casts what is neither trained nor quantised to the 16 bits of the computation."""
        return False

    def keeps_gradients(self, job: MemoryJob) -> bool:
        """Whether the gradients' memory is taken before they exist: they wait for the next micro-batch."""
        return job.accumulation != 1 or job.in_backward

    def frees_gradients(self, job: MemoryJob) -> bool:
        """Whether gradients are gone between steps."""
        return True

    def whole_copies(self, job: MemoryJob) -> int:
        """Values of embedding copies that are trained completely (adapters over added tokens)."""
        return 0

    # Bytes per value.

    def trained_width(self, job: MemoryJob) -> int:
        """A trained value as the module holds it."""
        return 4 if job.adapter else WIDTHS[job.dtype]

    def reduced_width(self, job: MemoryJob) -> int:
        """A gradient as it is sent to be reduced."""
        return int(self.widths(job).gradient)

    def optimizer_width(self, job: MemoryJob) -> int:
        """A trained value as the optimizer sees it."""
        return self.trained_width(job)

    def master_width(self, job: MemoryJob) -> int:
        """The master copy that the engine keeps in addition to the module."""
        return 0

    def frozen_dtype(self, job: MemoryJob) -> str:
        """Dtype of weights that are not trained and not quantized."""
        return job.dtype

    def widths(self, job: MemoryJob) -> StateWidths:
        """Bytes per trainable parameter before sharding."""
        width = self.trained_width(job)
        return StateWidths(width, width, optimizer_of(job.optim).per_value(width))

    def dtypes(self, job: MemoryJob, *, on_cpu: bool) -> Dtypes:
        """Widths of what flows through a layer."""
        base = WIDTHS[job.dtype if job.quantization == "none" else job.kbit_norms]
        adapter = 4 if job.adapter else None
        if job.precision in MIXED:
            return Dtypes(2, base, True, adapter, on_cpu)
        return Dtypes(base, base, False, adapter, on_cpu)

    # Bytes on a device.

    def states(self, spec: ModelSpec, job: MemoryJob) -> States:
        """Weights, gradients and optimizer states of one rank, offloaded ones apart."""
        moments_ = self._optimizer_moments(spec, job)
        sharded, whole = self.frozen_bytes(spec, job)
        states = shard_states(
            job.trainable_params,
            sharded,
            self.widths(job),
            stage=self.stage(job),
            data_parallel=job.data_parallel,
            optimizer_bytes=self.master_width(job) * job.trainable_params + moments_.device,
        )
        ranks = job.data_parallel if self.stage(job) else 1
        gradients = states.gradients
        if job.in_backward:
            gradients = min(gradients, int(self.widths(job).gradient) * largest_tensor(spec))
        return replace(
            states,
            weights=states.weights + whole,
            gradients=gradients,
            pageable=-(-moments_.pageable // ranks),
        )

    def frozen_bytes(self, spec: ModelSpec, job: MemoryJob) -> tuple[int, int]:
        """Bytes of frozen weights before sharding, and of those that every device holds completely."""
        dtype = self.frozen_dtype(job)
        frozen = 0
        if job.adapter:
            frozen = base_weight_bytes(
                spec,
                dtype,
                job.quantization,
                double_quant=job.double_quant,
                upcast_rest=job.kbit_norms == "float32",
            )
        elif job.trainable_params < spec.loaded_params:
            frozen = (spec.loaded_params - job.trainable_params) * WIDTHS[dtype]
        if job.reference_model:
            frozen += spec.loaded_params * WIDTHS[dtype]
        return frozen + self.frozen_copies(job), 0

    def frozen_copies(self, job: MemoryJob) -> int:
        """Bytes of embedding copies that stay for the entire run and are not trained."""
        return job.extra_frozen

    def trained_shapes(self, spec: ModelSpec, job: MemoryJob) -> list[Shape]:
        """The trained tensors as the optimizer sees them."""
        if job.adapter:
            return adapter_shapes(spec, job.trainable_params, job.adapted)
        return model_shapes(spec)

    def _optimizer_moments(self, spec: ModelSpec, job: MemoryJob) -> Moments:
        optimizer = optimizer_of(job.optim, job.optim_args)
        trained, width = job.trainable_params, self.optimizer_width(job)
        if job.own_states is not None:
            return Moments(int(job.own_states * trained))
        if optimizer.library == "torch":
            return Moments(int(optimizer.per_value(width) * trained))
        shapes = self.trained_shapes(spec, job)
        counted = sum(shape.values * shape.count for shape in shapes)
        kept = moments(optimizer, shapes, width, named=self.named_parameters)
        # Adapters are counted at their mean rank, and a part of a model may be frozen.
        return Moments(kept.device * trained // counted, kept.pageable * trained // counted)

    def buffers(self, spec: ModelSpec, job: MemoryJob) -> int:
        """The model's own buffers, and what the engine allocates for the entire run to reduce gradients."""
        held = spec.layout.mask_buffer
        if job.document_mask and holds_mask(job.attention):
            rows, length = job.rows
            width = 4 if job.precision == "fp32" else 2
            held += rows * length**2 * (width if job.attention == "eager" else 1)
        return held + self.reduction_buffers(spec, job)

    def reduction_buffers(self, spec: ModelSpec, job: MemoryJob) -> int:
        """What the engine allocates for the entire run to reduce gradients."""
        return 0

    def held(self, spec: ModelSpec, job: MemoryJob) -> Held:
        """What comes and goes with the moments of a step; `buffers` stay for the entire run."""
        return Held()

    def step(self, spec: ModelSpec, job: MemoryJob, hardware: Hardware) -> int:
        """Bytes besides states and gradients at the worst moment of the optimizer's step.

        As read in torch 2.13 (optim/adamw.py and others: on CUDA `foreach` updates all tensors at once, a CPU
        one after another; fused kernels and plain SGD allocate nothing) and transformers 5.23
        (optimization.Adafactor). Clipping allocates one number per tensor, then scales in place.
        """
        if job.offload_optimizer != "none":
            return 0
        ranks = job.data_parallel if self.stage(job) else 1
        updated = -(-(job.trainable_params + self.whole_copies(job)) // ranks)
        updated = self.updated_at_once(spec, job, updated)
        gradients, width = self.step_gradients(job, updated), self.optimizer_width(job)
        if not hardware.is_cpu and job.optim in _FOREACH_COPIES:
            temporary = _FOREACH_COPIES[job.optim] * width * updated
        else:
            temporary = self._looped(spec, job, width) // ranks
        return gradients + max(temporary, self.joined_gradients(job, updated))

    def at_step(self, resident: Components, gradients: int, spec: ModelSpec, job: MemoryJob,
                hardware: Hardware) -> Components:  # fmt: skip
        """What is held at the worst moment of the optimizer's step. gradients: those of the passes."""
        step = self.step(spec, job, hardware)
        if self.frees_at_step(job):  # `step` has them, as long as they are there
            gradients = min(gradients, step)
            step -= gradients
        return replace(resident, gradients=gradients, temporary=step)

    def updated_at_once(self, spec: ModelSpec, job: MemoryJob, updated: int) -> int:
        """Of `updated` values of a rank, those that a call of the optimizer updates."""
        return min(updated, largest_tensor(spec)) if job.in_backward else updated

    def frees_at_step(self, job: MemoryJob) -> bool:
        """Whether the gradients of the backward passes are gone when the optimizer is called."""
        return False

    def step_gradients(self, job: MemoryJob, updated: int) -> int:
        """Bytes of the copies of `updated` gradients that the engine makes for the step."""
        return 0

    def joined_gradients(self, job: MemoryJob, updated: int) -> int:
        """Bytes of `updated` gradients, besides their copies, that are gone when the optimizer is called."""
        return 0

    def _looped(self, spec: ModelSpec, job: MemoryJob, width: int) -> int:
        """Bytes of temporaries where tensors are updated one after another."""
        copies = _LOOP_COPIES.get(job.optim, 0)
        if not copies:
            return 0
        shapes = self.trained_shapes(spec, job)
        alone = max((shape.values for shape in shapes if shape.count == 1), default=0)
        repeated = max((shape.values for shape in shapes if shape.count > 1), default=0)
        if job.optim == "adafactor":
            copies, width = copies + (_WIDENED if width < 4 else 0), 4
        return width * max(copies * alone, (copies + 1) * repeated)

    def save_peak(self, spec: ModelSpec, job: MemoryJob, resident: int) -> int:
        """Bytes on one device while it saves."""
        return resident

    def load_peak(self, spec: ModelSpec, job: MemoryJob, weights: int) -> int:
        """Bytes on one device while weights are loaded, of which it will hold `weights`; no context."""
        if job.quantization == "none":
            return weights + self.gathered_to_load(spec, job)
        # transformers does not shard a quantized base while it loads it (from_pretrained:
        # is_deepspeed_zero3_enabled() and not is_quantized): each rank holds all of it until it is sharded.
        # peft widens what is not packed, whatever becomes of it then.
        whole = sum(self.frozen_bytes(spec, replace(job, kbit_norms="float32")))
        # A matrix is read in 16 bits, then quantized on the device.
        largest = 2 * max(linear.weights for linear in spec.linears)
        if job.quantization in FOUR_BITS:
            largest = max(largest, read_experts(spec))
        return max(weights, whole) + largest

    def gathered_to_load(self, spec: ModelSpec, job: MemoryJob) -> int:
        """Bytes of the tensor or module that is complete on the device while its shard is made."""
        return 0

    # Bytes in host memory and on disk.

    def loads_once(self, job: MemoryJob) -> bool:
        """Whether one rank of a node reads the weights for all."""
        return False

    def loads_on_host(self, job: MemoryJob) -> bool:
        """Whether every rank has the quantised weights in the host's memory until they are sharded."""
        return False

    def saving(self, spec: ModelSpec, job: MemoryJob, local: int, *, on_cpu: bool) -> int:
        """Host memory of a node while the model or shards of the optimizer are gathered to be written.

        local: ranks of the node.
        """
        return 0 if on_cpu else min(self.saved_params(spec, job) * self.trained_width(job), SAVED_FILE_BYTES)

    def saved_params(self, spec: ModelSpec, job: MemoryJob) -> int:
        """Parameters of the result."""
        return job.trainable_params if job.adapter else spec.loaded_params

    def result(self, spec: ModelSpec, job: MemoryJob) -> int:
        """Bytes of the trained weights as one save writes them."""
        width = 4 if job.adapter else WIDTHS[self.frozen_dtype(job)]
        return self.saved_params(spec, job) * width

    def checkpoint(self, spec: ModelSpec, job: MemoryJob, *, weights_alone: bool) -> int:
        """Bytes of one checkpoint: weights and, unless `weights_alone`, what continues the run."""
        weights = self.result(spec, job)
        if weights_alone:
            return weights
        optimizer = int(job.trainable_params * self.widths(job).optimizer)
        return self.checkpoint_copies(job) * weights + optimizer

    def checkpoint_copies(self, job: MemoryJob) -> int:
        """Copies of the weights in a checkpoint."""
        return 1

    # Text.

    def untraceable(self, job: MemoryJob) -> str | None:
        """Why a trace of one complete copy does not hold for this engine; None where it does."""
        return None

    def notes(self, job: MemoryJob) -> list[str]:
        """What the figures assume."""
        return []
