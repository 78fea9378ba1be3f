"""One field of TrainingArguments, of any version of transformers, as keys of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from launcher.errors import RecipeError
from launcher.facts.model_config import find_model_config
from launcher.facts.safe_files import parse_json
from launcher.importing.reading import Effect, Reading, is_secret, shown
from launcher.recipe.field_tables import (
    ADAPTER_OWNED,
    TASK_TABLES,
    TRAINER_OWNED,
    adapter_fields,
    trainer_fields,
)
from launcher.recipe.fields import CHECKPOINTING_KWARGS, check_adapter, check_trainer
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
"""Fields whose value a person has to say where the file computes it."""
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
_TRUE, _FALSE = ("true", "yes", "on", "1", "y", "t"), ("false", "no", "off", "0", "n", "f")
_OLD_SWITCHES = (
    "bf16", "fp16", "no_cuda", "use_cpu", "use_mps_device", "do_train", "do_eval", "do_predict",
    "overwrite_output_dir", "save_safetensors", "group_by_length", "include_inputs_for_metrics",
    "dispatch_batches", "split_batches", "auto_find_batch_size", "remove_unused_columns", "disable_tqdm",
    "include_tokens_per_second", "jit_mode_eval", "use_ipex", "tpu_metrics_debug", "debug_mode",
    "use_legacy_prediction_loop", "use_liger",
)  # fmt: skip
"""Switches that the table of today's fields does not have."""
Taker = Callable[[Reading, str, Any, int | None], None]


def take_argument(reading: Reading, name: str, value: Any, line: int | None) -> bool:
    """Take one field into the recipe's keys, or drop it with its reason.

    `value`: of a YAML, of Python, or the text of a flag. False where no version of transformers (nor trl's
    DPOConfig) has such a field; then nothing was done.
    """
    fields = _all_fields()
    if name not in fields and name not in TRAINER_REMOVED and name not in _SPECIAL and name not in RENAMED:
        return False
    if value is None:
        reading.know(name)
    elif is_secret(name, value):
        reading.drop(name, value, line, Effect.NONE, "")
    elif name in _SPECIAL:
        _SPECIAL[name](reading, name, value, line)
    elif name in TRAINER_OWNED:
        reading.drop(name, value, line, Effect.NONE, TRAINER_OWNED[name])
    elif name in RENAMED or name in fields:
        take_field(reading, name, value, line)
    else:
        reading.drop(name, value, line, Effect.NONE, TRAINER_REMOVED[name])
    return True


def take_field(
    reading: Reading, name: str, value: Any, line: int | None, to: str | None = None, note: str = ""
) -> None:
    """Take a value for `trainer.<to>` when it is one of that field's; else drop it with what is wrong."""
    target = to or RENAMED.get(name, name)
    entry = _all_fields()[target]
    converted = convert(value, entry)
    task = next((task for task in (None, *TASK_TABLES) if target in _fields_of(task)), None)
    problems = check_trainer({target: converted}, None, task or DEFAULT_TASK)
    if problems:
        needed = target in NEEDED_FIELDS
        effect = Effect.NEEDED if needed else Effect.TRAINING
        reading.drop(name, value, line, effect, f"{problems[0].message}", problems[0].hint or "")
        return
    same = target == name and converted == value
    said = name if same else f"{name}: {shown(value)}"
    reading.take(f"trainer.{target}", converted, line, said, note=note)


def convert(value: Any, entry: Mapping[str, Any]) -> Any:
    """A value in the type of its field: text of a flag, and what YAML 1.1 reads in another way."""
    kinds = set(entry["types"])
    if isinstance(value, tuple):
        value = list(value)
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


def as_bool(value: Any) -> bool | None:
    """A switch, also as the text of a flag or of YAML 1.1; None where it is none."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    return True if text in _TRUE else False if text in _FALSE else None


def as_number(value: Any) -> int | float | None:
    """A number, also as text such as 2e-5; None where it is none, nor finite."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if number != number or number in (float("inf"), float("-inf")):
        return None
    if isinstance(value, int):
        return value
    return int(number) if isinstance(value, str) and value.strip().lstrip("+-").isdecimal() else number


