"""What an engine holds in memory and sends between ranks: the part of an engine that the estimate reads.

The base class describes an engine that keeps a complete copy of the model on each rank; `launcher/engines/`
has the engines, which override what they shard, cast or gather. Pure arithmetic in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from launcher.facts.architectures import Layout
from launcher.facts.capabilities import holds_mask
from launcher.facts.hardware import Hardware
from launcher.facts.model import FOUR_BITS, ModelSpec
from launcher.memory.job import WIDTHS, Components, MemoryJob
from launcher.memory.operations import Dtypes
from launcher.memory.states import (
    MIXED,
    Moments,
    Shape,
    States,
    StateWidths,
    adapter_shapes,
    base_weight_bytes,
    model_shapes,
    moments,
    optimizer_of,
    shard_states,
)

SAVED_FILE_BYTES = 50 * 10**9
"""transformers' default max_shard_size: copied to the host at a time to be written."""

_FOREACH_COPIES = {"adamw_torch": 1, "adagrad": 2, "rmsprop": 1}
"""Copies of all values that torch's `foreach` makes: denominators, and of Adagrad the scaled gradients."""
_LOOP_COPIES = {"adamw_torch": 2, "adagrad": 1, "rmsprop": 1, "adafactor": 2}
"""Copies of the values of the tensor that is updated; one of the previous tensor still has a name."""
_WIDENED = 2
"""Further copies that Adafactor makes of 16-bit values: gradient and parameter in float32."""


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
        return job.accumulation != 1

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
        return replace(states, weights=states.weights + whole, pageable=-(-moments_.pageable // ranks))

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
        return updated

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


def read_experts(spec: ModelSpec) -> int:
    """Bytes of the 16-bit tensors that are there while the largest parameter of experts is read.

    Gate and up projections of all experts of a layer, stacked each, and both as one.
    """
    largest = max(stack.experts * 2 // 3 for stack in spec.layout.stacks)
    return 2 * 2 * max(largest, *spec.foreign_experts, 0)


def layer_values(spec: ModelSpec) -> int:
    """Parameters of the widest layer."""
    return max(map(layer_params, spec.layout.stacks))


def layer_params(stack: Layout) -> int:
    """Parameters of one of its layers."""
    linears = sum(linear.params // linear.count for linear in stack.linears if "{}" in linear.path)
    return linears + stack.layer_extra


def packed_layer(spec: ModelSpec, width: int) -> int:
    """Bytes of the widest layer whose matrices are packed in 4 bits; `width`: of its other values."""
    inside = [
        (sum(x.weights for x in stack.linears if "{}" in x.path) + stack.experts, stack)
        for stack in spec.layout.stacks
    ]
    return max(packed // 2 + width * (layer_params(stack) - packed) for packed, stack in inside)


def largest_tensor(spec: ModelSpec) -> int:
    """Values of the largest single parameter."""
    return max(shape.values for shape in model_shapes(spec))
