"""A row of the grid as a recipe, its plan, and the job that the estimate is asked about; without torch."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from grids import MODELS, Row
from memory_images import frozen_parts, image_spec, sees_images

from launcher.engines import engine_named, engine_of
from launcher.errors import DoesNotFit
from launcher.machine.hardware import Hardware, parse_hardware
from launcher.memory.job import MemoryJob
from launcher.models.model import ModelSpec, read_model_spec
from launcher.plan.inputs import Facts
from launcher.plan.plan import Plan
from launcher.planner.planner import make_plan
from launcher.recipe.loading import load_recipe

STEPS = 2
"""Of the optimizer: from the second on, every step holds the same (three were tried: equal to the byte)."""
RANK = 8
DOCUMENTS = 4
"""In each packed row."""
FORMATS = {
    "sequence-classification": "classification",
    "token-classification": "tokens",
    "image-classification": "image",
    "image-text-to-text": "image-chat",
    "dpo": "preference",
    "reward": "preference",
    "kto": "unpaired-preference",
    "grpo": "prompt",
    "embedding": "positive-pair",
    "reranker": "relevance",
    "CoSENTLoss": "scored-pair",
    "LambdaLoss": "ranking",
    "ListNetLoss": "ranking",
}
"""Format of the rows of a task, or of a loss."""


def hardware_of(row: Row) -> Hardware:
    return parse_hardware(f"{row.processes}xcpu")


def spec_of(row: Row) -> ModelSpec:
    model = MODELS[row.model]
    if sees_images(row):
        return image_spec(row, recipe_of(row).get("adapter"))
    return read_model_spec(row.model, {**model.config, **row.config}, "the grid", model.task)


def recipe_of(row: Row, steps: int = STEPS) -> dict[str, Any]:
    """The recipe of a row. Engine fsdp is planned as ddp, which decides the same settings."""
    model = MODELS[row.model]
    form = FORMATS.get(row.section.get("loss", ""), FORMATS.get(model.task, "prompt-completion"))
    recipe: dict[str, Any] = {
        "task": model.task,
        "model": {
            "config": {**model.config, **row.config},
            "quantization": row.quantization,
            "kbit_norms": None if row.kbit_norms == "float32" else row.kbit_norms,
            "attn_implementation": row.attention,
            "loss": row.loss if model.task == "causal-lm" else None,
        },
        "data": {
            "train": [{"path": "random", "format": form}],
            **({} if model.task == "image-classification" else {"max_length": row.length}),
            **({"packing": True} if row.packing else {}),
            **({"padding_free": True} if row.free else {}),
        },
        "precision": row.precision,
        "sharding": {"engine": "deepspeed" if row.engine == "deepspeed" else "ddp"},
        "trainer": {
            "max_steps": steps, "per_device_train_batch_size": row.micro_batch,
            "gradient_accumulation_steps": row.accumulation, "activation_checkpointing": row.checkpointing,
            "optim": row.optim, "save_strategy": "no", **row.trainer,
        },
        "hardware": {"device": "cpu", "devices_per_node": row.processes},
    }  # fmt: skip
    if row.adapter is not None:
        targets = "all-linear" if row.adapter == "all-linear" else list(model.attention)
        recipe["adapter"] = {"r": RANK, "target_modules": targets, "lora_dropout": row.adapter_dropout}
        recipe["adapter"]["cast_input_dtype_enabled"] = row.cast
    if sees_images(row):
        recipe["model"]["freeze"] = frozen_parts(row)
    if model.task == "grpo":  # half of a sequence is the prompt; completions are as long as they may be
        written = row.length - row.length // 2
        recipe["reward"] = [{"function": "length", "arguments": {"tokens": 8}}]
        recipe["generation"] = {"num_generations": 2, "max_completion_length": written}
        recipe["trainer"]["generation_kwargs"] = {"min_new_tokens": written}
    if row.section:
        recipe[model.task] = dict(row.section)
    if row.engine == "deepspeed":
        recipe["sharding"] |= {"zero_stage": row.zero_stage, "offload_optimizer": row.offload_optimizer}
    return recipe


def plan_of(row: Row, steps: int = STEPS) -> Plan:
    return make(recipe_of(row, steps), spec_of(row), hardware_of(row))


def make(
    recipe: dict[str, Any], spec: ModelSpec, hardware: Hardware, versions: Mapping[str, str] | None = None
) -> Plan:
    """The plan of a recipe, also where it does not fit. versions: of installed distributions."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"  # JSON is YAML
        path.write_text(json.dumps(recipe), encoding="utf-8")
        loaded = load_recipe(path)
    try:
        return make_plan(loaded, Facts(hardware=hardware, model=spec, versions=versions or {}))
    except DoesNotFit as miss:
        plan: Plan = miss.nearest_miss
        return plan


def job_of(row: Row, plan: Plan) -> MemoryJob:
    """The plan's job with what the recipe does not say: FSDP, small buckets, and whether rows are padded."""
    return replace(
        plan.job,
        engine=engine_named(row.engine),
        reduce_bucket_size=row.bucket,
        allgather_bucket_size=row.bucket,
        padded=row.padded,
    )


def ds_config_of(row: Row, plan: Plan) -> dict[str, Any] | None:
    """The plan's DeepSpeed configuration with the row's buckets."""
    config = engine_of(plan).ds_config(plan)
    if config is None:
        return None
    buckets = {name: row.bucket for name in ("reduce_bucket_size", "allgather_bucket_size")}
    zero = config["zero_optimization"]
    return {**config, "zero_optimization": zero | {k: v for k, v in buckets.items() if k in zero}}


def host_share(spec: ModelSpec, job: MemoryJob) -> int:
    """Bytes of offloaded states of one process, and of the buffers through which they travel: on a CPU they
    lie in the same memory as the rest."""
    states = job.engine.states(spec, job)
    return states.host + states.staging