def field_kind(name: str) -> str | None:
    """How many words of a command line a field of TrainingArguments takes, in any version of transformers.

    `switch`: true, false or nothing; `bare`: nothing; `one`; `many`. None: there is no such field.
    """
    entry = _all_fields().get(RENAMED.get(name, name))
    if entry is not None:
        kinds = set(entry["types"])
        if any(kind.startswith("list") for kind in kinds):
            return "many"
        return "switch" if "bool" in kinds and not kinds & {"str", "int", "float", "dict"} else "one"
    if name in TRAINER_OWNED or name in TRAINER_REMOVED or name in _SPECIAL:
        return "switch" if name in _OLD_SWITCHES else "one"
    if name.startswith("no_") and field_kind(name.removeprefix("no_")) == "switch":
        return "bare"
    return None


def field_names() -> set[str]:
    """Fields of TrainingArguments of any version."""
    return {*_all_fields(), *TRAINER_REMOVED, *TRAINER_OWNED, *_SPECIAL, *RENAMED}


def fill_defaults(reading: Reading, defaults: Mapping[str, Any], logging_steps: int = 500) -> None:
    """Write what the other tool uses where the file is silent and a recipe would use something else.

    defaults: recipe key -> value, such as TRANSFORMERS_DEFAULTS. logging_steps: what an evaluation by steps
    goes by where the file says neither eval_steps nor logging_steps.
    """
    unknown = {entry.key.lstrip("-") for entry in reading.dropped if entry.effect is Effect.NEEDED}
    if any(name.startswith("**") for name in unknown):  # it may hold any of them
        defaults = {}
    for key, value in defaults.items():
        if key == "trainer.num_train_epochs" and "trainer.max_steps" in reading.taken:
            continue
        name = key.rpartition(".")[2]
        if name in unknown or (name == "precision" and unknown & {"bf16", "fp16"}):
            continue  # the file says it, in words that only running it would give
        reading.take(key, value, None, f"{name}: {shown(value)}", default=True)
    if reading.value("trainer.eval_strategy") == "steps" and "trainer.eval_steps" not in reading.taken:
        steps = reading.value("trainer.logging_steps") or logging_steps
        reading.take("trainer.eval_steps", steps, None, f"eval_steps: {steps}", default=True)
    if reading.value("trainer.save_strategy") == "steps":
        reading.take("trainer.save_steps", 500, None, "save_steps: 500", default=True)


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


def _precision(reading: Reading, name: str, value: Any, line: int | None) -> None:
    switch = as_bool(value)
    before = reading.taken.get("precision")
    if switch is None:
        reading.drop(name, value, line, Effect.NEEDED, f"expected true or false for {name}")
    elif switch and before is not None and not before.is_default and before.value != name:
        reading.refuse(name, line, f"is true, and so is {before.said}: transformers refuses both")
    elif switch:
        reading.take("precision", name, line, f"{name}: true")
    else:
        reading.know(name)
        if name == "bf16":  # trl's and axolotl's default is bf16: this takes it away
            reading.take("precision", "fp32", line, "bf16: false", default=True)


def _seed(reading: Reading, name: str, value: Any, line: int | None) -> None:
    number = as_number(value)
    if isinstance(number, int) and number >= 0:
        reading.take("seed", number, line, name)
    else:
        reading.drop(name, value, line, Effect.TRAINING, "a seed is a whole number from 0")


def _cpu(reading: Reading, name: str, value: Any, line: int | None) -> None:
    if as_bool(value):
        reading.take("hardware.device", "cpu", line, f"{name}: true")
    else:
        reading.know(name)


def _checkpointing_kwargs(reading: Reading, name: str, value: Any, line: int | None) -> None:
    given = convert(value, {"types": ["dict"]})
    if not isinstance(given, dict):
        reading.drop(name, value, line, Effect.NONE, "expected a mapping; memory only")
        return
    known = {key: item for key, item in given.items() if key in CHECKPOINTING_KWARGS}
    for key in given.keys() - known.keys():
        reading.drop(f"{name}.{key}", given[key], line, Effect.NONE, "no field of torch's checkpoint")
    reading.know(name)
    if known:
        take_field(reading, name, known, line)


