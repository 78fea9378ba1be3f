"""The ways to train a model that are worth comparing, and a recipe's job over what it leaves open. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from launcher.engines.ddp import DDP
from launcher.engines.deepspeed import DEEPSPEED
from launcher.engines.fsdp import FSDP
from launcher.errors import Problem, RecipeError
from launcher.machine.hardware import AMPERE, Hardware
from launcher.memory.job import MemoryJob
from launcher.models.model import ModelSpec
from launcher.recipe.loading import LoadedRecipe
from launcher.recipe.schema import Recipe
from launcher.tasks.task import Task

Changes = Mapping[str, object]
"""Dotted recipe key -> value."""
LORA_RANK = 16
USUAL_LENGTH = 2048
ATTENTION_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "c_attn", "qkv_proj", "query_key_value", "q", "k",
                   "v", "o", "query", "key", "value", "out_proj")  # fmt: skip


def model_strategies(spec: ModelSpec, hardware: Hardware) -> list[tuple[str, Changes]]:
    """Named ways to train a model, as changes of `model_recipe`."""
    is_old = hardware.compute_capability is not None and hardware.compute_capability < AMPERE
    full = [("full, DDP", _DDP)]
    full += [(f"full, ZeRO-{stage}", _zero(stage)) for stage in range(4)]
    full += [(f"full, {name}", changes) for name, changes in _offloaded((2, 3))]
    full += [("full, FSDP2", _FSDP), ("full, FSDP2, all on CPU", _MOVED)]
    for name, optim in (("8-bit AdamW", "adamw_bnb_8bit"), ("Adafactor", "adafactor"), ("SGD", "sgd")):
        full.append((f"full, DDP, {name}", {**_DDP, "trainer.optim": optim}))
    pure = {"precision": "fp16-true" if is_old else "bf16-true"}
    full += [("full pure 16-bit, DDP", {**_DDP, **pure}), ("full pure 16-bit, FSDP2", {**_FSDP, **pure})]
    for name, optim in (("8-bit AdamW", "adamw_bnb_8bit"), ("SGD", "sgd")):
        full.append((f"full pure 16-bit, DDP, {name}", {**_DDP, **pure, "trainer.optim": optim}))
    if hardware.num_devices == 1:
        within = {**_DDP, **pure, **_IN_BACKWARD, "trainer.optim": "paged_adamw_8bit"}
        full.append(("full pure 16-bit, steps in backward", within))
    return [*full, *_adapter_strategies(spec)]


def _adapter_strategies(spec: ModelSpec) -> Iterator[tuple[str, Changes]]:
    lora, name = _lora("all-linear"), f"LoRA r{LORA_RANK}"
    yield f"{name}, DDP", {**_DDP, **lora}
    attention = sorted({linear.name for linear in spec.linears} & set(ATTENTION_NAMES))
    if attention:
        yield f"{name} attention only, DDP", {**_DDP, **_lora(attention)}
    for stage in range(4):
        yield f"{name}, ZeRO-{stage}", {**_zero(stage), **lora}
    for place, changes in _offloaded((3,)):
        if "all" in place:
            yield f"{name}, {place}", {**changes, **lora}
    yield f"{name}, FSDP2", {**_FSDP, **lora}
    for kind in ("int8", "nf4"):
        quantised = {**lora, "model.quantization": kind}
        yield f"{kind} {name}, DDP", {**_DDP, **quantised}
        yield f"{kind} {name}, ZeRO-2", {**_zero(2), **quantised}
    yield f"nf4 {name}, FSDP2, all on CPU", {**_MOVED, **quantised}
    yield f"nf4 {name}, DDP, paged 8-bit AdamW", {**_DDP, **quantised, "trainer.optim": "paged_adamw_8bit"}


def _offloaded(stages: Collection[int]) -> Iterator[tuple[str, Changes]]:
    for stage in stages:
        yield f"ZeRO-{stage}, optimizer on CPU", {**_zero(stage), **_on("cpu", "none")}
    for device, place in (("cpu", "CPU"), ("nvme", "NVMe")):
        yield f"ZeRO-3, all on {place}", {**_zero(3), **_on(device, device)}


def _zero(stage: int) -> Changes:
    return {**_on("none", "none"), "sharding.engine": DEEPSPEED.name, "sharding.zero_stage": stage}


def _on(optimizer: str, params: str) -> Changes:
    path = {"sharding.nvme_path": "/nvme"} if "nvme" in (optimizer, params) else {}
    return {"sharding.offload_optimizer": optimizer, "sharding.offload_param": params, **path}


def _lora(modules: object) -> Changes:
    return {"adapter": {"type": "lora", "r": LORA_RANK, "target_modules": modules}}


_DDP: Changes = {"sharding.engine": DDP.name}
_FSDP: Changes = {"sharding.engine": FSDP.name}
_MOVED: Changes = {**_FSDP, "sharding.offload_optimizer": "cpu", "sharding.offload_param": "cpu"}
_IN_BACKWARD: Changes = {"sharding.optim_in_backward": True, "trainer.max_grad_norm": 0}


def model_recipe(spec: ModelSpec, task: Task) -> LoadedRecipe:
    """A recipe for the smallest micro-batch, with activation checkpointing; the rest is the planner's."""
    longest = spec.max_position_embeddings or USUAL_LENGTH
    recipe = Recipe.model_validate(
        {
            "task": task.name,
            "model": {"name_or_path": spec.name},
            "data": {"train": [{"path": "rows.jsonl"}], "max_length": min(USUAL_LENGTH, longest)},
            "trainer": {
                "max_steps": 1, "report_to": "none", "activation_checkpointing": True,
                "per_device_train_batch_size": task.first_least_batch, "gradient_accumulation_steps": 1,
            },
        }
    )  # fmt: skip
    return LoadedRecipe(recipe, "", Path(spec.name), {})


