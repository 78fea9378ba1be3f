"""Fields of TrainingArguments (any version of transformers), LoraConfig and bitsandbytes as recipe keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from launcher.files.safe_files import parse_json
from launcher.importing.conversions import Drop, Number, Taker, To, as_bool, as_number, on
from launcher.importing.reading import Effect, Given, Reading, is_secret, shown
from launcher.recipe.field_tables import (
    ADAPTER_OWNED,
    TASK_TABLES,
    TRAINER_OWNED,
    adapter_fields,
    trainer_fields,
)
from launcher.recipe.fields import check_adapter, check_trainer
from launcher.recipe.nested_fields import CHECKPOINTING
from launcher.recipe.suggestions import TRAINER_REMOVED
from launcher.tasks import DEFAULT_TASK, TASKS

# Written even where the file is silent: a recipe's own defaults are others.
TRANSFORMERS_DEFAULTS: dict[str, Any] = {
    "trainer.learning_rate": 5e-5,
    "precision": "fp32",
    "trainer.num_train_epochs": 3.0,
}
NEEDED_FIELDS = ("learning_rate", "per_device_train_batch_size", "num_train_epochs", "max_steps",
                 "gradient_accumulation_steps", "bf16", "fp16")  # fmt: skip
"""Fields that the user must set where the value of the file cannot be used."""
RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "push_to_hub_model_id": "hub_model_id",
    "xpu_backend": "ddp_backend",
    "use_liger": "use_liger_kernel",
}
"""Old name -> name of today, with the same values."""


@dataclass(frozen=True, slots=True)
class Field:
    """A key that is a field of `trainer` or `adapter`, which checks its value."""

    key: str
    note: str = ""
    default: Any = None
    """The tool's own, for `Peer.fill`."""
    required: str | None = None
    """Why a recipe needs the key, for `Peer.fill`: the end of a sentence about the file."""

    def __call__(self, reading: Reading, given: Given) -> None:
        section, _, name = self.key.partition(".")
        if section == "adapter":
            take_adapter(reading, name, given)
        else:
            take_field(reading, given, name)


def fields(section: str, names: str, prefix: str = "") -> dict[str, Field]:
    """Keys that are called as the fields, with a prefix."""
    return {prefix + name: Field(f"{section}.{name}") for name in names.split()}


def take_argument(reading: Reading, given: Given) -> bool:
    """Take one field of TrainingArguments, or drop it with its reason.

    False where no version of transformers (nor trl's DPOConfig) has such a field; then nothing was done.
    """
    name = given.name
    if name not in field_names():
        return False
    if given.value is None:
        reading.know(name)
    elif is_secret(name, given.value):
        reading.drop(given, Effect.NONE, "")
    elif name in _SPECIAL:
        _SPECIAL[name](reading, given)
    elif name in TRAINER_OWNED:
        reading.drop(given, Effect.NONE, TRAINER_OWNED[name])
    elif name in RENAMED or name in _all_fields():
        take_field(reading, given)
    else:
        reading.drop(given, Effect.NONE, TRAINER_REMOVED[name])
    return True


def take_field(reading: Reading, given: Given, to: str | None = None) -> None:
    """Take a value for `trainer.<to>` if that field accepts it; else drop it with what is wrong."""
    target = to or RENAMED.get(given.name, given.name)
    if reading.leaves_open(f"trainer.{target}", given):
        return
    converted = convert(given.value, _all_fields()[target])
    own = reading.task.name
    task = next((task for task in (None, own, *TASK_TABLES) if target in _fields_of(task)), None)
    problems = check_trainer({target: converted}, None, task or DEFAULT_TASK)
    if problems:
        effect = Effect.NEEDED if target in NEEDED_FIELDS else Effect.TRAINING
        reading.drop(given, effect, problems[0].message, problems[0].hint or "")
        return
    reading.take(f"trainer.{target}", converted, given)


def convert(value: Any, entry: Mapping[str, Any]) -> Any:
    """A value in the type of its field: numbers and JSON as text, and what YAML 1.1 reads otherwise."""
    kinds = set(entry["types"])
    if value is False and "no" in entry.get("choices", ()) and "bool" not in kinds:
        return "no"  # an unquoted `no`, as PyYAML reads it
    if isinstance(value, str):
        value = value.strip()
        value = _from_text(value, kinds)
        if isinstance(value, str) and value.lower() in entry.get("choices", ()):
            value = value.lower()
    if isinstance(value, float) and "float" not in kinds and "int" in kinds and value.is_integer():
        return int(value)
    return value


def field_names() -> set[str]:
    """Fields of TrainingArguments of any version."""
    return {*_all_fields(), *TRAINER_REMOVED, *TRAINER_OWNED, *_SPECIAL, *RENAMED}