def _warmup_ratio(reading: Reading, name: str, value: Any, line: int | None) -> None:
    ratio = as_number(value)
    steps = reading.value("trainer.warmup_steps")
    if ratio is None or not 0 <= ratio <= 1:
        reading.drop(name, value, line, Effect.TRAINING, "expected a share from 0 to 1")
    elif steps and not reading.taken["trainer.warmup_steps"].said.startswith(name):
        reading.drop(name, value, line, Effect.NONE, "warmup_steps is given too, and goes before it")
    elif ratio == 1:
        reading.drop(name, value, line, Effect.TRAINING, "a warm-up as long as the run cannot be said by a "
                     "share; write trainer.warmup_steps as a number of steps")  # fmt: skip
    else:
        reading.take("trainer.warmup_steps", ratio, line, f"{name}: {shown(value)}",
                     note="below 1: a share of all steps")  # fmt: skip


def _warmup_steps(reading: Reading, name: str, value: Any, line: int | None) -> None:
    ratio = reading.taken.get("trainer.warmup_steps")
    if ratio is not None and ratio.said.startswith("warmup_ratio") and as_number(value) == 0:
        reading.know(name)
        return
    if ratio is not None and ratio.said.startswith("warmup_ratio"):
        reading.drop("warmup_ratio", ratio.value, ratio.place.line, Effect.NONE,
                     "warmup_steps is given too, and goes before it")  # fmt: skip
    take_field(reading, name, value, line)


def _max_steps(reading: Reading, name: str, value: Any, line: int | None) -> None:
    number = as_number(value)
    if number is not None and number <= 0:
        reading.know(name)
        return
    take_field(reading, name, value, line)


def _switch_to(target: str, wanted: Any, note: str = "") -> Taker:
    """A switch whose true is one value of another field."""

    def take(reading: Reading, name: str, value: Any, line: int | None) -> None:
        if as_bool(value):
            reading.take(f"trainer.{target}", wanted, line, f"{name}: true", note=note)
        else:
            reading.know(name)

    return take


def _accelerator(reading: Reading, name: str, value: Any, line: int | None) -> None:
    before = reading.value("trainer.accelerator_config")
    if isinstance(before, str):
        reading.drop(name, value, line, Effect.NONE, f"accelerator_config is the file {before}")
        return
    config = dict(before or {})
    config[name] = as_bool(value)
    reading.take("trainer.accelerator_config", config, line, f"{name}: {shown(value)}")


def _silent_unless(wanted: bool, effect: Effect, reason: str, hint: str = "") -> Taker:
    """A switch that is dropped with a reason only where it is `wanted`."""

    def take(reading: Reading, name: str, value: Any, line: int | None) -> None:
        if as_bool(value) is wanted:
            reading.drop(name, value, line, effect, reason, hint)
        else:
            reading.know(name)

    return take


def _do_train(reading: Reading, name: str, value: Any, line: int | None) -> None:
    if as_bool(value) is False:
        reading.refuse(name, line, "is false: this file does not train")
    reading.know(name)


def _deepspeed(reading: Reading, name: str, value: Any, line: int | None) -> None:
    """A file's name is followed by `join`; a mapping within the file is taken at once."""
    config = convert(value, {"types": ["dict"]})
    if isinstance(config, dict):
        reading.inline.append((config, line))
        reading.know(name)
        return
    reading.take("sharding.engine", "deepspeed", line, f"{name}: {shown(value)}")
    reading.name_file(str(value), line)


def _kept_out(reason: str) -> Taker:
    def take(reading: Reading, name: str, value: Any, line: int | None) -> None:
        reading.drop(name, value, line, Effect.NONE, reason)

    return take