def open_jobs(job: MemoryJob, fixed: Collection[str]) -> list[tuple[str, MemoryJob]]:
    """A recipe's own job over the sharding and recomputation that it leaves open.

    `fixed`: the dotted keys that it names itself.
    """
    stages: Collection[int] = (job.zero_stage,)
    if "sharding.zero_stage" not in fixed:
        stages = job.engine.stages(job)
    moved = [(job.offload_optimizer, job.offload_param)]
    alone = job.tensor_parallel * job.sequence_parallel == 1  # ranks that share a copy offload nothing
    named = {"sharding.offload_optimizer", "sharding.offload_param"} & set(fixed)
    if alone and not named:
        moved = [*job.engine.offloads()] or moved
    recomputed = [(job.checkpointing, job.offload_activations)]
    if not {"trainer.activation_checkpointing", "trainer.gradient_checkpointing"} & set(fixed):
        recomputed = [(False, "none"), (True, "none")]
    if alone and recomputed[-1] == (True, "none") and "sharding.offload_activations" not in fixed:
        recomputed.append((True, "cpu"))
    jobs = []
    for stage in stages:
        shared = job.engine.stage(replace(job, zero_stage=stage))
        for optimizer, params in moved:
            if (params != "none" and shared != 3) or (optimizer != "none" and shared == 0):
                continue
            for checkpointing, activations in recomputed:
                one = replace(
                    job,
                    zero_stage=stage,
                    offload_optimizer=optimizer,
                    offload_param=params,
                    checkpointing=checkpointing,
                    offload_activations=activations,
                )
                jobs.append((strategy_name(one), one))
    return jobs


def strategy_name(job: MemoryJob) -> str:
    """Engine, offload and checkpointing of a job as a short text."""
    parts = [job.engine.label(job.zero_stage)]
    if job.tensor_parallel > 1:
        parts.append(f"{job.tensor_parallel} tensor-parallel")
    if job.sequence_parallel > 1:
        parts.append(f"{job.sequence_parallel} ranks a sample")
    place = {"cpu": "CPU", "nvme": "NVMe"}
    if job.offload_param != "none":
        parts.append(f"all on {place[job.offload_param]}")
    elif job.offload_optimizer != "none":
        parts.append(f"optimizer on {place[job.offload_optimizer]}")
    if job.checkpointing:
        parts.append("checkpointing" + (" on CPU" if job.offload_activations != "none" else ""))
    return ", ".join(parts)


def on_hardware(job: MemoryJob, hardware: Hardware, tensor_parallel: int) -> MemoryJob:
    """The job on all devices of `hardware`; bfloat16 becomes float16 on devices that lack it.

    tensor_parallel: ranks that share each layer, where the job does not set them itself. RecipeError
    `bad-tensor-parallel` where it does, too, or where the devices do not divide among its ranks.
    """
    tensor = _tensor_ranks(job, tensor_parallel)
    group = tensor * job.sequence_parallel
    if hardware.num_devices % group:
        message = f"{hardware.num_devices} devices of {hardware.label} do not divide into groups of {group}"
        raise RecipeError(Problem("bad-tensor-parallel", message, hint=f"use a multiple of {group} devices"))
    # With a device_map one process spreads its layers over the devices.
    copies = 1 if job.spread > 1 else hardware.num_devices // group
    old = hardware.compute_capability is not None and hardware.compute_capability < AMPERE
    return replace(
        job,
        data_parallel=copies,
        devices_per_node=hardware.devices_per_node,
        tensor_parallel=tensor,
        precision=job.precision.replace("bf16", "fp16") if old else job.precision,
        dtype=job.dtype.replace("bfloat16", "float16") if old else job.dtype,
        accumulation=job.accumulation if copies == job.data_parallel else None,
    )


def _tensor_ranks(job: MemoryJob, asked: int) -> int:
    if asked > 1 and job.tensor_parallel * job.sequence_parallel > 1 and asked != job.tensor_parallel:
        message = "the recipe sets itself which ranks share a copy (sharding)"
        raise RecipeError(
            Problem("bad-tensor-parallel", message, path="--tensor-parallel", hint="leave it out")
        )
    return max(asked, job.tensor_parallel)


def could_move(job: MemoryJob, hardware: Hardware) -> bool:
    """Whether activations that the job offloads leave the device: a CPU has no other memory."""
    return job.offload_activations == "none" or not hardware.is_cpu


def worth_a_row(job: MemoryJob) -> bool:
    """Whether the strategy differs from a simpler one: nothing is sharded over a single copy.

    The simplest stage of tensor-parallel ranks is 1, where DeepSpeed clips by the right norm.
    """
    simplest = 1 if job.tensor_parallel > 1 else 0
    shards = job.engine.stage(job) > simplest
    moved = job.offload_optimizer != "none" or job.offload_param != "none"
    return job.data_parallel * job.sequence_parallel > 1 or moved or not shards