def fill_defaults(reading: Reading, defaults: Mapping[str, Any], logging_steps: int = 500) -> None:
    """Set the other tool's defaults (recipe key -> value) where the file sets nothing.

    logging_steps: the interval of evaluations where the file has neither eval_steps nor logging_steps.
    """
    unknown = {entry.key.rpartition(".")[2] for entry in reading.dropped if entry.effect is Effect.NEEDED}
    for key, value in defaults.items():
        name = key.rpartition(".")[2]
        if name in unknown or (name == "precision" and unknown & {"bf16", "fp16"}):
            continue  # the file sets it, by a value that cannot be used
        reading.default(key, value, name)
    if reading.value("trainer.eval_strategy") == "steps":
        reading.default(
            "trainer.eval_steps", reading.value("trainer.logging_steps") or logging_steps, "eval_steps"
        )
    if reading.value("trainer.save_strategy") == "steps":
        reading.default("trainer.save_steps", 500, "save_steps")


def _fields_of(task: str | None) -> Mapping[str, Any]:
    return trainer_fields(task or DEFAULT_TASK)


@cache
def _all_fields() -> dict[str, Any]:
    """Those of TrainingArguments, and those that only one task has."""
    fields: dict[str, Any] = {}
    for task in (*TASK_TABLES, None):
        fields |= _fields_of(task)
    return fields


def _from_text(text: str, kinds: set[str]) -> Any:
    """The text as one of the kinds; itself where it is none of them."""
    if text in ("None", "null") and "none" in kinds and "str" not in kinds:
        return None
    if "dict" in kinds and text.startswith("{"):
        try:
            return parse_json(text)
        except ValueError:
            return text
    number = as_number(text) if kinds & {"int", "float"} else None
    if number is not None:
        return number
    if "bool" in kinds and (switch := as_bool(text)) is not None:
        return switch
    return text


def _precision(reading: Reading, given: Given) -> None:
    switch, before = as_bool(given.value), reading.taken.get("precision")
    if switch is None:
        reading.drop(given, Effect.NEEDED, f"expected true or false for {given.name}")
    elif switch and before is not None and not before.is_default and before.value != given.name:
        reading.refuse(given, f"is true, and so is {before.said}: transformers refuses both")
    elif switch:
        reading.take("precision", given.name, given)
    else:
        reading.know(given.name)
        if given.name == "bf16":  # trl's and axolotl's default is bf16: this takes it away
            reading.default("precision", "fp32", "bf16: false", line=given.line)


def _checkpointing_kwargs(reading: Reading, given: Given) -> None:
    options = convert(given.value, {"types": ["dict"]})
    if not isinstance(options, dict):
        reading.drop(given, Effect.NONE, "expected a mapping; memory only")
        return
    known = {key: item for key, item in options.items() if key in CHECKPOINTING}
    for key in options.keys() - known.keys():
        reading.drop(given.inner(key, options[key]), Effect.NONE, "no field of torch's checkpoint")
    reading.know(given.name)
    if known.pop("offload", None) is True:
        reading.take("sharding.offload_activations", "cpu", given.inner("offload", True))
    if known:
        take_field(reading, Given(given.name, known, given.line))


_BOTH = "warmup_steps is given too, and takes precedence"


def _warmup_ratio(reading: Reading, given: Given) -> None:
    ratio = as_number(given.value)
    before = reading.taken.get("trainer.warmup_steps")
    if ratio is None or not 0 <= ratio <= 1:
        reading.drop(given, Effect.TRAINING, "expected a share from 0 to 1")
    elif before is not None and before.value and not before.said.startswith(given.name):
        reading.drop(given, Effect.NONE, _BOTH)
    elif ratio == 1:
        reading.drop(
            given, Effect.TRAINING, "a share is below 1", "write trainer.warmup_steps as a number of steps"
        )
    else:
        reading.take("trainer.warmup_steps", ratio, given, said=f"{given.name}: {shown(given.value)}",
                     note="below 1: a share of all steps")  # fmt: skip


def _warmup_steps(reading: Reading, given: Given) -> None:
    ratio = reading.taken.get("trainer.warmup_steps")
    if ratio is not None and ratio.said.startswith("warmup_ratio"):
        if as_number(given.value) == 0:
            reading.know(given.name)
            return
        reading.drop(Given("warmup_ratio", ratio.value, ratio.place.line), Effect.NONE, _BOTH)
    take_field(reading, given)


def _max_steps(reading: Reading, given: Given) -> None:
    number = as_number(given.value)
    if number is not None and number <= 0:
        reading.know(given.name)
    else:
        take_field(reading, given)