OFFLOAD = "memory only: FSDP keeps its shards on the device here"
NEAREST = "DeepSpeed offloads: sharding: {zero_stage: 3, offload_param: cpu, offload_optimizer: cpu}"
_MEMORY = "memory only: each block is gathered and dropped again"
# How each block is wrapped and gathered is the engine's own matter here, and needs no message.
_WRAPPING = (
    "auto_wrap_policy", "transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap",
    "transformer_cls_to_wrap", "min_num_params", "backward_prefetch",
    "backward_prefetch_policy", "forward_prefetch", "use_orig_params",
    "xla", "xla_fsdp_settings", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "limit_all_gathers", "version",
    "offload_pin_memory", "cpu_offload_pin_memory",
)  # fmt: skip
_LOADING = "host memory only: how the weights are loaded, not which"
_LEFT = {
    "offload_params": (Effect.NONE, OFFLOAD, NEAREST),
    "cpu_offload": (Effect.NONE, OFFLOAD, NEAREST),
    "cpu_ram_efficient_loading": (Effect.NONE, _LOADING, ""),
    "sync_module_states": (Effect.NONE, _LOADING, ""),
    "state_dict_type": (
        Effect.NONE,
        "the format of checkpoints alone",
        "",
    ),
    "final_state_dict_type": (Effect.NONE, "the format of the result alone: it is whole", ""),
    "ignored_modules": (Effect.TRAINING, "every module is sharded and synchronised here", ""),
    "mixed_precision_policy": (Effect.TRAINING, "`precision` decides it here", ""),
}
"""Options that are listed where they are on: effect, reason, hint."""
_STRATEGIES = {
    "FULL_SHARD": "full", "1": "full", "SHARD_GRAD_OP": "grad", "2": "grad", "NO_SHARD": "none",
    "3": "none", "HYBRID_SHARD": "hybrid", "4": "hybrid", "HYBRID_SHARD_ZERO2": "hybrid", "5": "hybrid",
}  # fmt: skip


def take_fsdp(reading: Reading, name: str, value: Any, line: int | None) -> None:
    """`fsdp: "full_shard auto_wrap"` of TrainingArguments; true and "" as its newer and older forms."""
    text = shown(value).lower() if not isinstance(value, list | tuple) else " ".join(map(str, value))
    words = [word.rpartition(".")[2].strip("'\"[]").lower() for word in text.replace(",", " ").split()]
    reading.know(name)
    if not words or words == ["false"]:
        return
    engine = "ddp" if "no_shard" in words else "fsdp"
    reading.take("sharding.engine", engine, line, f"{name}: {text}")
    if "offload" in words:
        reading.drop(f"{name}: offload", "offload", line, Effect.NONE, OFFLOAD, NEAREST)
    for word in ("shard_grad_op", "hybrid_shard", "hybrid_shard_zero2"):
        if word in words:
            reading.drop(f"{name}: {word}", word, line, Effect.NONE, _MEMORY)
    known = {"full_shard", "auto_wrap", "true", "offload", "no_shard", "shard_grad_op", "hybrid_shard",
             "hybrid_shard_zero2"}  # fmt: skip
    for word in words:
        if word not in known:
            reading.drop(f"{name}: {word}", word, line, Effect.NEEDED, "no word of `fsdp`")


def take_fsdp_options(reading: Reading, name: str, value: Any, line: int | None) -> None:
    """The mapping `fsdp_config`, with or without the prefix `fsdp_` of its keys."""
    if not isinstance(value, Mapping):
        reading.drop(name, value, line, Effect.NONE, "a file: give it as a FILE if it asks for offload")
        return
    reading.know(name)
    for key, item in value.items():
        take_fsdp_option(reading, f"{name}.{key}", str(key), item, line)


def take_fsdp_option(reading: Reading, said: str, key: str, value: Any, line: int | None) -> None:
    """One key of an fsdp_config; `said`: its full name in the file."""
    plain = key.removeprefix("fsdp_").replace("-", "_")
    switch = str(value).strip().lower() in ("true", "yes", "1", "on")
    reading.know(said)
    if value is None:
        return
    if plain in _LEFT:
        if str(value).strip().lower() not in ("false", "no", "0", "off", "none", ""):
            reading.drop(said, value, line, *_LEFT[plain])
    elif plain == "activation_checkpointing":
        if switch:
            reading.take("trainer.activation_checkpointing", True, line, f"{said}: true")
    elif plain in ("sharding_strategy", "reshard_after_forward"):
        _strategy(reading, said, value, line)
    elif plain == "version" and str(value) == "1":
        reading.drop(said, value, line, Effect.NONE, "FSDP2 is used, which learns the same")
    elif plain not in _WRAPPING:
        reading.drop(said, value, line, Effect.NONE, "no option of FSDP that is known here")


