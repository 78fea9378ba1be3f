"""Batch, ZeRO stage and checkpointing: the first that fits, in the order of least cost. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher.errors import DoesNotFit, Problem
from launcher.facts.hardware import Hardware
from launcher.facts.model import ModelSpec
from launcher.memory.estimate import MemoryEstimate, MemoryJob, estimate_memory
from launcher.plan.decide import refuse
from launcher.plan.draft import Draft
from launcher.plan.plan import Batch
from launcher.recipe.schema import Recipe

UPSTREAM_MICRO_BATCH = 8
"""TrainingArguments' own per_device_train_batch_size: the global batch where the recipe names none."""

SMALL_DEVICE_BYTES = 25 * 10**9


@dataclass(frozen=True, slots=True)
class Size:
    """One candidate with its memory."""

    batch: Batch
    zero_stage: int | None
    checkpointing: bool
    job: MemoryJob
    memory: MemoryEstimate


def base_job(draft: Draft, spec: ModelSpec, hardware: Hardware, processes: int) -> MemoryJob:
    """The memory job of this draft at micro-batch 1, stage 0, without checkpointing."""
    quantization = draft.get("model.quantization")
    has_adapter = draft.get("adapter.type") is not None
    rank, targets = draft.get("adapter.r", 16), draft.get("adapter.target_modules", "all-linear")
    small = hardware.device_bytes is not None and hardware.device_bytes <= SMALL_DEVICE_BYTES
    bucket = 50_000_000 if small else 200_000_000
    dpo, one_row = draft.get("task") == "dpo", bool(draft.get("data.padding_free"))
    return MemoryJob(
        micro_batch=1,
        sequence_length=spec.tokens_per_sample or draft.get("data.max_length"),
        # A chosen and a rejected answer.
        sequences_per_sample=2 if dpo else 1,
        # An adapter is switched off to have the reference; a full model needs a frozen copy.
        reference_model=dpo and not has_adapter and not draft.get("trainer.precompute_ref_log_probs"),
        spread=_devices_of_map(draft.get("model.device_map"), hardware),
        document_mask=one_row or bool(draft.get("data.packing")),
        one_row=one_row,
        data_parallel=processes,
        devices_per_node=hardware.devices_per_node,
        precision=draft.get("precision"),
        dtype=_loaded_dtype(draft, spec),
        quantization=quantization["type"] if isinstance(quantization, dict) else "none",
        double_quant=isinstance(quantization, dict) and bool(quantization.get("double_quant")),
        trainable_params=spec.lora_params(rank, targets) if has_adapter else spec.loaded_params,
        adapter=has_adapter,
        adapter_dropout=draft.get("adapter.lora_dropout", 0.0),
        engine=draft.get("sharding.engine"),
        zero_stage=0,
        offload_optimizer=draft.get("sharding.offload_optimizer"),
        offload_param=draft.get("sharding.offload_param"),
        optim=draft.get("trainer.optim"),
        checkpointing=False,
        attention=draft.get("model.attn_implementation"),
        reduce_bucket_size=bucket,
        allgather_bucket_size=bucket,
        overlap_comm=False,
        eval_batch=1,
    )


def _devices_of_map(device_map: Any, hardware: Hardware) -> int:
    """Devices that a device_map of from_pretrained uses: all of the machine, or those that it names."""
    if isinstance(device_map, Mapping):
        return max(1, len({str(device) for device in device_map.values()} - {"cpu", "disk"}))
    return hardware.devices_per_node if device_map else 1


def _loaded_dtype(draft: Draft, spec: ModelSpec) -> str:
    dtype: str = draft.get("model.dtype")
    return dtype if dtype != "auto" else spec.pretrained_dtype or "float32"