def _accelerator(reading: Reading, given: Given) -> None:
    before = reading.value("trainer.accelerator_config")
    if isinstance(before, str):
        reading.drop(given, Effect.NONE, f"accelerator_config is the file {before}")
        return
    config = {**(before or {}), given.name: as_bool(given.value)}
    reading.take("trainer.accelerator_config", config, given)


def _do_train(reading: Reading, given: Given) -> None:
    if as_bool(given.value) is False:
        reading.refuse(given, "is false: this file does not train")
    reading.know(given.name)


def _deepspeed(reading: Reading, given: Given) -> None:
    """A file's name is followed by `join`; a mapping within the file is taken at once."""
    config = convert(given.value, {"types": ["dict"]})
    if isinstance(config, dict):
        reading.inline.append((config, given.line))
        reading.know(given.name)
        return
    reading.take("sharding.engine", "deepspeed", given)
    reading.name_file(str(given.value), given.line)


_MEMORY = "memory only: each block is gathered and dropped again"
_LOADING = Drop(Effect.NONE, "host memory only: how the weights are loaded, not which")
# How each block is wrapped and gathered is the engine's own matter here, and needs no message.
_WRAPPING = (
    "auto_wrap_policy", "transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap",
    "transformer_cls_to_wrap", "min_num_params", "backward_prefetch",
    "backward_prefetch_policy", "forward_prefetch", "use_orig_params",
    "xla", "xla_fsdp_settings", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "limit_all_gathers", "version",
    "offload_pin_memory", "cpu_offload_pin_memory",
)  # fmt: skip
_LEFT = {
    "cpu_ram_efficient_loading": _LOADING,
    "sync_module_states": _LOADING,
    "state_dict_type": Drop(Effect.NONE, "the format of checkpoints alone"),
    "final_state_dict_type": Drop(Effect.NONE, "the format of the result alone: it is complete"),
    "ignored_modules": Drop(Effect.TRAINING, "every module is sharded and synchronised here"),
    "mixed_precision_policy": Drop(Effect.TRAINING, "`precision` decides it here"),
}
"""Options that are listed where they are on."""
_STRATEGIES = {
    "FULL_SHARD": "full", "1": "full", "SHARD_GRAD_OP": "grad", "2": "grad", "NO_SHARD": "none",
    "3": "none", "HYBRID_SHARD": "hybrid", "4": "hybrid", "HYBRID_SHARD_ZERO2": "hybrid", "5": "hybrid",
}  # fmt: skip


def take_fsdp(reading: Reading, given: Given) -> None:
    """`fsdp: "full_shard auto_wrap"` of TrainingArguments; true and "" as its newer and older forms."""
    value, name = given.value, given.name
    text = shown(value).lower() if not isinstance(value, list) else " ".join(map(str, value))
    words = [word.rpartition(".")[2].strip("'\"[]").lower() for word in text.replace(",", " ").split()]
    reading.know(name)
    if not words or words == ["false"]:
        return
    engine = "ddp" if "no_shard" in words else "fsdp"
    reading.take("sharding.engine", engine, given, said=f"{name}: {text}")
    for word in words:
        part = Given(f"{name}: {word}", word, given.line)
        if word == "offload":
            reading.take("sharding.offload_param", "cpu", part)
        elif word in ("shard_grad_op", "hybrid_shard", "hybrid_shard_zero2"):
            reading.drop(part, Effect.NONE, _MEMORY)
        elif word not in ("full_shard", "auto_wrap", "true", "no_shard"):
            reading.drop(part, Effect.NEEDED, "no option of `fsdp`")


def take_fsdp_options(reading: Reading, given: Given) -> None:
    """The mapping `fsdp_config`, with or without the prefix `fsdp_` of its keys."""
    if not isinstance(given.value, Mapping):
        reading.drop(given, Effect.NONE, "a file: give it as a FILE if it sets offload")
        return
    reading.know(given.name)
    for key, item in given.value.items():
        take_fsdp_option(reading, given.inner(key, item))


def take_fsdp_option(reading: Reading, given: Given) -> None:
    """One key of an fsdp_config."""
    plain, value = given.name.rpartition(".")[2].replace("-", "_").removeprefix("fsdp_"), given.value
    reading.know(given.name)
    if value is None:
        return
    if plain in _LEFT:
        if str(value).strip().lower() not in ("false", "no", "0", "off", "none", ""):
            _LEFT[plain](reading, given)
    elif plain in ("offload_params", "cpu_offload"):
        if as_bool(value):
            reading.take("sharding.offload_param", "cpu", given)
    elif plain == "activation_checkpointing":
        if as_bool(value):
            reading.take("trainer.activation_checkpointing", True, given)
    elif plain in ("sharding_strategy", "reshard_after_forward"):
        _strategy(reading, given)
    elif plain == "version" and str(value) == "1":
        reading.drop(given, Effect.NONE, "FSDP2 is used, which trains the same")
    elif plain not in _WRAPPING:
        reading.drop(given, Effect.NONE, "no option of FSDP that is known here")


