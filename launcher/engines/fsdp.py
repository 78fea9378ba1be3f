"""FSDP2 through accelerate: weights, gradients and optimizer states are sharded, layer by layer.

`sharding.engine: auto` takes it where nothing else fits: DeepSpeed's stages, offload and quantised bases are
covered by more tests. FSDP2 runs over CPU processes too, from one on; on GPUs nothing of it was measured.

The memory as read in torch 2.13 (distributed/fsdp/_fully_shard) and accelerate 1.15 (utils/fsdp_utils.py). On
CUDA the copies run on streams of their own, and a buffer is free again when its stream is through; the
figures are those of the moments at which the code releases it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.engines.engine import ALONE, Engine
from launcher.memory.job import Held, MemoryJob
from launcher.memory.states import (
    MIXED,
    States,
    largest_tensor,
    layer_values,
    model_shapes,
    packed_layer,
    quantized_constants,
)
from launcher.models.layers.layout import WIDTHS, Dtypes
from launcher.models.model import ModelSpec
from launcher.recipe.optimizer_needs import IN_SHARDS
from launcher.tasks.task import precomputes

if TYPE_CHECKING:
    from launcher.plan.draft import Draft, Refusal
    from launcher.plan.inputs import Facts
    from launcher.plan.plan import Plan
    from launcher.recipe.schema import Recipe

_SHARDS = "checkpoints of engine fsdp are shards, which from_pretrained cannot read"
_CONFIG = "trainer.accelerator_config"


class Fsdp(Engine):
    name = "fsdp"
    steps_on_shards = True
    ring_attention = True
    is_automatic = False
    stores_packed = True
    alone_env = ALONE  # else accelerate forms no group, and the Trainer refuses FSDP
    shares = {"cp_size": "context parallelism is accelerate's, with FSDP2"}
    lacks = {
        "tp_size": (
            "tensor parallelism with engine fsdp: transformers splits the layers among all ranks when it "
            "reads them, which leaves accelerate's FSDP2 none to shard over",
            "use sharding.engine: deepspeed (AutoTP, ZeRO 0 to 2)",
        ),
        "sp_size": (
            "engine fsdp has no sequence parallelism: Ulysses is DeepSpeed's",
            "use sharding.engine: deepspeed; fsdp has cp_size",
        ),
    }

    offload_limit = (
        "engine fsdp keeps weights, gradients and optimizer states together: on the device, or in the host's "
        "memory",
        "write offload_param: cpu, which moves them all, or use sharding.engine: deepspeed",
    )

    def label(self, zero_stage: int | None) -> str:
        return "FSDP2"

    def stage(self, job: MemoryJob) -> int:
        return 3

    def offloads(self) -> Sequence[tuple[str, str]]:
        """CPUOffloadPolicy moves parameters, gradients and optimizer states together."""
        return ("none", "none"), ("cpu", "cpu")

    def casts(self, precision: str) -> bool:
        """Layers are cast when they are gathered."""
        return precision in MIXED

    def trained_width(self, job: MemoryJob) -> int:
        """accelerate casts trained parameters up to float32 before it shards them."""
        return 4 if job.precision in MIXED else super().trained_width(job)

    def reduces_each(self, job: MemoryJob) -> bool:
        return job.reduces_each

    def reduced_width(self, job: MemoryJob) -> int:
        """Gradients are kept in float32 and sent in the precision of the computation."""
        return 2 if job.precision in MIXED else super().reduced_width(job)

    def dtypes(self, job: MemoryJob, *, on_cpu: bool) -> Dtypes:
        if job.precision in MIXED:
            # Layers are gathered in 16 bits, adapters included, and FSDP2 casts what flows between them.
            return Dtypes(2, 2, True, 2 if job.adapter else None, on_cpu)
        return super().dtypes(job, on_cpu=on_cpu)

    def waits_unsharded(self, job: MemoryJob) -> bool:
        """Whether complete gradients are kept between the micro-batches of a step."""
        return job.accumulation != 1 and not job.reduces_each and job.data_parallel > 1

    def states(self, spec: ModelSpec, job: MemoryJob) -> States:
        states = super().states(spec, job)
        # Nothing is reduced between micro-batches: the last backward pass turns complete gradients into
        # shards, layer by layer.
        waiting = job.trainable_params * self._gathered_width(job) if self.waits_unsharded(job) else 0
        if job.offload_param == "none":
            return replace(states, gradients=max(states.gradients, waiting))
        # Each shard is page-locked by itself; constants of packed weights are no parameters, and stay.
        _, constants = self.frozen_bytes(spec, job)
        shards = ((self._shard_width(job) * shape.values, shape.count) for shape in model_shapes(spec))
        return replace(
            states,
            weights=constants,
            gradients=waiting,
            optimizer=0,
            host=states.total - constants,
            pinned=tuple(int(size) // job.data_parallel for size, count in shards for _ in range(count)),
        )

    def _shard_width(self, job: MemoryJob) -> float:
        """Bytes of a weight as its shard holds it."""
        if not job.adapter:
            return self.trained_width(job)
        return WIDTHS[job.dtype] if job.quantization == "none" else 0.5

    def _gathered_width(self, job: MemoryJob) -> int:
        return 2 if job.precision in MIXED else WIDTHS[job.dtype]

    def frozen_bytes(self, spec: ModelSpec, job: MemoryJob) -> tuple[int, int]:
        frozen, _ = super().frozen_bytes(spec, job)
        if job.quantization == "none":
            return frozen, 0
        # The constants of packed weights are no parameters.
        constants = quantized_constants(spec, job.quantization, double_quant=job.double_quant)
        return frozen - constants, constants

    def frozen_copies(self, job: MemoryJob) -> int:
        """They come and go with the embedding (see `held`)."""
        return 0

    def held(self, spec: ModelSpec, job: MemoryJob) -> Held:
        """Units: each layer, the last norm with the head, and the embedding (part of the head when tied).

        A gathered unit is copied out of its receive buffer; in the forward pass that buffer lives until the
        next unit is there, in the backward pass it is fetched while the previous unit runs. Gradients are
        complete until their unit has run, then copied into a buffer that is freed when the next unit's is
        filled. A unit whose input needs no gradient (the embedding, with a tied head) is reduced at the end.

        Rows of added tokens are written into a copy of the gathered table when it is used
        (TrainableTokensLayer of peft, get_merged_weights): the head keeps its copy for the backward pass, and
        each table has a complete gradient.
        """
        width = self._gathered_width(job)
        head = width * spec.head.in_features * spec.head.out_features
        embedding = width * spec.embedding_params
        whole = width * layer_values(spec)
        layer = whole if job.quantization == "none" else packed_layer(spec, width)
        share = min(1.0, job.trainable_params / spec.loaded_params)
        trained = 0.0 if job.adapter else 1.0
        reduced, of_head = share * whole, trained * head
        local = width if job.accumulation == 1 or job.reduces_each else 0.0
        if job.offload_param != "none":
            # A unit's shards come to the device before they are gathered, its gradient's shard leaves it.
            moved = self._shard_width(job) * layer_values(spec) / job.data_parallel
            layer += int(moved * (2 if trained else 1))
        table = width * job.extra_frozen // WIDTHS[job.dtype] // (1 if spec.head.tied else 2)
        if spec.head.tied:
            kept = head + of_head
            return Held(
                forward=int(head + layer + table),
                head=head + 2 * table,
                layers=int(kept + 2 * layer + reduced),
                bottom=int(kept + layer + reduced),
                embedding=int(kept + reduced + table),
                unsharded=local,
            )
        return Held(
            forward=2 * head + table,
            head=head + 2 * table,
            layers=int(2 * layer + max(reduced, of_head)),
            bottom=int(layer + embedding + reduced),
            embedding=int(embedding * (1 + trained) + max(reduced, trained * embedding) + table),
            unsharded=local,
        )

    def save_peak(self, spec: ModelSpec, job: MemoryJob, resident: int) -> int:
        if job.data_parallel == 1:
            return resident
        return resident + self.trained_width(job) * largest_tensor(spec)

    def loads_on_host(self, job: MemoryJob) -> bool:
        return job.offload_param != "none" and job.quantization != "none"

    def load_peak(self, spec: ModelSpec, job: MemoryJob, weights: int) -> int:
        if not self.loads_on_host(job):
            return super().load_peak(spec, job, weights)
        # Quantised in the host's memory; a unit at a time comes to the device, is cut, and leaves it.
        width = WIDTHS[job.kbit_norms]
        outside = width * max(spec.embedding_params, spec.head.in_features * spec.head.out_features)
        return weights + max(packed_layer(spec, width), outside)

    def gathered_to_load(self, spec: ModelSpec, job: MemoryJob) -> int:
        return WIDTHS[job.dtype] * largest_tensor(spec)

    def loads_once(self, job: MemoryJob) -> bool:
        return not job.each_loads

    def saving(self, spec: ModelSpec, job: MemoryJob, local: int, *, on_cpu: bool) -> int:
        """Rank 0 gathers what was trained."""
        return self.saved_params(spec, job) * self.trained_width(job)

    def untraceable(self, job: MemoryJob) -> str | None:
        if self.casts(job.precision) and job.quantization != "none":
            return "FSDP2 casts the weights that are not quantized when it gathers them"
        return None

    def notes(self, job: MemoryJob) -> list[str]:
        found = []
        if self.waits_unsharded(job):
            found.append("gradients stay unsharded between the micro-batches of a step")
        return found

    # The plan.

    def own_optimizer_conflict(self, profile: Mapping[str, object]) -> tuple[str, str] | None:
        message = "optimizer in python was not tried with the shards of engine fsdp"
        return message, "use sharding.engine: ddp"

    def can_offload(self, optimizer: str, param: str) -> bool:
        moves = param == "cpu" and optimizer in ("none", "cpu")
        return moves or super().can_offload(optimizer, param)

    def precision_conflict(self, precision: str) -> tuple[str, str] | None:
        if precision != "fp16":
            return None
        message = "fp16 and engine fsdp: FSDP2 with a loss scaler was not tested"
        return message, "use precision: bf16 or fp32, or use sharding.engine: deepspeed"

    def decide(self, draft: Draft, recipe: Recipe, facts: Facts, processes: int) -> None:
        super().decide(draft, recipe, facts, processes)
        for conflict in _conflicts(draft):
            raise draft.refuse(*conflict)
        weights_alone = draft.trainer.save_only_model
        settings: dict[str, tuple[object, str]] = {
            "version": (2, "FSDP1 is deprecated"),
            "auto_wrap_policy": (
                "TRANSFORMER_BASED_WRAP",
                "a layer is the unit that is gathered; the model's class names it (_no_split_modules)",
            ),
            "reshard_after_forward": (
                True,
                "a layer's weights are freed after its forward pass, as in ZeRO-3",
            ),
            "activation_checkpointing": (
                False,
                "FSDP's own recomputes with other dropout masks; the Trainer's is used",
            ),
            "cpu_ram_efficient_loading": _loading(draft),
            "cpu_offload": _offload(draft),
            "state_dict_type": (
                "FULL_STATE_DICT" if weights_alone else "SHARDED_STATE_DICT",
                "trainer.save_only_model: a model that from_pretrained reads"
                if weights_alone
                else "each rank writes its own shards; only the end of the run gathers the model",
            ),
        }
        for name, (value, reason) in settings.items():
            draft.put(f"fsdp.{name}", value, reason)
        if draft.trainer.push_to_hub and draft.trainer.hub_strategy is None and not weights_alone:
            draft.put("trainer.hub_strategy", "end", f"{_SHARDS}; the result is complete")
        _reduce_each(draft)

    def completed(self, job: MemoryJob, draft: Draft) -> MemoryJob:
        # trl computes the reference's log-probabilities before the model is sharded, with a copy of it.
        copied = draft.task.has_reference and precomputes(draft.fields(draft.trainer)) and not job.adapter
        return replace(
            job,
            loaded_copies=2 if copied else job.loaded_copies,
            reduces_each=_reduces_each(draft),
            each_loads=draft.fsdp.cpu_ram_efficient_loading is False,
        )

    def bucket_bytes(self, plan: Plan, gradients: int) -> int:
        return min(gradients, gradients // max(1, plan.spec.num_layers))  # of a layer

    def written_shares(self, plan: Plan, weights: int, states: int, copies: int) -> tuple[int, int]:
        """SHARDED_STATE_DICT: model and states alike."""
        each = (weights + states) // plan.hardware.num_devices
        return each, each


FSDP = Fsdp()


def _loading(draft: Draft) -> tuple[bool, str]:
    """Whether one rank of a node reads the weights for all, and why.

    The other ranks hold empty tensors until FSDP2 shards what rank 0 has, so nothing may be derived from the
    weights before: no rows for new tokens, and no new head, which the others would not have at all.
    """
    if draft.model.config is not None:
        return False, "random weights are made, alike on every rank"
    if draft.model.quantization_type != "none":
        return False, "each rank reads and quantises the weights, and keeps its shard"
    if draft.model.gguf_file:
        return False, "each rank reads the GGUF file, which is dequantised"
    if draft.model.add_tokens:
        return False, "each rank reads the weights: rows of added tokens are made from them"
    if not draft.task.head_in_checkpoint:
        return False, "each rank reads the weights: a new head is not in the checkpoint"
    return True, "one rank of a machine reads the weights, the others get their shards from it"


def _offload(draft: Draft) -> tuple[bool, str]:
    """Whether shards are in the host's memory between their uses, and why."""
    if draft.sharding.offload_param == "none":
        return False, "nothing is offloaded"
    together = "FSDP2 moves weights, gradients and optimizer states together"
    if draft.sharding.offload_optimizer == "none":
        draft.put("sharding.offload_optimizer", "cpu", together)
    return True, together


