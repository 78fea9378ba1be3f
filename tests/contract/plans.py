"""Run directories written by hand, in the shape that the planner gives them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.recipe.keys import SHARED, shared_keys
from launcher.recipe.schema import DataSource
from launcher.tasks import task_named
from launcher.tasks.embedding import LOSSES
from launcher.train.job import read_job

TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
LORA: dict[str, Any] = {
    "type": "lora",
    "r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "target_modules": ["q_proj", "v_proj", "down_proj"],
}
_BASE: dict[str, Any] = {
    **{
        name: getattr(SHARED[name.rpartition(".")[0]], name.rpartition(".")[2])
        for name, key in shared_keys()
        if key.absent is not None
    },
    "task": "causal-lm",
    "tiny": True,
    "model.config": TINY_LLAMA,
    "model.dtype": "float32",
    "model.quantization": "none",
    "model.attn_implementation": "sdpa",
    "model.device_map": None,
    "model.enable_input_require_grads": False,
    "model.prepare_for_kbit": False,
    "model.pad_token": "ensure",
    "adapter.type": None,
    "data.train": [{"path": "unused.jsonl", "format": "prompt-completion", "columns": {}}],
    "data.eval": None,
    "data.max_length": 64,
    "data.padding_free": False,
    "data.pad_to_multiple_of": None,
    "data.fim": None,
    "data.max_truncated": 1.0,
    "data.max_dropped": 1.0,
    "early_stopping.patience": None,
    "early_stopping.threshold": None,
    "python.file": None,
    "python.hooks": [],
    "runtime.autocast": None,
    "runtime.training_arguments_first": True,
    "runtime.loss_over": "rows",
    "sharding.engine": "ddp",
    "sharding.zero_stage": None,
    "sharding.offload_optimizer": "none",
    "sharding.offload_param": "none",
    "precision": "fp32",
    "trainer.seed": 42,
    "trainer.bf16": False,
    "trainer.fp16": False,
    "trainer.use_cpu": True,
    "trainer.max_steps": 8,
    "trainer.per_device_train_batch_size": 4,
    "trainer.gradient_accumulation_steps": 1,
    "trainer.learning_rate": 1e-2,
    "trainer.lr_scheduler_type": "constant",
    "trainer.logging_steps": 1,
    "trainer.logging_nan_inf_filter": False,
    "trainer.include_num_input_tokens_seen": "non_padding",
    "trainer.activation_checkpointing": False,
    "trainer.save_strategy": "no",
    "trainer.report_to": "none",
    "trainer.disable_tqdm": True,
    "trainer.dataloader_pin_memory": False,
}
# What the planner adds for a task.
_OF_TASK: dict[str, dict[str, Any]] = {
    "seq2seq-lm": {"trainer.predict_with_generate": False},
    "image-classification": {
        "trainer.remove_unused_columns": False,
        "trainer.include_num_input_tokens_seen": "no",
    },
    **{
        name: {
            "trainer.remove_unused_columns": False,
            **{f"{name}.{key}": value for key, (value, _) in task_named(name).section_values(None).items()},
        }
        for name in ("embedding", "reranker")
    },
    "image-text-to-text": {
        "trainer.remove_unused_columns": False,
        "model.freeze": ["vision", "projector"],
        "model.image_sizes": {},
    },
    "kto": {"runtime.loss_over": "rows and KL term"},
    "grpo": {
        "runtime.loss_over": "micro-batch",
        "reward": [
            {
                "function": "regular_expression",
                "weight": 1.0,
                "arguments": {"pattern": "[aeiou0-4]"},
                "time_limit": 60.0,
            }
        ],
        "trainer.reward_weights": [1.0],
        "trainer.num_generations": 4,
        "trainer.num_generations_eval": 4,
        "trainer.max_completion_length": 2,
        "trainer.remove_unused_columns": False,
    },
}
_SOURCE = DataSource(path="unused").model_dump()
GENERATES = {"trainer.predict_with_generate": True, "trainer.generation_max_length": 16}
"""What the planner sets for a metric of generated text, with answers of at most 16 tokens."""


def zero_config(stage: int) -> dict[str, Any]:
    """A resolved DeepSpeed configuration that agrees with the settings above."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
    }


def trained(folder: Path, changes: Mapping[str, Any], ds_config: Mapping[str, Any] | None = None) -> Path:
    """A run directory whose data was prepared and whose model was trained, in this process."""
    from launcher.train.worker import train

    train(read_job(prepared(folder, changes, ds_config)))
    return folder


def prepared(folder: Path, changes: Mapping[str, Any], ds_config: Mapping[str, Any] | None = None) -> Path:
    """A run directory whose data was prepared in this process."""
    from launcher.train.prepare import prepare_run

    prepare_run(read_job(write_run(folder, changes, ds_config)))
    return folder


def write_run(folder: Path, changes: Mapping[str, Any], ds_config: Mapping[str, Any] | None = None) -> Path:
    """A run directory with plan.json (and ds_config.json); `changes` are dotted settings."""
    values = {**_BASE, **_OF_TASK.get(changes.get("task", ""), {}), **changes}
    loss = values.get("embedding.loss")
    if loss is not None and LOSSES[loss].compares:
        values["runtime.loss_over"] = "micro-batch"
    # An adapter may be given whole; the plan holds its fields one by one.
    for name, value in values.pop("adapter", {}).items():
        values[f"adapter.{name}"] = value
    short = values["model.quantization"]
    if isinstance(short, str) and short != "none":
        four_bit = {} if short == "int8" else {"double_quant": True, "compute_dtype": "float32"}
        values["model.quantization"] = {"type": short, **four_bit}
    for name in ("data.train", "data.eval"):
        if isinstance(values[name], list):
            values[name] = [{**_SOURCE, **source} for source in values[name]]
    settings = {
        name: {"value": value, "source": "default", "by": "test", "reason": "test"}
        for name, value in values.items()
    }
    plan = {
        "schema_version": 1,
        "settings": settings,
        "batch": {"micro": 4, "accumulation": 1, "data_parallel": 1, "global": 4},
        "schedule": {},
        "hardware": {"num_nodes": 1, "devices_per_node": 1, "device": "cpu"},
        "memory": {"total": 12345},
        "model": {"name": "tiny"},
        "ds_config": ds_config,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    if ds_config is not None:
        (folder / "ds_config.json").write_text(json.dumps(ds_config), encoding="utf-8")
    return folder


def generate(run_dir: Path, prompt: str, max_new_tokens: int = 64) -> str:
    """The answer of what lies in a run directory, loaded for it alone."""
    from launcher.train.results.generate import answer, load_trained

    return answer(load_trained(run_dir, print), prompt, max_new_tokens)