def _strategy(reading: Reading, said: str, value: Any, line: int | None) -> None:
    kind = _STRATEGIES.get(str(value).rpartition(".")[2].upper(), "full")
    if str(value).lower() in ("false", "no"):
        kind = "grad"
    if kind == "none":
        reading.take("sharding.engine", "ddp", line, f"{said}: {value}")
    elif kind != "full":
        reading.drop(said, value, line, Effect.NONE, _MEMORY)


PEFT_DEFAULTS: dict[str, Any] = {"adapter.r": 8, "adapter.lora_alpha": 8, "adapter.lora_dropout": 0.0}
"""LoraConfig's own, which a recipe must name: its planner's are others."""
TASK_TYPES = {task.peft_task: task.name for task in reversed(TASKS) if task.peft_task}
"""`task_type` of an adapter_config.json -> the first task that has it."""
_ATTENTION = ("q_proj", "v_proj")
PEFT_TARGETS: dict[str, list[str]] = {
    **{name: list(_ATTENTION) for name in (
        "bart", "opt", "gptj", "gpt_neo", "llama", "llama4", "mistral", "mixtral", "stablelm", "gemma",
        "gemma2", "gemma3_text", "qwen2", "qwen3")},
    **{name: ["q", "v"] for name in ("t5", "mt5")},
    **{name: ["c_attn"] for name in ("gpt2", "gpt_bigcode")},
    **{name: ["query_key_value"] for name in ("bloom", "gpt_neox", "chatglm", "RefinedWebModel",
                                              "RefinedWeb", "falcon")},
    **{name: ["query", "value"] for name in ("bert", "roberta", "xlm-roberta", "electra", "layoutlm")},
    "deberta-v2": ["query_proj", "value_proj"],
    "deberta": ["in_proj"],
    "mpt": ["Wqkv"],
    "codegen": ["qkv_proj"],
    "phi": [*_ATTENTION, "fc1", "fc2"],
}  # fmt: skip
"""model_type -> layers that peft adapts where nobody names them (peft 0.21, utils/constants.py)."""


def take_adapter(reading: Reading, name: str, value: Any, line: int | None, said: str | None = None) -> bool:
    """Take one LoraConfig field; `said`: how the file spells it. False where LoraConfig has no such field."""
    said = said or name
    fields = adapter_fields()
    if name not in fields and name not in ADAPTER_OWNED and name not in ("autocast_adapter_dtype",):
        return False
    if value is None:
        reading.know(said)
    elif name == "task_type":
        _take_task(reading, said, value, line)
    elif name in ADAPTER_OWNED:
        reading.know(said)
    else:
        _take_field(reading, name, value, line, said, fields.get(name, {"types": ["bool"]}))
    return True


def _take_field(
    reading: Reading, name: str, value: Any, line: int | None, said: str, entry: Mapping[str, Any]
) -> None:
    converted = convert(value, entry)
    if name == "target_modules" and converted in (["all-linear"], ("all-linear",)):
        converted = "all-linear"
    if isinstance(converted, set | frozenset):
        converted = sorted(converted)
    problems = check_adapter({name: converted})
    if problems:
        effect = Effect.NEEDED if name in ("r", "lora_alpha", "target_modules") else Effect.TRAINING
        reading.drop(said, value, line, effect, problems[0].message, problems[0].hint or "")
        return
    same = said == name and converted == value
    reading.take(f"adapter.{name}", converted, line, said if same else f"{said}: {shown(value)}")


def _take_task(reading: Reading, said: str, value: Any, line: int | None) -> None:
    task = TASK_TYPES.get(str(value).rpartition(".")[2])
    if task is None:
        reading.refuse(said, line, f"is {shown(value)}, which no task here is")
    else:
        reading.take("task", task, line, f"{said}: {shown(value)}", default=True)
        reading.know(said)


