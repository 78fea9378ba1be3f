"""Suggest the key or choice that was probably meant; render values in messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from launcher.recipe.field_tables import TRAINER_OWNED
from launcher.tasks import DEFAULT_TASK, INSTEAD, TASKS

CUTOFF = 0.75


def _by_alias(names: Mapping[str, str]) -> dict[str, str]:
    """Key -> its other names, separated by spaces; the result is name -> key."""
    return {alias: key for key, aliases in names.items() for alias in aliases.split()}


# Other tools' names of TrainingArguments fields.
TRAINER_ALIASES = _by_alias(
    {
        "learning_rate": "lr",
        "per_device_train_batch_size": "batch_size train_batch_size micro_batch_size per_device_batch_size",
        "per_device_eval_batch_size": "eval_batch_size",
        "num_train_epochs": "epochs num_epochs",
        "max_steps": "steps train_steps num_steps",
        "optim": "optimizer",
        "lr_scheduler_type": "scheduler lr_scheduler",
        "warmup_steps": "warmup num_warmup_steps",
        "gradient_accumulation_steps": "grad_accum grad_accumulation_steps accumulation_steps",
        "max_grad_norm": "grad_clip gradient_clipping clip_grad_norm",
        "report_to": "logger wandb",
        "metric_for_best_model": "metric best_metric",
        "eval_steps": "eval_interval",
        "save_steps": "save_interval",
        "logging_steps": "log_interval",
    }
)
ADAPTER_ALIASES = _by_alias(
    {
        "r": "rank lora_r lora_rank",
        "lora_alpha": "alpha",
        "lora_dropout": "dropout",
        "target_modules": "modules lora_target_modules",
    }
)
# Other tools' names, in any section, of a dotted path, maybe with its value.
_ELSEWHERE = _by_alias(
    {
        "model.name_or_path": "model_name model_path model_name_or_path base_model pretrained_model "
        "pretrained_model_name_or_path",
        "model.tokenizer": "tokenizer_name tokenizer_name_or_path",
        "model.chat_template": "template",
        "model.add_tokens": "added_tokens new_tokens",
        "model.dtype": "torch_dtype",
        "model.quantization: int8": "load_in_8bit",
        "model.quantization: nf4": "load_in_4bit",
        "model.quantization": "quantization_bit",
        "model.attn_implementation": "use_flash_attention_2 flash_attention flash_attn",
        "data.train": "dataset datasets dataset_name dataset_path data_path train_file train_data "
        "train_dataset",
        "data.eval": "val_set_size val_size eval_split eval_file eval_data eval_dataset val_file "
        "validation_file validation_data test_datasets",
        "data.max_length": "max_seq_length max_seq_len sequence_length sequence_len seq_length seq_len "
        "block_size cutoff_len model_max_length",
        "data.packing": "sample_packing packing pack packed",
        "data.loss_on": "train_on_inputs mask_prompt completion_only_loss assistant_only_loss",
        "data.num_proc": "preprocessing_num_workers dataset_num_proc dataset_processes",
        "data.fim.rate": "fim_rate",
        "data.fim.spm_rate": "fim_spm_rate",
        "data.streaming": "stream",
        "data.metrics": "metrics",
        "early_stopping.patience": "early_stopping_patience patience",
        "early_stopping.threshold": "early_stopping_threshold",
        "early_stopping": "early_stop",
        "task: dpo": "rl",
        "trainer.beta": "dpo_beta pref_beta",
        "trainer.loss_type": "pref_loss",
        "python": "hooks",
        "precision: bf16": "bf16",
        "precision: fp16": "fp16",
        "precision": "mixed_precision",
        "adapter": "lora finetuning_type peft",
        "trainer": "training train training_args training_arguments",
        "sharding": "deepspeed",
        "sharding.zero_stage": "zero",
        "hardware.devices_per_node": "gpus num_gpus",
        "hardware.num_nodes": "nodes",
        "launch.env": "env",
    }
)
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
# Removed choices -> one that replaces it, and what to write.
_CHOICES_REMOVED = {
    "jobset": ("job", "write `kind: job`: an Indexed Job, which clusters without Kubeflow run as well"),
}
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
    **_by_alias(
        {
            "remove it: there is no replacement": "jit_mode_eval use_ipex tpu_num_cores tpu_metrics_debug "
            "past_index ray_scope mp_parameters use_legacy_prediction_loop"
        }
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


def is_spelling(name: str, key: str) -> bool:
    """Whether `name` is `key` but for separators, capitals, a plural, or one or two typing errors.

    A word with digits, or of up to three letters, must be the same: fp32 is not fp16, max is not min.
    """
    words, others = ([w.removesuffix("s") for w in re.findall("[a-z0-9]+", n.lower())] for n in (name, key))
    if "".join(words) == "".join(others):
        return True
    errors = [_distance(*pair) for pair in zip(words, others, strict=False)]
    for word, other, wrong in zip(words, others, errors, strict=False):
        is_short = len(word) == len(other) <= 3 or re.search(r"\d", word + other)
        if wrong and (is_short or wrong > (1 if min(len(word), len(other)) <= 4 else 2)):
            return False
    return len(words) == len(others) and sum(errors) <= 2


def _distance(word: str, other: str) -> int:
    """Letters to insert, remove or replace."""
    row = list(range(len(other) + 1))
    for at, letter in enumerate(word, 1):
        before, row = row, [at]
        for column, wanted in enumerate(other, 1):
            same = before[column - 1] + (letter != wanted)
            row.append(min(same, before[column] + 1, row[-1] + 1))
    return row[-1]


def choice_hint(value: str, choices: Iterable[str]) -> str | None:
    """What to write in place of a wrong choice, None where nothing is close."""
    choices = list(choices)
    plain = value.lower().replace("_", "-").replace(" ", "-")
    if plain in INSTEAD and DEFAULT_TASK in choices:
        return INSTEAD[plain]
    if plain in _CHOICES_REMOVED and _CHOICES_REMOVED[plain][0] in choices:
        return _CHOICES_REMOVED[plain][1]
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
        return f"write `{_ELSEWHERE[plain].removeprefix(f'{parent}.')}`"
    if plain in TRAINER_OWNED:
        return TRAINER_OWNED[plain]
    for section, keys in sections.items():
        if section != parent and plain in keys:
            return f"`{name}` belongs " + (f"under `{section}:`" if section else "at the top of the recipe")
    for section, aliases in (("trainer", TRAINER_ALIASES), ("adapter", ADAPTER_ALIASES)):
        if plain in aliases:
            return f"did you mean `{section}.{aliases[plain]}`?"
    near = close_key(name, level)
    return f"did you mean `{near}`?" if near else None


def listed(names: Iterable[object], most: int = 16) -> str:
    """Names for a message: the first `most`, each shortened, and the number of the others."""
    every = [str(name) if str(name).strip() else repr(str(name)) for name in names]
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
