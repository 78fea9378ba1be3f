"""The configurations worth comparing for a model, and a recipe's job over what it leaves open. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from launcher.engines.ddp import DDP
from launcher.engines.deepspeed import DEEPSPEED
from launcher.engines.fsdp import FSDP
from launcher.errors import Problem, RecipeError
from launcher.facts.hardware import Hardware
from launcher.facts.model import ModelSpec
from launcher.memory.job import MemoryJob

LORA_RANK = 16
USUAL_LENGTH = 2048
BUCKET_VALUES = 200_000_000
ATTENTION_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "c_attn", "qkv_proj", "query_key_value", "q", "k",
                   "v", "o", "query", "key", "value", "out_proj")  # fmt: skip


def model_jobs(spec: ModelSpec) -> list[tuple[str, MemoryJob]]:
    """Named jobs at micro-batch 1 with checkpointing; the devices are put in by `on_hardware`."""
    longest = spec.max_position_embeddings or USUAL_LENGTH
    zero = MemoryJob(
        micro_batch=1,
        sequence_length=spec.tokens_per_sample or min(USUAL_LENGTH, longest),
        data_parallel=1, devices_per_node=1, precision="bf16", dtype="bfloat16",
        quantization="none", double_quant=False, trainable_params=spec.loaded_params, adapter=False,
        engine=DEEPSPEED, zero_stage=0, offload_optimizer="none", offload_param="none",
        optim="adamw_torch_fused", checkpointing=True, attention="sdpa",
        reduce_bucket_size=BUCKET_VALUES, allgather_bucket_size=BUCKET_VALUES,
        overlap_comm=False, eval_batch=1,
    )  # fmt: skip
    ddp = replace(zero, engine=DDP, dtype="float32")
    pure = replace(ddp, precision="bf16-true", dtype="bfloat16")
    jobs = [("full, DDP", ddp)]
    jobs += [(f"full, ZeRO-{stage}", replace(zero, zero_stage=stage)) for stage in range(4)]
    jobs += [(f"full, {name}", job) for name, job in _offloaded(zero)]
    fsdp = replace(ddp, engine=FSDP)
    jobs += [
        ("full, FSDP2", fsdp),
        ("full, FSDP2, all on CPU", replace(fsdp, offload_optimizer="cpu", offload_param="cpu")),
        ("full, DDP, 8-bit AdamW", replace(ddp, optim="adamw_bnb_8bit")),
        ("full, DDP, Adafactor", replace(ddp, optim="adafactor")),
        ("full, DDP, SGD", replace(ddp, optim="sgd")),
        ("full pure 16-bit, DDP", pure),
        ("full pure 16-bit, FSDP2", replace(pure, engine=FSDP)),
        ("full pure 16-bit, DDP, 8-bit AdamW", replace(pure, optim="adamw_bnb_8bit")),
        ("full pure 16-bit, DDP, SGD", replace(pure, optim="sgd")),
    ]
    return jobs + _adapter_jobs(spec, zero)


def _offloaded(zero: MemoryJob) -> Iterator[tuple[str, MemoryJob]]:
    for stage, device in ((2, "cpu"), (3, "cpu")):
        yield f"ZeRO-{stage}, optimizer on CPU", replace(zero, zero_stage=stage, offload_optimizer=device)
    for device, place in (("cpu", "CPU"), ("nvme", "NVMe")):
        moved = replace(zero, zero_stage=3, offload_optimizer=device, offload_param=device)
        yield f"ZeRO-3, all on {place}", moved


def _adapter_jobs(spec: ModelSpec, zero: MemoryJob) -> list[tuple[str, MemoryJob]]:
    lora = replace(zero, adapter=True, trainable_params=spec.lora_params(LORA_RANK, "all-linear"))
    ddp, name = replace(lora, engine=DDP), f"LoRA r{LORA_RANK}"
    jobs = [(f"{name}, DDP", ddp)]
    attention = sorted({linear.name for linear in spec.linears} & set(ATTENTION_NAMES))
    if attention:
        fewer = spec.lora_params(LORA_RANK, attention)
        paths = spec.adapted_paths(attention)
        jobs.append((f"{name} attention only, DDP", replace(ddp, trainable_params=fewer, adapted=paths)))
    jobs += [(f"{name}, ZeRO-{stage}", replace(lora, zero_stage=stage)) for stage in range(4)]
    jobs += [(f"{name}, {place}", job) for place, job in _offloaded(lora) if "all" in place]
    jobs.append((f"{name}, FSDP2", replace(ddp, engine=FSDP)))
    for kind in ("int8", "nf4"):
        quantised = replace(ddp, quantization=kind, double_quant=kind == "nf4")
        jobs.append((f"{kind} {name}, DDP", quantised))
        jobs.append((f"{kind} {name}, ZeRO-2", replace(quantised, engine=DEEPSPEED, zero_stage=2)))
    paged = replace(quantised, optim="paged_adamw_8bit")
    return [*jobs, (f"nf4 {name}, DDP, paged 8-bit AdamW", paged)]


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
    recomputed = [job.checkpointing]
    if not {"trainer.activation_checkpointing", "trainer.gradient_checkpointing"} & set(fixed):
        recomputed = [False, True]
    jobs = []
    for stage in stages:
        for optimizer, params in moved:
            if (params != "none" and stage != 3) or (optimizer != "none" and stage == 0):
                continue
            for checkpointing in recomputed:
                one = replace(
                    job,
                    zero_stage=stage,
                    offload_optimizer=optimizer,
                    offload_param=params,
                    checkpointing=checkpointing,
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
        parts.append("checkpointing")
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
    old = hardware.compute_capability is not None and hardware.compute_capability < (8, 0)
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


def worth_a_row(job: MemoryJob) -> bool:
    """Whether the strategy differs from a simpler one: nothing is sharded over a single copy.

    The simplest stage of tensor-parallel ranks is 1, where DeepSpeed clips by the right norm.
    """
    simplest = 1 if job.tensor_parallel > 1 else 0
    shards = job.engine.stage(job) > simplest
    moved = job.offload_optimizer != "none" or job.offload_param != "none"
    return job.data_parallel * job.sequence_parallel > 1 or moved or not shards