def take_default_targets(reading: Reading, line: int | None = None) -> None:
    """peft's own layers for this model, literally, where the file names none: a recipe's are all-linear."""
    if "adapter.target_modules" in reading.taken or "adapter.path" in reading.taken:
        return
    computed = any(entry.key.endswith("target_modules") for entry in reading.dropped)
    if computed or "adapter.target_parameters" in reading.taken:
        return
    model = reading.value("model.name_or_path")
    kind = _model_type(model, reading) if isinstance(model, str) else None
    if kind in PEFT_TARGETS:
        reading.take(
            "adapter.target_modules", list(PEFT_TARGETS[kind]), line, "target_modules",
            default=True, note=f"what peft takes for {kind} where nobody names them",
        )  # fmt: skip
        return
    known = f"for {kind}" if kind else "for a model whose configuration is not here"
    reading.needs(
        "adapter.target_modules", line, f"which layers peft would take {known} is not known here",
        "name them as the log of the other tool does, or write all-linear",
    )  # fmt: skip


def _model_type(model: str, reading: Reading) -> str | None:
    """From the model's folder beside the file, the hub's cache, the hub or the shipped facts."""
    beside = Path(reading.file).parent / model
    try:
        name = str(beside) if model.startswith((".", "/")) or beside.is_dir() else model
        config, _ = find_model_config(name, revision=reading.value("model.revision"))
    except (RecipeError, OSError, ValueError):
        return None
    kind = config.get("model_type")
    return kind if isinstance(kind, str) else None


def take_quantization(
    reading: Reading,
    kind: str,
    line: int | None,
    said: str,
    *,
    double_quant: bool | None = None,
    compute_dtype: str | None = None,
    note: str = "",
) -> None:
    """int8, nf4 or fp4 as a mapping: the short form would have a recipe's defaults.

    double_quant and compute_dtype are of 4 bits only; None leaves a recipe's default.
    """
    value: dict[str, Any] = {"type": kind}
    if kind != "int8" and double_quant is not None:
        value["double_quant"] = double_quant
    if kind != "int8" and compute_dtype is not None:
        value["compute_dtype"] = compute_dtype
    reading.take("model.quantization", value, line, said, note=note)


def dtype_name(value: Any) -> str | None:
    """float32, bfloat16, float16 or auto from text, `torch.bfloat16` or a short form; None for others."""
    text = str(value).rpartition(".")[2].strip().lower()
    short = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
    text = short.get(text, text)
    return text if text in ("float32", "bfloat16", "float16", "auto") else None


_SPECIAL: dict[str, Taker] = {
    "bf16": _precision,
    "fp16": _precision,
    "seed": _seed,
    "no_cuda": _cpu,
    "use_cpu": _cpu,
    "gradient_checkpointing_kwargs": _checkpointing_kwargs,
    "activation_checkpointing_kwargs": _checkpointing_kwargs,
    "warmup_ratio": _warmup_ratio,
    "warmup_steps": _warmup_steps,
    "max_steps": _max_steps,
    "group_by_length": _switch_to("train_sampling_strategy", "group_by_length"),
    "include_inputs_for_metrics": _switch_to("include_for_metrics", ["inputs"]),
    "dispatch_batches": _accelerator,
    "split_batches": _accelerator,
    "deepspeed": _deepspeed,
    "fsdp": take_fsdp,
    "fsdp_config": take_fsdp_options,
    "fsdp_transformer_layer_cls_to_wrap": _kept_out("each block of the model is wrapped by itself"),
    "fsdp_min_num_params": _kept_out("each block of the model is wrapped by itself"),
    "do_train": _do_train,
    "do_eval": _silent_unless(True, Effect.NONE, "`data.eval` decides it"),
    "do_predict": _silent_unless(True, Effect.NONE, "prediction is not part of a run"),
    "auto_find_batch_size": _silent_unless(
        True, Effect.NONE, "the plan finds a batch that fits", "write `on_oom: adapt` for a run that goes on"
    ),
    "remove_unused_columns": _silent_unless(False, Effect.NONE, "prepared rows have no other columns"),
    "overwrite_output_dir": _kept_out("a run directory is never overwritten"),
    "include_tokens_per_second": _kept_out("tokens per second are always reported"),
    "include_effective_tokens_per_second": _kept_out("tokens per second are always reported"),
    "disable_tqdm": _kept_out("the run shows its own progress"),
}
