"""`estimate`: memory by component over strategies and devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from launcher.commands.gather import find_hardware, gather
from launcher.errors import DoesNotFit
from launcher.facts import probe
from launcher.facts.hardware import Hardware, parse_hardware, with_host_memory
from launcher.facts.heads import FAMILY_TASKS
from launcher.facts.model import ModelSpec, read_model_spec
from launcher.memory.estimate import MemoryJob, estimate_memory, max_micro_batch
from launcher.plan.planner import make_plan
from launcher.recipe.loading import LoadedRecipe, load_recipe
from launcher.report.memory_text import estimate_text
from launcher.report.outcome import Outcome

LORA_RANK = 16


def estimate_command(target: str, on: Sequence[str], overrides: Sequence[str]) -> Outcome:
    """Memory by component: a recipe over the ZeRO stages, or a model over the usual strategies."""
    if target.endswith((".yaml", ".yml")):
        loaded = load_recipe(target, overrides)
        spec, jobs, machines = _recipe_jobs(loaded, on)
    else:
        config, origin = probe.find_model_config(target)
        task = FAMILY_TASKS.get(str(config.get("model_type")), ("causal-lm",))[0]
        spec = read_model_spec(target, config, origin, task)
        machines = [_with_memory(parse_hardware(text)) for text in on] or [probe.probe_hardware()]
        jobs = [(name, job) for name, job in _model_jobs(spec)]
    rows = []
    for hardware in machines:
        for name, job in jobs:
            sized = replace(
                job,
                data_parallel=hardware.num_devices,
                devices_per_node=hardware.devices_per_node,
                precision=_precision(job, hardware),
                dtype=_dtype(job, hardware),
            )
            rows.append(
                {
                    "hardware": hardware.label,
                    "strategy": name,
                    "memory": estimate_memory(spec, sized, hardware).to_json(),
                    "max_micro_batch": max_micro_batch(spec, sized, hardware),
                }
            )
    trainable = jobs[0][1].trainable_params
    model = {"name": spec.name, "params": spec.params, "trainable": trainable}
    return Outcome({"model": model, "rows": rows}, estimate_text(model, rows))


def _with_memory(hardware: Hardware) -> Hardware:
    return with_host_memory(hardware, probe.host_memory_bytes())


def _recipe_jobs(
    loaded: LoadedRecipe, on: Sequence[str]
) -> tuple[ModelSpec, list[tuple[str, MemoryJob]], list[Hardware]]:
    """The recipe's own job, at the stages that it leaves open."""
    machines = [_with_memory(parse_hardware(text)) for text in on]
    machines = machines or [find_hardware(loaded.recipe, None)]
    loaded, facts = gather(loaded, machines[0].label)
    try:
        plan = make_plan(loaded, facts)
    except DoesNotFit as error:
        plan = error.nearest_miss
    job = plan.job
    if job.engine != "deepspeed":
        return facts.model, [("ddp", job)], machines
    if plan.settings["sharding.zero_stage"].source != "search":
        return facts.model, [(f"ZeRO-{job.zero_stage}", job)], machines
    stages = range(3 if job.quantization == "int8" else 4)
    return facts.model, [(f"ZeRO-{s}", replace(job, zero_stage=s)) for s in stages], machines


def _model_jobs(spec: ModelSpec) -> list[tuple[str, MemoryJob]]:
    """Full, LoRA, int8 and nf4 LoRA, each at micro-batch 1 and 2048 tokens with checkpointing."""
    length = spec.tokens_per_sample or min(2048, spec.max_position_embeddings or 2048)
    lora = spec.lora_params(LORA_RANK, "all-linear")
    base = MemoryJob(
        micro_batch=1, sequence_length=length, data_parallel=1, devices_per_node=1,
        precision="bf16", dtype="bfloat16", quantization="none", double_quant=False,
        trainable_params=spec.loaded_params, adapter=False, engine="deepspeed", zero_stage=0,
        offload_optimizer="none", offload_param="none", optim="adamw_torch_fused",
        checkpointing=True, attention="sdpa", reduce_bucket_size=200_000_000,
        allgather_bucket_size=200_000_000, overlap_comm=False, eval_batch=1,
    )  # fmt: skip
    adapter = replace(base, adapter=True, trainable_params=lora)
    jobs = [(f"full, ZeRO-{stage}", replace(base, zero_stage=stage)) for stage in range(4)]
    jobs += [(f"LoRA r{LORA_RANK}, ZeRO-{stage}", replace(adapter, zero_stage=stage)) for stage in (0, 2, 3)]
    quantised = replace(adapter, engine="ddp")
    jobs.append((f"int8 LoRA r{LORA_RANK}, DDP", replace(quantised, quantization="int8")))
    jobs.append((f"nf4 LoRA r{LORA_RANK}, DDP", replace(quantised, quantization="nf4", double_quant=True)))
    return jobs


def _pre_ampere(hardware: Hardware) -> bool:
    return hardware.compute_capability is not None and hardware.compute_capability < (8, 0)


def _precision(job: MemoryJob, hardware: Hardware) -> str:
    return "fp16" if job.precision == "bf16" and _pre_ampere(hardware) else job.precision


def _dtype(job: MemoryJob, hardware: Hardware) -> str:
    return "float16" if job.dtype == "bfloat16" and _pre_ampere(hardware) else job.dtype
