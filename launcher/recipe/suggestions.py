"""Suggest the key or choice that was probably meant; render values in messages."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from launcher.recipe.field_tables import TRAINER_OWNED
from launcher.tasks import TASKS

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
    "metric": "metric_for_best_model",
    "best_metric": "metric_for_best_model",
    "eval_interval": "eval_steps",
    "save_interval": "save_steps",
    "log_interval": "logging_steps",
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
# Other tools' names -> dotted path, in any section.
_ELSEWHERE = {
    "model_name": "model.name_or_path",
    "model_path": "model.name_or_path",
    "model_name_or_path": "model.name_or_path",
    "base_model": "model.name_or_path",
    "pretrained_model_name_or_path": "model.name_or_path",
    "pretrained_model": "model.name_or_path",
    "tokenizer_name": "model.tokenizer",
    "tokenizer_name_or_path": "model.tokenizer",
    "template": "model.chat_template",
    "added_tokens": "model.add_tokens",
    "new_tokens": "model.add_tokens",
    "torch_dtype": "model.dtype",
    "load_in_8bit": "model.quantization: int8",
    "load_in_4bit": "model.quantization: nf4",
    "quantization_bit": "model.quantization",
    "use_flash_attention_2": "model.attn_implementation",
    "flash_attention": "model.attn_implementation",
    "flash_attn": "model.attn_implementation",
    **dict.fromkeys(
        (
            "dataset",
            "datasets",
            "dataset_name",
            "dataset_path",
            "data_path",
            "train_file",
            "train_data",
            "train_dataset",
        ),
        "data.train",
    ),
    **dict.fromkeys(
        (
            "val_set_size",
            "val_size",
            "eval_split",
            "eval_file",
            "eval_data",
            "eval_dataset",
            "val_file",
            "validation_file",
            "validation_data",
            "test_datasets",
        ),
        "data.eval",
    ),
    **dict.fromkeys(
        (
            "max_seq_length",
            "max_seq_len",
            "sequence_length",
            "sequence_len",
            "seq_length",
            "seq_len",
            "block_size",
            "cutoff_len",
            "model_max_length",
        ),
        "data.max_length",
    ),
    **dict.fromkeys(("sample_packing", "packing", "pack", "packed"), "data.packing"),
    **dict.fromkeys(
        ("train_on_inputs", "mask_prompt", "completion_only_loss", "assistant_only_loss"), "data.loss_on"
    ),
    **dict.fromkeys(("preprocessing_num_workers", "dataset_num_proc", "dataset_processes"), "data.num_proc"),
    "fim_rate": "data.fim.rate",
    "fim_spm_rate": "data.fim.spm_rate",
    "stream": "data.streaming",
    "metrics": "data.metrics",
    "early_stopping_patience": "early_stopping.patience",
    "early_stopping_threshold": "early_stopping.threshold",
    "patience": "early_stopping.patience",
    "early_stop": "early_stopping",
    "rl": "task: dpo",
    "dpo_beta": "trainer.beta",
    "pref_beta": "trainer.beta",
    "pref_loss": "trainer.loss_type",
    "hooks": "python",
    "bf16": "precision: bf16",
    "fp16": "precision: fp16",
    "mixed_precision": "precision",
    "lora": "adapter",
    "finetuning_type": "adapter",
    "peft": "adapter",
    "training": "trainer",
    "train": "trainer",
    "training_args": "trainer",
    "training_arguments": "trainer",
    "deepspeed": "sharding",
    "zero": "sharding.zero_stage",
    "gpus": "hardware.devices_per_node",
    "num_gpus": "hardware.devices_per_node",
    "nodes": "hardware.num_nodes",
    "env": "launch.env",
}
# Names that other tools use with several meanings.
_SEVERAL = {"stage": "set `task` for the training task, `sharding.zero_stage` for ZeRO"}
# Other names of a choice -> candidates; the first that is a valid choice is suggested.
_CHOICE_ALIASES = {
    **{
        alias: (task.name, *(task.formats if len(task.formats) == 1 else ()))
        for task in TASKS
        for alias in task.aliases
    },
    **dict.fromkeys(("alpaca", "instruct"), ("instruction",)),
    **dict.fromkeys(("sharegpt", "messages", "conversation", "conversations", "chatml", "openai"), ("chat",)),
    **dict.fromkeys(("prompt", "completion", "input-output"), ("prompt-completion", "completion")),
    **dict.fromkeys(("plain", "raw", "code"), ("text",)),
    **dict.fromkeys(("response", "output", "answer"), ("completion",)),
    **dict.fromkeys(("assistant-only", "assistants"), ("assistant",)),
    **dict.fromkeys(("8bit", "int-8", "llm-int8"), ("int8",)),
    **dict.fromkeys(("4bit", "int4", "qlora"), ("nf4",)),
    "bf16": ("bfloat16",), "fp16": ("float16",), "half": ("float16", "fp16"), "fp32": ("float32",),
    "bfloat16": ("bf16",), "float16": ("fp16",), "float32": ("fp32",),
    **dict.fromkeys(("flash", "flash-attention", "flash-attention-2"), ("flash_attention_2",)),
    "flex": ("flex_attention",),
}  # fmt: skip
# Removed TrainingArguments fields -> what to do instead.
TRAINER_REMOVED = {
    "evaluation_strategy": "write `eval_strategy`",
    "gradient_checkpointing": "write `activation_checkpointing`",
    "gradient_checkpointing_kwargs": "write `activation_checkpointing_kwargs`",
    "warmup_ratio": "write `warmup_steps`; a value below 1 is a share of all steps",
    "group_by_length": "write `train_sampling_strategy: group_by_length`",
    "no_cuda": "write `hardware: {device: cpu}`",
    "use_mps_device": "remove it: the device is detected",
    "tokenizer": "write `model.tokenizer`",
    "overwrite_output_dir": "remove it: a run directory is never overwritten; see `run --resume`",
    "logging_dir": "remove it: logs are written to the run directory",
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
        "remove it: there is no replacement",
    ),
}


def close_key(name: str, keys: Iterable[str]) -> str | None:
    """The key of `keys` most similar to `name`, None where none is close."""
    from difflib import get_close_matches

    known = {key.lower(): key for key in keys}
    plain = name.lower().replace("-", "_").replace(" ", "_")
    if plain in known:
        return known[plain]
    near = get_close_matches(plain, known, n=1, cutoff=CUTOFF)
    return known[near[0]] if near else None


def choice_hint(value: str, choices: Iterable[str]) -> str | None:
    """`did you mean ...?` for a wrong choice, None where none is close."""
    choices = list(choices)
    plain = value.lower().replace("_", "-").replace(" ", "-")
    near = next((word for word in _CHOICE_ALIASES.get(plain, ()) if word in choices), None)
    near = near or close_key(value, choices)
    return f"did you mean {near}?" if near else None


def rewrite_hint(value: Any, kinds: Iterable[str], entry: str = "[{}]") -> str | None:
    """How to write a value of the wrong type that looks right, None where it does not.

    kinds: the expected types, named as in the field tables. entry: how to write a string as a list.
    """
    from launcher.recipe.yaml_reader import parse_scalar

    kinds = {kind.partition("[")[0] for kind in kinds}
    if isinstance(value, str):
        parsed = parse_scalar(value)
        if type(parsed).__name__ in kinds or (type(parsed) is int and "float" in kinds):
            return None if isinstance(parsed, str) else f"write {value} without quotes"
        if "bool" in kinds and value.lower() in ("yes", "no", "on", "off"):
            return "write true" if value.lower() in ("yes", "on") else "write false"
        return f"write {entry.format(value)}" if "list" in kinds else None
    if isinstance(value, int | float) and not isinstance(value, bool) and "str" in kinds:
        return "put it in quotes"
    if isinstance(value, float) and value.is_integer() and "int" in kinds:
        return f"write {int(value)}"
    if isinstance(value, dict) and "list" in kinds:
        return "write a list with one entry: begin it with `- `"
    return None


def elsewhere(name: str) -> str | None:
    """The recipe key for another tool's `name`: a dotted path, or one with its value."""
    return _ELSEWHERE.get(name.lower().replace("-", "_"))


