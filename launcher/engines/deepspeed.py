"""DeepSpeed: ZeRO stages 0 to 3, offload to host memory and NVMe, AutoTP and Ulysses.

The memory as read in DeepSpeed 0.19.8 (runtime/engine.py, runtime/zero/stage_1_and_2.py, stage3.py,
partitioned_param_coordinator.py). On CUDA the copies run on streams of their own, and a buffer is free again
when its stream is through; the figures are those of the moments at which the code releases it. On a CPU
gloo copies what it scatters, NCCL does not; these copies are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from launcher.engines.deepspeed_config import key_of, record_profile, render_ds_config
from launcher.engines.deepspeed_nvme import decide_nvme, with_buffers
from launcher.engines.deepspeed_ops import used_operators
from launcher.engines.engine import ALONE, RANKS, CheckpointReading, Engine, counted, refuse_unused_path
from launcher.memory.job import Held, MemoryJob
from launcher.memory.states import (
    Shape,
    States,
    StateWidths,
    largest_tensor,
    layer_values,
    optimizer_of,
    packed_layer,
)
from launcher.models.layers.layout import WIDTHS, Dtypes
from launcher.models.model import ModelSpec
from launcher.plan.settings import HasSettings
from launcher.recipe.optimizer_needs import needs_of

if TYPE_CHECKING:
    from launcher.plan.draft import Draft, Refusal
    from launcher.plan.inputs import Facts
    from launcher.plan.plan import Plan
    from launcher.recipe.schema import Recipe

ALLREDUCE_VALUES = 500_000_000
"""Values that stage 0 flattens at a time to reduce them (MEMORY_OPT_ALLREDUCE_SIZE)."""
SUB_GROUP_VALUES = 1_000_000_000
"""Default of sub_group_size: values of a partition that stage 3 updates at a time."""
ZERO3_LIVE_VALUES = 1_000_000_000
"""Default of stage3_max_live_parameters: modules fetch ahead until so many values are there."""
_UNTESTED = "zero_allow_untested_optimizer"
ADAM = ("adamw_torch", "adamw_torch_fused")
"""Optimizers whose states (fp32 weights, two moments, a step) a universal checkpoint can hold."""
_FILES = {0: "complete states", 1: "shards", 2: "shards", 3: "sharded weights"}
"""What a checkpoint of a ZeRO stage holds."""
_NEXT_STAGE = {0: 2, 1: 2, 2: 3}
"""What saves memory next: stage 2 sends no more than stage 1."""


def engine_width(precision: str) -> int:
    """Bytes of a value in the module, which the engine casts completely."""
    return 4 if precision == "fp32" else 2


class DeepSpeed(Engine):
    name = "deepspeed"
    has_stages = True
    packages = ("deepspeed",)
    launcher = "deepspeed"
    has_autocast = False
    half_weights = "DeepSpeed holds fp32 master weights of its own"
    cpu_env = {}  # ACCELERATE_USE_CPU would make accelerate silently choose DDP
    alone_env = ALONE  # else DeepSpeed looks for MPI and stops: No module named 'mpi4py'
    shares = {
        "sp_size": "sequence parallelism is DeepSpeed's Ulysses",
        "tp_size": "DeepSpeed's AutoTP also takes several copies, and shares their optimizer states",
    }
    lacks = {
        "cp_size": (
            "engine deepspeed has no context parallelism: accelerate has it with FSDP2 alone",
            "use sharding.engine: fsdp; deepspeed has sp_size",
        )
    }
    steps_on_shards = True
    named_parameters = False
    splits_tied_head = True

    def label(self, zero_stage: int | None) -> str:
        return f"ZeRO-{zero_stage}"

    def stage(self, job: MemoryJob) -> int:
        return job.zero_stage

    def stages(self, job: MemoryJob) -> Sequence[int]:
        """Stage 3 cannot shard int8 matrices, nor layers that tensor-parallel ranks share."""
        return range(3 if job.quantization == "int8" or job.tensor_parallel > 1 else 4)

    def reduces_each(self, job: MemoryJob) -> bool:
        return job.zero_stage >= 2

    def overlaps(self, job: MemoryJob) -> bool:
        """Stage 0 reduces after the backward pass (engine.py, `allreduce_gradients`), stages 1 and 2 beside
        it with overlap_comm alone. What stage 3 prefetches was not measured: counted as hiding nothing."""
        return job.overlap_comm and job.zero_stage in (1, 2)

    def communicators(self, job: MemoryJob) -> tuple[int, ...]:
        """DeepSpeed makes another one of all ranks (utils/groups.py, `_clone_world_group`)."""
        every = super().communicators(job)
        return (every[0], *every)

    def offloads(self) -> Sequence[tuple[str, str]]:
        return ("none", "none"), ("cpu", "none"), ("cpu", "cpu")

    def casts(self, precision: str) -> bool:
        return True

    def casts_frozen(self, precision: str) -> bool:
        """The norms that peft turned into float32, too (engine.py, `_cast_module_mixed_precision`)."""
        return engine_width(precision) < 4

    def keeps_gradients(self, job: MemoryJob) -> bool:
        """ZeRO-3 allocates its partition of gradients for the entire run."""
        return job.accumulation != 1 or (job.zero_stage == 3 and job.offload_optimizer == "none")

    def frees_gradients(self, job: MemoryJob) -> bool:
        return job.zero_stage != 3

    def whole_copies(self, job: MemoryJob) -> int:
        """peft cannot train single rows of sharded weights: ZeRO-3 trains copies of complete embeddings."""
        return job.extra_frozen // WIDTHS[job.dtype] if job.zero_stage == 3 else 0

    def frozen_copies(self, job: MemoryJob) -> int:
        return 0 if self.whole_copies(job) else job.extra_frozen

    def optimizer_width(self, job: MemoryJob) -> int:
        return 4

    def master_width(self, job: MemoryJob) -> int:
        """ZeRO clones its partition even where the parameters are float32 already.

        Stage 3 means to avoid that, but compares a device with its name, which are never equal.
        """
        return 4 if job.zero_stage or job.precision != "fp32" else 0

    def adapter_width(self, job: MemoryJob) -> int:
        """The engine casts the complete module, except one whose weights were sharded when created.

        Stage 3 leaves adapters in peft's float32, and each of their products casts its input up. A quantised
        base is not sharded when it is created.
        """
        created = job.zero_stage == 3 and job.quantization == "none"
        return 4 if created else engine_width(job.precision)

    def frozen_dtype(self, job: MemoryJob) -> str:
        return "float32" if job.precision == "fp32" else "bfloat16"

    def widths(self, job: MemoryJob) -> StateWidths:
        width = engine_width(job.precision)
        weight = self.adapter_width(job) if job.adapter else width
        optimizer = self.master_width(job) + optimizer_of(job.optim).per_value(4)
        return StateWidths(weight, width, optimizer)

    def dtypes(self, job: MemoryJob, *, on_cpu: bool) -> Dtypes:
        width = engine_width(job.precision)
        adapter = self.adapter_width(job) if job.adapter else None
        residual = width if job.quantization == "none" else WIDTHS[job.kbit_norms]
        # Stage 3 replaces torch's linear by a function that always keeps its input (runtime/zero/linear.py).
        frozen_inputs = job.zero_stage == 3 and job.quantization == "none"
        return Dtypes(width, residual, False, adapter, on_cpu, frozen_inputs)

    def trained_shapes(self, spec: ModelSpec, job: MemoryJob) -> list[Shape]:
        """ZeRO gives the optimizer one flat vector."""
        return [Shape(job.trainable_params)] if job.zero_stage else super().trained_shapes(spec, job)

    def states(self, spec: ModelSpec, job: MemoryJob) -> States:
        states = self._with_copies(super().states(spec, job), job)
        if job.zero_stage == 1 and job.accumulation == 1:
            # Each gradient moves through the bucket into the rank's partition, as in stage 2.
            states = replace(states, gradients=-(-states.gradients // job.data_parallel))
        if job.offload_optimizer != "none":
            states = self._offload_optimizer(states, spec, job)
        if job.offload_param != "none":
            states = self._offload_params(states, spec, job)
        return states

    def _with_copies(self, states: States, job: MemoryJob) -> States:
        """Embedding copies that are trained stay in the engine's width, unlike the adapter."""
        owned, width = -(-self.whole_copies(job) // job.data_parallel), engine_width(job.precision)
        kept = optimizer_of(job.optim, job.optim_args).per_value(4)
        return replace(
            states,
            weights=states.weights + width * owned,
            gradients=states.gradients + width * owned,
            optimizer=states.optimizer + int((self.master_width(job) + kept) * owned),
        )

    def _offload_optimizer(self, states: States, spec: ModelSpec, job: MemoryJob) -> States:
        """Master copy, its gradients and the moments leave the device; from stage 2 on, gradients too."""
        width, ranks = engine_width(job.precision), job.data_parallel
        owned = -(-(job.trainable_params + self.whole_copies(job)) // ranks)
        updated = states.optimizer + 4 * owned
        if job.zero_stage == 3:
            # The partition of 16-bit gradients is page-locked for the entire run.
            staging, sub_group = width * owned, self._sub_group(spec, job, owned)
            if job.offload_optimizer == "nvme":
                staging += job.optimizer_buffers * 4 * sub_group
                return replace(states, gradients=0, optimizer=0, staging=staging, nvme=updated)
            # Gradients of each sub-group are page-locked in float32; weights and moments are not.
            pinned = (staging, *[4 * sub_group] * (owned // sub_group), 4 * (owned % sub_group))
            return replace(states, gradients=0, optimizer=0, host=updated, staging=staging, pinned=pinned)
        # Updated 16-bit values and one gradient; stage 2 accumulates its partition there as well.
        staging = width * (owned + largest_tensor(spec))
        if job.zero_stage == 2 and job.accumulation != 1:
            staging += width * owned
        gradients = 0 if job.zero_stage == 2 or job.accumulation == 1 else states.gradients
        # float32 weights and gradients, and what is staged; the moments are not page-locked.
        pinned = (4 * owned, 4 * owned, width * owned, staging - width * owned)
        return replace(states, gradients=gradients, optimizer=0, host=updated, staging=staging, pinned=pinned)

    def _sub_group(self, spec: ModelSpec, job: MemoryJob, owned: int) -> int:
        """Values of a rank's largest sub-group, which is closed by the parameter that fills it."""
        return min(owned, SUB_GROUP_VALUES + -(-largest_tensor(spec) // job.data_parallel))

    def _offload_params(self, states: States, spec: ModelSpec, job: MemoryJob) -> States:
        width = engine_width(job.precision)
        if job.offload_param == "cpu":
            # Trained weights lie in one buffer per sub-group.
            owned = -(-job.trainable_params // job.data_parallel)
            sub_group = self._sub_group(spec, job, owned)
            flat = (*[width * sub_group] * (owned // sub_group), width * (owned % sub_group))
            return replace(
                states, weights=0, host=states.host + states.weights, pinned=(*states.pinned, *flat)
            )
        stays = min(states.weights, width * job.params_in_host)
        staging = states.staging + job.param_buffers * job.param_buffer_values * width
        if stays < states.weights:
            # An updated sub-group is written through it.
            staging += width * self._sub_group(spec, job, -(-job.trainable_params // job.data_parallel))
        return replace(
            states,
            weights=0,
            host=states.host + stays,
            staging=staging,
            # Each parameter is written when it is created, also one that is then kept in host memory.
            nvme=states.nvme + states.weights,
        )

    def reduction_buffers(self, spec: ModelSpec, job: MemoryJob) -> int:
        width = engine_width(job.precision)
        if job.zero_stage == 0:
            return width * min(ALLREDUCE_VALUES, job.trainable_params) if job.data_parallel > 1 else 0
        if job.zero_stage == 3:
            return width * job.reduce_bucket_size
        return width * largest_tensor(spec) if job.offload_optimizer != "none" else 0

    def held(self, spec: ModelSpec, job: MemoryJob) -> Held:
        if not job.zero_stage:
            return Held()
        width, bucket, whole = engine_width(job.precision), job.reduce_bucket_size, self.whole_copies(job)
        # What is reduced is flattened into a copy.
        copy = width * min(bucket, job.trainable_params + whole)
        if job.zero_stage == 3:
            # A frozen embedding has no backward pass to wait for; a tied head has.
            unused = spec.embedding_params if job.adapter and not spec.head.tied else 0
            packed = spec.quantized_weights(job.quantization) if job.quantization != "none" else 0
            most = width * ZERO3_LIVE_VALUES
            every = min(most, width * (spec.params - unused - packed) + packed // 2)
            if job.adapter:
                every += self.adapter_width(job) * job.trainable_params + width * whole
            # In the backward pass each module frees its weights, as nothing uses them again in this pass.
            layer = packed_layer(spec, width) if packed else width * layer_values(spec)
            lowest = min(most, width * spec.embedding_params + layer)
            return Held(every, every, every + copy, lowest + copy, lowest + copy)
        # The first gradient brings the buckets, the end of the pass frees them. Stage 1 reduces only in the
        # last pass of a step, so before it the buckets exist from an earlier one.
        buckets = (2 if job.overlap_comm else 1) * width * bucket
        waiting = buckets if job.zero_stage == 1 and job.accumulation != 1 else 0
        filled = buckets + copy
        return Held(waiting, waiting, filled, filled, filled)

    def frees_at_step(self, job: MemoryJob) -> bool:
        """Stages 1 and 2 release what the passes made once they have a copy (stage_1_and_2.py, `step`)."""
        return job.zero_stage in (1, 2) and job.offload_optimizer == "none"

    def step_gradients(self, job: MemoryJob, updated: int) -> int:
        """Gradients in float32, in addition to the master copy."""
        return 4 * updated if self.master_width(job) else 0

    def updated_at_once(self, spec: ModelSpec, job: MemoryJob, updated: int) -> int:
        """Stage 3 steps by sub-groups and frees each one's float32 gradients (stage3.py, `step`)."""
        return self._sub_group(spec, job, updated) if job.zero_stage == 3 else updated

    def joined_gradients(self, job: MemoryJob, updated: int) -> int:
        """Those that are joined and then cast (`_prepare_fp32_grad_for_sub_group` at stage 3).

        At stages 1 and 2 the separate ones are alive until then.
        """
        width = engine_width(job.precision)
        joined = width * updated if width < 4 else 0
        return joined + width * updated if self.frees_at_step(job) else joined * (job.zero_stage == 3)

    def _gathered_module(self, spec: ModelSpec, job: MemoryJob) -> int:
        """Bytes of the largest module that ZeRO-3 gathers on its own: all experts of a layer are one."""
        values = max(largest_tensor(spec), *(stack.experts for stack in spec.layout.stacks))
        return engine_width(job.precision) * values

    def save_peak(self, spec: ModelSpec, job: MemoryJob, resident: int) -> int:
        return resident + (self._gathered_module(spec, job) if job.zero_stage == 3 else 0)

    def gathered_to_load(self, spec: ModelSpec, job: MemoryJob) -> int:
        return self._gathered_module(spec, job) if job.zero_stage == 3 else 0

    def loads_once(self, job: MemoryJob) -> bool:
        return job.zero_stage == 3

    def saving(self, spec: ModelSpec, job: MemoryJob, local: int, *, on_cpu: bool) -> int:
        """Rank 0 copies what was trained, then each rank its shard of the states."""
        owned = -(-job.trainable_params // job.data_parallel)
        optimizer = local * 4 * owned if job.zero_stage and not on_cpu else 0
        return max(engine_width(job.precision) * self.saved_params(spec, job), optimizer)

    def checkpoint_copies(self, job: MemoryJob) -> int:
        """Below stage 3 the module's states are written in addition to the model's own file."""
        return 2 if job.zero_stage < 3 else 1

    def untraceable(self, job: MemoryJob) -> str | None:
        if job.zero_stage == 3 and job.adapter:
            return "ZeRO-3 replaces frozen linear layers by a function of its own"
        return None

    def notes(self, job: MemoryJob) -> list[str]:
        if job.zero_stage and optimizer_of(job.optim, job.optim_args).library == "adafactor":
            return ["ZeRO's flat partitions cannot be factored: Adafactor keeps a value per parameter"]
        return []

    # The plan.

    def precision_conflict(self, precision: str) -> tuple[str, str] | None:
        if not precision.endswith("-true"):
            return None
        message = f"{precision} and DeepSpeed: its 16-bit engines keep fp32 master weights"
        return message, "use precision bf16 or fp16, or sharding.engine: ddp"

    def own_optimizer_conflict(self, profile: Mapping[str, object]) -> tuple[str, str] | None:
        if profile.get(_UNTESTED) is True:
            return None
        message = (
            "optimizer in python would get flat parts of the weights from engine deepspeed: one that reads "
            "matrices, such as Muon, computes something else with them"
        )
        hint = f"use sharding.engine: ddp; if it updates each element by itself, set {_UNTESTED}: true in a "
        return message, hint + "base profile (sharding.config)"

    def can_offload(self, optimizer: str, param: str) -> bool:
        return True  # fixes refuse what a stage cannot

    def decide(self, draft: Draft, recipe: Recipe, facts: Facts, processes: int) -> None:
        record_profile(draft, facts.profile, processes)
        _check_optimizer(draft)
        if "nvme" in (draft.sharding.offload_optimizer, draft.sharding.offload_param):
            decide_nvme(draft, facts.profile, facts.model, facts.hardware, processes)
        else:
            refuse_unused_path(draft)

    def sharing_conflicts(self, draft: Draft, name: str) -> Iterator[Refusal]:
        yield from super().sharing_conflicts(draft, name)
        if name != "tp_size":
            return
        stage = draft.sharding.zero_stage
        if stage == 3:
            message = "tensor parallelism with ZeRO-3 was not tested: both split the weights"
            hint = "use zero_stage: 2 or below, or ZeRO-3 alone"
            yield ("parallel-engine", "sharding.tp_size", message, hint)
        if stage == 0 and draft.precision == "bf16":
            message = (
                "tensor parallelism in bf16 at ZeRO-0: DeepSpeed clips there by the gradient norm of the "
                "first rank's parts alone"
            )
            path = key_of(draft, "sharding.zero_stage")
            yield ("parallel-engine", path, message, "use zero_stage: 1, or precision: fp32")

    def completed(self, job: MemoryJob, draft: Draft) -> MemoryJob:
        return with_buffers(job, draft)

    def stages_to_try(self, job: MemoryJob) -> tuple[int, ...]:
        if job.tensor_parallel > 1:
            # At stage 0 the optimizer for bf16 clips by a wrong norm (`sharing_conflicts`).
            return (1, 2) if job.precision == "bf16" else (0, 1, 2)
        needs_three = job.offload_param != "none" or job.offload_optimizer == "nvme"
        return tuple(range(3 if needs_three else 1 if job.offload_optimizer != "none" else 0, 4))

    def ds_config(self, plan: Plan) -> dict[str, Any] | None:
        return render_ds_config(plan)

    def compiled_ops(self, plan: Plan) -> list[str]:
        return used_operators(plan)

    def bucket_bytes(self, plan: Plan, gradients: int) -> int:
        return min(gradients, plan.job.reduce_bucket_size * int(self.widths(plan.job).gradient))

    def written_shares(self, plan: Plan, weights: int, states: int, copies: int) -> tuple[int, int]:
        if not plan.job.zero_stage:
            return super().written_shares(plan, weights, states, copies)
        each = states // copies
        return self.checkpoint_copies(plan.job) * weights + each, each

    def reads(self, old: HasSettings, new: HasSettings, before: int, after: int) -> CheckpointReading:
        """Its files are read by the same number of ranks alone, and stage 3 reads none of stages 1 and 2.

        As a universal checkpoint they are read by any number of ranks and every stage from 1 on. Seen with
        0.19.8 on a CPU (tests/contract/test_universal.py).
        """
        for name in ("offload_optimizer", "offload_param"):
            if "nvme" in (getattr(old.sharding, name), getattr(new.sharding, name)):
                lost = "DeepSpeed does not read states from NVMe again: it would silently use fresh moments"
                return CheckpointReading(f"sharding.{name}", lost, is_lost=True)
        if old.sharding.offload_optimizer != new.sharding.offload_optimizer:
            reason = (
                "DeepSpeedCPUAdam, which updates on the host, and torch's AdamW cannot read each other's "
                "states (KeyError: 'bias_correction')"
            )
            return CheckpointReading("sharding.offload_optimizer", reason)
        stages = int(old.sharding.zero_stage or 0), int(new.sharding.zero_stage or 0)
        why = [f"{counted(before)} wrote it, {counted(after)} shall read it"] if before != after else []
        if _FILES[stages[0]] != _FILES[stages[1]]:
            why.append(f"ZeRO-{stages[0]} wrote it, ZeRO-{stages[1]} shall read it")
        if why and (hindrance := _unconvertible(old, stages)):
            setting = RANKS if before != after else "sharding.zero_stage"
            return CheckpointReading(setting, f"the files cannot be converted: {hindrance}")
        return CheckpointReading(conversion="; ".join(why))


DEEPSPEED = DeepSpeed()


def _check_optimizer(draft: Draft) -> None:
    """RecipeError for an optimizer that ZeRO cannot use, a warning for one that it changes."""
    optim, stage = draft.trainer.optim, draft.sharding.zero_stage
    needs = needs_of(optim)
    if needs.whole and (3 if stage is None else stage) >= needs.from_stage:
        message = f"{optim} cannot train under engine deepspeed: {needs.whole}"
        hint = "use sharding.engine: ddp, or an optimizer such as adamw_torch_fused, adamw_8bit or adafactor"
        raise draft.refuse("zero-optimizer", "trainer.optim", message, hint)
    if needs.by_tensor:
        draft.warn(
            f"{optim} {needs.by_tensor} tensor by tensor; under ZeRO each rank's flat partition is one "
            "tensor to it, so it trains otherwise than under sharding.engine: ddp"
        )


def _unconvertible(old: HasSettings, stages: tuple[int, int]) -> str:
    """Why a universal checkpoint cannot be made or read; empty where it can."""
    optim, sharding = old.trainer.optim, old.sharding
    if sharding.tp_size * sharding.sp_size > 1:
        return "its ranks share a copy, and converting such files was not tested"
    if 0 in stages:
        return "ZeRO-0 shards nothing, and DeepSpeed converts no files of it"
    if "optimizer" in old.python.hooks:
        return "DeepSpeed's universal format holds the states of Adam, not those of your optimizer"
    if optim not in ADAM:
        return f"DeepSpeed's universal format holds the states of Adam, not those of {optim}"
    if stages[0] != stages[1] and old.model.config and old.has_adapter:
        return "the frozen weights are drawn at random, and each stage draws others"
    return ""


def saves_more(failed: Plan) -> Iterator[tuple[dict[str, object], str]]:
    """(changes of the recipe, reason) that need less memory than a plan of any engine, smallest first.

    More ranks share, then states and weights move to the host's memory; a CPU has no other memory.
    """
    job, engine = failed.job, "sharding.engine"
    stage = job.engine.stage(job)  # FSDP2 shards what stage 3 does
    if failed.batch.data_parallel > 1:
        higher = stage
        while (higher := _NEXT_STAGE.get(higher, 0)) > 0:
            changes: dict[str, object] = {engine: DEEPSPEED.name, "sharding.zero_stage": higher}
            yield changes, f"out of memory: ZeRO-{higher} shards more"
    if failed.hardware.is_cpu:
        return
    optimizer, param = "sharding.offload_optimizer", "sharding.offload_param"
    if ("cpu", "cpu") in job.engine.offloads() and not job.engine.has_stages and job.offload_param == "none":
        yield {param: "cpu"}, f"out of memory: {job.engine.label(None)} moves everything to the host"
    if job.offload_optimizer == "none":
        changes = {engine: DEEPSPEED.name, "sharding.zero_stage": max(stage, 2), optimizer: "cpu"}
        yield changes, "out of memory: the optimizer's states move to the host"
    if job.offload_param == "none":
        states = "cpu" if job.offload_optimizer == "none" else job.offload_optimizer
        changes = {engine: DEEPSPEED.name, "sharding.zero_stage": 3, optimizer: states, param: "cpu"}
        yield changes, "out of memory: weights and optimizer states move to the host"