def choose_size(draft: Draft, recipe: Recipe, spec: ModelSpec, hardware: Hardware) -> Size:
    """The lowest ZeRO stage, then the least recomputation, whose estimate fits; DoesNotFit otherwise."""
    processes = 1 if recipe.model.device_map else hardware.num_devices
    job = base_job(draft, spec, hardware, processes)
    evaluated = draft.get("trainer.per_device_eval_batch_size")
    nearest: Size | None = None
    for candidate in _candidates(draft, job, hardware):
        for batch in _batches(draft, recipe, processes):
            sized = replace(
                candidate,
                micro_batch=batch.micro,
                accumulation=batch.accumulation,
                eval_batch=evaluated or batch.micro,
            )
            memory = estimate_memory(spec, sized, hardware)
            stage = sized.zero_stage if sized.engine == "deepspeed" else None
            size = Size(batch, stage, sized.checkpointing, sized, memory)
            if memory.fits is not False:
                return size
            if nearest is None or memory.total < nearest.memory.total:
                nearest = size
    assert nearest is not None, "at least one candidate is always tried"
    raise DoesNotFit(_miss(nearest, hardware), nearest)


def _candidates(draft: Draft, job: MemoryJob, hardware: Hardware) -> Iterator[MemoryJob]:
    asked = draft.get("sharding.zero_stage", "auto")  # the recipe's, or the base profile's
    stages: tuple[int, ...]
    if job.engine != "deepspeed":
        stages = (0,)
    elif asked != "auto":
        stages = (asked,)
    else:
        lowest = 3 if job.offload_param != "none" else 1 if job.offload_optimizer != "none" else 0
        highest = 2 if job.quantization == "int8" else 3
        stages = tuple(range(lowest, highest + 1))
    pinned = draft.get("trainer.activation_checkpointing")
    for stage in stages:
        for checkpointing in (False, True) if pinned is None else (bool(pinned),):
            overlap = stage == 3 and not hardware.is_cpu
            yield replace(job, zero_stage=stage, checkpointing=checkpointing, overlap_comm=overlap)


def _batches(draft: Draft, recipe: Recipe, processes: int) -> list[Batch]:
    """The batches to try, largest micro-batch first, all with the same global size."""
    pinned: int | None = draft.get("trainer.per_device_train_batch_size")
    accumulation: int | None = draft.get("trainer.gradient_accumulation_steps")
    if recipe.global_batch_size is None:
        if accumulation is not None:
            if pinned is not None:
                return [Batch(pinned, accumulation, processes)]
            return [Batch(m, accumulation, processes) for m in (8, 4, 2, 1)]
        per_rank = pinned or UPSTREAM_MICRO_BATCH
    else:
        per_rank, rest = divmod(recipe.global_batch_size, processes)
        if rest:
            low = max(1, per_rank) * processes
            raise refuse(
                draft,
                "batch-not-divisible",
                "global_batch_size",
                f"{recipe.global_batch_size} samples do not divide among {processes} data-parallel ranks",
                f"use {low} or {(per_rank + 1) * processes}",
            )
    if pinned is not None:
        if per_rank % pinned:
            raise refuse(
                draft,
                "batch-not-divisible",
                "trainer.per_device_train_batch_size",
                f"micro-batch {pinned} does not divide the {per_rank} samples of each rank",
                f"use a divisor of {per_rank}, or change global_batch_size",
            )
        return [Batch(pinned, per_rank // pinned, processes)]
    divisors = [m for m in range(per_rank, 0, -1) if per_rank % m == 0]
    return [Batch(m, per_rank // m, processes) for m in divisors]


def _miss(nearest: Size, hardware: Hardware) -> Problem:
    memory = nearest.memory
    needed, held = memory.high, hardware.device_bytes or 0
    stage = "" if nearest.zero_stage is None else f" at ZeRO-{nearest.zero_stage}"
    return Problem(
        "does-not-fit",
        f"nothing fits {hardware.label}: the nearest{stage} with micro-batch {nearest.batch.micro}"
        f"{' and activation checkpointing' if nearest.checkpointing else ''} needs about "
        f"{needed / 2**30:.1f} GiB of {held / 2**30:.1f} GiB on each device",
        hint="more or bigger devices, a shorter data.max_length, an adapter or quantization, "
        "or sharding.offload_optimizer: cpu",
    )