def key_hint(path: str, level: Iterable[str], sections: dict[str, Iterable[str]]) -> str | None:
    """Hint for an unknown key.

    `path`: its dotted path; `level`: the keys known beside it; `sections`: section -> its keys.
    """
    parent, _, name = path.rpartition(".")
    plain = name.lower().replace("-", "_")
    level = list(level)
    if plain in level:
        return f"did you mean `{plain}`?"
    if plain in _SEVERAL:
        return _SEVERAL[plain]
    if plain in TRAINER_REMOVED:
        return f"`{name}` belongs under `trainer:`, and there: {TRAINER_REMOVED[plain]}"
    if plain in _ELSEWHERE:
        target = _ELSEWHERE[plain]
        inner = target.removeprefix(f"{parent}.") if parent else target
        return f"write `{inner}`"
    if plain in TRAINER_OWNED:
        return TRAINER_OWNED[plain]
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


def listed(names: Iterable[object], most: int = 16) -> str:
    """Names for a message: the first `most`, each shortened, and the number of the others."""
    every = [str(name) for name in names]
    shown = [name if len(name) <= 60 else f"{name[:57]}..." for name in every[:most]]
    more = [f"and {len(every) - most:,} more"] if len(every) > most else []
    return ", ".join([*shown, *more]) or "none"


def describe(value: Any) -> str:
    """A value for a message: as in YAML, shortened; strings are marked as such."""
    if value is None:
        return "null"
    if isinstance(value, str):
        text = value if len(value) <= 60 else value[:57] + "..."
        return f'"{text}" (string)'
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return json.dumps(value)
