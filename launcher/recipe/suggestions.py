"""What a wrong key or choice was probably meant to be. Never a far-off guess."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

CUTOFF = 0.75

# Other tools' names of TrainingArguments fields.
TRAINER_ALIASES = {
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "per_device_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "steps": "max_steps",
    "train_steps": "max_steps",
    "num_steps": "max_steps",
    "optimizer": "optim",
    "scheduler": "lr_scheduler_type",
    "lr_scheduler": "lr_scheduler_type",
    "warmup": "warmup_steps",
    "num_warmup_steps": "warmup_steps",
    "grad_accum": "gradient_accumulation_steps",
    "grad_accumulation_steps": "gradient_accumulation_steps",
    "accumulation_steps": "gradient_accumulation_steps",
    "grad_clip": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "logger": "report_to",
    "wandb": "report_to",
}
ADAPTER_ALIASES = {
    "rank": "r",
    "lora_r": "r",
    "lora_rank": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "modules": "target_modules",
    "lora_target_modules": "target_modules",
}
# Dotted paths that other names mean, wherever they are written.
_ELSEWHERE = {
    "model_name": "model.name_or_path",
    "model_path": "model.name_or_path",
    "model_name_or_path": "model.name_or_path",
    "base_model": "model.name_or_path",
    "pretrained_model_name_or_path": "model.name_or_path",
    "tokenizer_name": "model.tokenizer",
    "torch_dtype": "model.dtype",
    "load_in_8bit": "model.quantization: int8",
    "load_in_4bit": "model.quantization: nf4",
    "use_flash_attention_2": "model.attn_implementation",
    "dataset": "data.train",
    "train_file": "data.train",
    "train_data": "data.train",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "sequence_length": "data.max_length",
    "block_size": "data.max_length",
    "cutoff_len": "data.max_length",
    "bf16": "precision: bf16",
    "fp16": "precision: fp16",
    "mixed_precision": "precision",
    "lora": "adapter",
    "peft": "adapter",
    "training": "trainer",
    "train": "trainer",
    "training_args": "trainer",
    "training_arguments": "trainer",
    "deepspeed": "sharding",
    "stage": "sharding.zero_stage",
    "zero": "sharding.zero_stage",
    "gpus": "hardware.devices_per_node",
    "num_gpus": "hardware.devices_per_node",
    "nodes": "hardware.num_nodes",
    "env": "launch.env",
}
# TrainingArguments fields that are gone -> what to do instead.
TRAINER_REMOVED = {
    "evaluation_strategy": "write `eval_strategy`",
    "gradient_checkpointing": "write `activation_checkpointing`",
    "gradient_checkpointing_kwargs": "write `activation_checkpointing_kwargs`",
    "warmup_ratio": "write `warmup_steps`; a value below 1 is a share of all steps",
    "group_by_length": "write `train_sampling_strategy: group_by_length`",
    "no_cuda": "write `hardware: {device: cpu}`",
    "use_mps_device": "remove it: the device is found",
    "tokenizer": "write `model.tokenizer`",
    "overwrite_output_dir": "remove it: a run directory is never overwritten; see `run --resume`",
    "logging_dir": "remove it: logs lie in the run directory",
    "save_safetensors": "remove it: safetensors is the only format",
    "half_precision_backend": "write `precision`",
    "fp16_backend": "write `precision`",
    "fp16_opt_level": "write `precision`",
    "per_gpu_train_batch_size": "write `per_device_train_batch_size`",
    "per_gpu_eval_batch_size": "write `per_device_eval_batch_size`",
    "push_to_hub_token": "set HF_TOKEN in the environment",
    "push_to_hub_model_id": "write `hub_model_id`",
    "push_to_hub_organization": "write `hub_model_id: organization/name`",
    "dispatch_batches": "write `accelerator_config: {dispatch_batches: ...}`",
    "split_batches": "write `accelerator_config: {split_batches: ...}`",
    "include_inputs_for_metrics": "write `include_for_metrics: [inputs]`",
    "include_tokens_per_second": "remove it: tokens per second are always reported",
    "torchdynamo": "write `torch_compile_backend`",
    "xpu_backend": "write `ddp_backend`",
    **dict.fromkeys(
        (
            "jit_mode_eval",
            "use_ipex",
            "tpu_num_cores",
            "tpu_metrics_debug",
            "past_index",
            "ray_scope",
            "mp_parameters",
            "use_legacy_prediction_loop",
        ),
        "remove it: nothing replaces it",
    ),
}


def close_key(name: str, keys: Iterable[str]) -> str | None:
    """The one of `keys` that `name` resembles closely, None when there is none."""
    from difflib import get_close_matches

    known = {key.lower(): key for key in keys}
    plain = name.lower().replace("-", "_").replace(" ", "_")
    if plain in known:
        return known[plain]
    near = get_close_matches(plain, known, n=1, cutoff=CUTOFF)
    return known[near[0]] if near else None


def choice_hint(value: str, choices: Iterable[str]) -> str | None:
    """`did you mean ...?` for a wrong choice, None when nothing is close."""
    near = close_key(value, choices)
    return f"did you mean {near}?" if near else None


def key_hint(path: str, level: Iterable[str], sections: dict[str, Iterable[str]]) -> str | None:
    """Hint for an unknown key.

    `path`: its dotted path; `level`: the keys known beside it; `sections`: section -> its keys.
    """
    parent, _, name = path.rpartition(".")
    plain = name.lower().replace("-", "_")
    level = list(level)
    if plain in level:
        return f"did you mean `{plain}`?"
    if plain in TRAINER_REMOVED:
        return f"`{name}` belongs under `trainer:`, and there: {TRAINER_REMOVED[plain]}"
    if plain in _ELSEWHERE:
        target = _ELSEWHERE[plain]
        inner = target.removeprefix(f"{parent}.") if parent else target
        return f"write `{inner}`"
    for section, keys in sections.items():
        if section != parent and plain in keys:
            return (
                f"`{name}` belongs under `{section}:`"
                if section
                else f"`{name}` belongs at the top of the recipe"
            )
    for section, aliases in (("trainer", TRAINER_ALIASES), ("adapter", ADAPTER_ALIASES)):
        if plain in aliases:
            return f"did you mean `{section}.{aliases[plain]}`?"
    near = close_key(name, level)
    return f"did you mean `{near}`?" if near else None


def describe(value: Any) -> str:
    """A value as a message shows it: as in YAML, shortened, and its type where the look misleads."""
    if value is None:
        return "null"
    if isinstance(value, str):
        text = value if len(value) <= 60 else value[:57] + "..."
        return f'"{text}" (text)'
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return json.dumps(value)