def _reduce_each(draft: Draft) -> None:
    """Have gradients reduced after every micro-batch, where the recipe leaves it open.

    Upstream's default waits for the last one: between the micro-batches of a step every rank would hold the
    gradients of the complete model, summed in the precision of the computation.
    """
    given = draft.trainer.accelerator_config
    if given is not None and (not isinstance(given, Mapping) or "gradient_accumulation_kwargs" in given):
        return
    reason = "gradients stay shards between the micro-batches of a step, as in ZeRO-3"
    draft.put(_CONFIG, {**(given or {}), "gradient_accumulation_kwargs": {"sync_each_batch": True}}, reason)


def _reduces_each(draft: Draft) -> bool:
    """Whether FSDP2 reduces gradients after every micro-batch."""
    config = draft.trainer.accelerator_config
    given = config.get("gradient_accumulation_kwargs") if isinstance(config, Mapping) else None
    return isinstance(given, Mapping) and bool(given.get("sync_each_batch"))


def _conflicts(draft: Draft) -> Iterator[Refusal]:
    """A refusal for each thing that FSDP2 cannot train, with what can."""
    optim, other = draft.trainer.optim, "use sharding.engine: deepspeed"
    if draft.task.is_encoder_decoder:
        message = (
            "engine fsdp and an encoder-decoder: both sides share an embedding, which FSDP2 refuses in two "
            "groups ('is shared with a parameter already managed by another FSDP group')"
        )
        yield ("engine-conflict", "sharding.engine", message, other)
    if draft.model.quantization_type == "int8":
        message = (
            "engine fsdp cannot shard int8 weights: bitsandbytes keeps constants on the weight itself, which "
            "FSDP2 replaces ('Parameter' object has no attribute 'CB')"
        )
        hint = f"use nf4, or {other} with zero_stage 2, or drop model.quantization"
        yield ("fsdp-quantized", "model.quantization", message, hint)
    every_save = draft.trainer.push_to_hub and draft.trainer.hub_strategy == "every_save"
    if every_save and not draft.trainer.save_only_model:
        hint = "use hub_strategy: end, or checkpoint to upload what a run can be resumed from"
        yield ("fsdp-push", "trainer.hub_strategy", _SHARDS, hint)
    if optim not in IN_SHARDS:
        message = f"optimizer {optim} does not update FSDP2's shards"
        hint = f"use one of {', '.join(IN_SHARDS)}, or {other}"
        yield ("fsdp-optimizer", "trainer.optim", message, hint)