def _strategy(reading: Reading, given: Given) -> None:
    kind = _STRATEGIES.get(str(given.value).rpartition(".")[2].upper(), "full")
    if str(given.value).lower() in ("false", "no"):
        kind = "grad"
    if kind == "none":
        reading.take("sharding.engine", "ddp", given)
    elif kind != "full":
        reading.drop(given, Effect.NONE, _MEMORY)


PEFT_DEFAULTS: dict[str, Any] = {"adapter.r": 8, "adapter.lora_alpha": 8, "adapter.lora_dropout": 0.0}
"""LoraConfig's own, which a recipe must name: its planner's are others."""
TASK_TYPES = {task.peft_task: task.name for task in reversed(TASKS) if task.peft_task}
"""`task_type` of an adapter_config.json -> the first task that has it."""


def take_adapter(reading: Reading, name: str, given: Given) -> bool:
    """Take one field of LoraConfig. False where LoraConfig has no such field."""
    known = adapter_fields()
    if name not in known and name not in ADAPTER_OWNED and name != "autocast_adapter_dtype":
        return False
    if given.value is None or (name in ADAPTER_OWNED and name != "task_type"):
        reading.know(given.name)
        return True
    if name == "task_type":
        _take_task(reading, given)
        return True
    if reading.leaves_open(f"adapter.{name}", given):
        return True
    converted = convert(given.value, known.get(name, {"types": ["bool"]}))
    if name == "target_modules" and converted == ["all-linear"]:
        converted = "all-linear"
    problems = check_adapter({name: converted})
    if problems:
        effect = Effect.NEEDED if name in ("r", "lora_alpha", "target_modules") else Effect.TRAINING
        reading.drop(given, effect, problems[0].message, problems[0].hint or "")
    else:
        reading.take(f"adapter.{name}", converted, given)
    return True


def _take_task(reading: Reading, given: Given) -> None:
    task = TASK_TYPES.get(str(given.value).rpartition(".")[2])
    reading.know(given.name)
    if task is None:
        reading.refuse(given, f"is {shown(given.value)}, which no task here is")
    else:
        reading.default("task", task, f"{given.name}: {shown(given.value)}", line=given.line)


_ALWAYS = Drop(Effect.NONE, "tokens per second are always reported")
_BY_ITSELF = Drop(Effect.NONE, "each block of the model is wrapped")
_CPU = To("hardware.device", on("cpu"))
_SPECIAL: dict[str, Taker] = {
    "bf16": _precision,
    "fp16": _precision,
    "seed": To("seed", Number("a whole number from 0", 0, 2**63), effect=Effect.TRAINING),
    "no_cuda": _CPU,
    "use_cpu": _CPU,
    "gradient_checkpointing_kwargs": _checkpointing_kwargs,
    "activation_checkpointing_kwargs": _checkpointing_kwargs,
    "warmup_ratio": _warmup_ratio,
    "warmup_steps": _warmup_steps,
    "max_steps": _max_steps,
    "group_by_length": To("trainer.train_sampling_strategy", on("group_by_length")),
    "include_inputs_for_metrics": To("trainer.include_for_metrics", on(["inputs"])),
    "dispatch_batches": _accelerator,
    "split_batches": _accelerator,
    "deepspeed": _deepspeed,
    "fsdp": take_fsdp,
    "fsdp_config": take_fsdp_options,
    "fsdp_transformer_layer_cls_to_wrap": _BY_ITSELF,
    "fsdp_min_num_params": _BY_ITSELF,
    "do_train": _do_train,
    "do_eval": Drop(Effect.NONE, "`data.eval` decides it", when=True),
    "do_predict": Drop(Effect.NONE, "prediction is not part of a run", when=True),
    "auto_find_batch_size": Drop(
        Effect.NONE, "the plan finds a batch that fits", "write `on_oom: adapt` for a run that adapts", True
    ),
    "remove_unused_columns": Drop(Effect.NONE, "prepared rows have no other columns", when=False),
    "overwrite_output_dir": Drop(Effect.NONE, "a run directory is never overwritten"),
    "include_tokens_per_second": _ALWAYS,
    "include_effective_tokens_per_second": _ALWAYS,
    "disable_tqdm": Drop(Effect.NONE, "the run shows its own progress"),
}
