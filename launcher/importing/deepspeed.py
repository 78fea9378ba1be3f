"""A DeepSpeed config: what a recipe's keys say goes there, the rest is kept as a base profile."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from launcher.engines.deepspeed_config import flatten
from launcher.errors import Problem, RecipeError
from launcher.facts.safe_files import parse_json
from launcher.importing.arguments import as_number
from launcher.importing.reading import Effect, Reading, shown
from launcher.knowledge.lint.check import apply_fixes, lint_text
from launcher.knowledge.lint.document import read_json

TOOL = "DeepSpeed config"
Lines = Callable[[str], int | None]
"""Dotted key -> line."""
_ZERO = "zero_optimization"
_TELLING = (
    _ZERO, "train_batch_size", "train_micro_batch_size_per_gpu", "fp16", "bf16", "optimizer", "scheduler",
    "gradient_clipping", "zero_allow_untested_optimizer",
)  # fmt: skip
# Not the Trainer's, whatever they say.
_IDLE_BLOCKS = {
    "activation_checkpointing": "read by deepspeed.checkpointing alone; trainer.activation_checkpointing "
    "decides it for the Trainer",
    "pipeline": "read by DeepSpeed's pipeline modules alone, which the Trainer does not make",
}
_OTHER_TRAINING = (
    "expert_parallel", "moe", "autotuning", "elasticity", "compression_training", "data_efficiency",
    "curriculum_learning", "progressive_layer_drop", "eigenvalue", "hybrid_engine", "amp",
    "quantize_training", "sparse_gradients", "sparse_attention",
)  # fmt: skip
# Told by the plan, or the same without a word: value that needs none.
_DEFAULTS: dict[str, Any] = {
    f"{_ZERO}.contiguous_gradients": True,
    f"{_ZERO}.reduce_scatter": True,
    f"{_ZERO}.reduce_bucket_size": 500_000_000,
    f"{_ZERO}.allgather_partitions": True,
    f"{_ZERO}.allgather_bucket_size": 500_000_000,
    f"{_ZERO}.sub_group_size": 1_000_000_000,
    f"{_ZERO}.stage3_prefetch_bucket_size": 50_000_000,
    f"{_ZERO}.stage3_param_persistence_threshold": 100_000,
    f"{_ZERO}.stage3_max_live_parameters": 1_000_000_000,
    f"{_ZERO}.stage3_max_reuse_distance": 1_000_000_000,
    f"{_ZERO}.round_robin_gradients": False,
    f"{_ZERO}.ignore_unused_parameters": True,
    f"{_ZERO}.offload_optimizer.pin_memory": True,
    f"{_ZERO}.offload_param.pin_memory": True,
    "fp16.auto_cast": False,
    "fp16.loss_scale": 0,
    "fp16.initial_scale_power": 16,
    "fp16.loss_scale_window": 1000,
    "fp16.hysteresis": 2,
    "fp16.min_loss_scale": 1,
    "wall_clock_breakdown": False,
    "prescale_gradients": False,
    "dump_state": False,
}
_GATHER = ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
_OLD_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_params": "offload_param",
                "cpu_offload_param": "offload_param"}  # fmt: skip


def tells(data: Any) -> bool:
    """Whether a mapping that was read is a DeepSpeed config."""
    if not isinstance(data, dict) or "distributed_type" in data:
        return False
    found = [key for key in _TELLING if key in data]
    if found == ["gradient_clipping"]:
        return False
    return bool(found) and all(
        isinstance(data[key], dict) or key not in ("fp16", "bf16", "optimizer", "scheduler") for key in found
    )


def read(text: str, file: str) -> Reading:
    """Read a config. RecipeError when it is no JSON object, or has a key twice, which DeepSpeed refuses."""
    document = read_json(text, file)
    if document.root is None or document.root.members is None:
        found = document.findings[0] if document.findings else None
        message = found.message if found else "a DeepSpeed config is an object"
        raise RecipeError(Problem("import-unreadable", message, file, found.line if found else 1))
    reading = Reading(TOOL, file)

    def line(path: str) -> int | None:
        member = document.member(path)
        return None if member is None else document.place(member.start)[0]

    for finding in document.findings:
        if finding.code == "ds-duplicate-keys":
            reading.refuse(finding.path, finding.line, finding.message, finding.hint)
    take_config(reading, document.root.plain(), line)
    return reading


def take_config(reading: Reading, config: Mapping[str, Any], line: Lines) -> None:
    """Take a config into the recipe's keys and `reading.profile`. line: dotted key -> its line."""
    rest = {key: value for key, value in flatten(config).items() if value not in (None, "auto")}
    reading.know(*flatten(config).keys() - rest.keys())
    reading.take("sharding.engine", "deepspeed", line(_ZERO), _ZERO)
    _take_batch(reading, rest, line)
    _take_precision(reading, config, rest, line)
    _take_zero(reading, config, rest, line)
    _take_parallel(reading, rest, line)
    _drop_blocks(reading, rest, line)
    take_optimizer(reading, config.get("optimizer"), line)
    take_scheduler(reading, config.get("scheduler"), line)
    for key in [key for key in rest if key.partition(".")[0] in ("optimizer", "scheduler")]:
        del rest[key]
    for key in list(rest):
        if rest[key] == _DEFAULTS.get(key, rest) or key.endswith(_GATHER):
            reading.know(key)
            del rest[key]
    _keep(reading, rest, line)


def _take_batch(reading: Reading, rest: dict[str, Any], line: Lines) -> None:
    micro = _number(reading, rest, "train_micro_batch_size_per_gpu", line)
    steps = _number(reading, rest, "gradient_accumulation_steps", line)
    whole = _number(reading, rest, "train_batch_size", line)
    if micro is not None:
        key = "train_micro_batch_size_per_gpu"
        reading.take("trainer.per_device_train_batch_size", micro, line(key), key)
    if steps is not None and not (whole is not None and micro is None):
        key = "gradient_accumulation_steps"
        reading.take(f"trainer.{key}", steps, line(key), key)
    if whole is not None and not (micro and steps):
        reading.take("global_batch_size", whole, line("train_batch_size"), "train_batch_size")
        if steps is not None and micro is None:
            reading.drop("gradient_accumulation_steps", steps, line("gradient_accumulation_steps"),
                         Effect.NONE, "train_batch_size decides it with the number of devices")  # fmt: skip
    elif whole is not None and micro and steps:
        ranks = f"for {whole / (micro * steps):g} processes"
        reading.drop("train_batch_size", whole, line("train_batch_size"), Effect.NONE,
                     f"{ranks}: the micro-batch and the accumulation say it for any number")  # fmt: skip
    clip = rest.pop("gradient_clipping", None)
    number = as_number(clip)
    if number is not None:
        reading.take("trainer.max_grad_norm", float(number), line("gradient_clipping"), "gradient_clipping")
    elif clip is not None:
        reading.drop("gradient_clipping", clip, line("gradient_clipping"), Effect.TRAINING, "is no number")


def _number(reading: Reading, rest: dict[str, Any], key: str, line: Lines) -> int | None:
    value = rest.pop(key, None)
    number = as_number(value)
    if number is not None and number >= 1 and number == int(number):
        return int(number)
    if value is not None:
        reading.drop(key, value, line(key), Effect.NEEDED, "expected a whole number from 1")
    return None


def _take_precision(reading: Reading, config: Mapping[str, Any], rest: dict[str, Any], line: Lines) -> None:
    said = {}
    for block, name in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
        key = f"{block}.enabled"
        value = rest.pop(key, None)
        if value is True:
            before = reading.taken.get("precision")
            if before is not None and not before.is_default and before.value != name:
                reading.refuse(key, line(key), f"is true, and so is {before.said}: DeepSpeed refuses both")
            reading.take("precision", name, line(key), f"{key}: true")
        elif value is not None:
            reading.know(key)
            said[name] = value
    both = all(_off(config.get(name)) for name in ("bf16", "fp16")) and said
    if both and "precision" not in reading.taken:
        reading.take("precision", "fp32", line("fp16") or line("bf16"), "bf16, fp16: false", default=True)
    if reading.value("precision") != "fp16":  # loss scaling of a type that is not used
        for key in [key for key in rest if key.startswith("fp16.")]:
            reading.know(key)
            del rest[key]


def _off(block: Any) -> bool:
    return not isinstance(block, Mapping) or block.get("enabled") in (False, None)


def _take_zero(reading: Reading, config: Mapping[str, Any], rest: dict[str, Any], line: Lines) -> None:
    zero = config.get(_ZERO)
    if isinstance(zero, bool):  # an old form: true is stage 1
        rest.pop(_ZERO, None)
        reading.take("sharding.zero_stage", int(zero), line(_ZERO), f"{_ZERO}: {shown(zero)}")
    key = f"{_ZERO}.stage"
    stage = rest.pop(key, None)
    number = as_number(stage)
    if number in (0, 1, 2, 3):
        reading.take("sharding.zero_stage", int(number), line(key), key)
    elif stage is not None:
        reading.drop(key, stage, line(key), Effect.NEEDED, "expected a stage from 0 to 3")
    elif not (isinstance(zero, Mapping) and zero.get("stage") == "auto"):
        reading.take("sharding.zero_stage", 0, None, f"{key}: 0", default=True)
    for old, block in _OLD_OFFLOAD.items():
        value = rest.pop(f"{_ZERO}.{old}", None)
        if value is True:
            reading.take(f"sharding.{block}", "cpu", line(f"{_ZERO}.{old}"), f"{_ZERO}.{old}: true")
        elif value is not None:
            reading.know(f"{_ZERO}.{old}")
    if f"{_ZERO}.cpu_offload_use_pin_memory" in rest:
        reading.know(f"{_ZERO}.cpu_offload_use_pin_memory")
        del rest[f"{_ZERO}.cpu_offload_use_pin_memory"]
    for block in ("offload_optimizer", "offload_param"):
        _take_offload(reading, block, rest, line)


def _take_offload(reading: Reading, block: str, rest: dict[str, Any], line: Lines) -> None:
    key, path = f"{_ZERO}.{block}.device", f"{_ZERO}.{block}.nvme_path"
    device = rest.pop(key, None)
    if device in ("cpu", "nvme"):
        reading.take(f"sharding.{block}", device, line(key), key)
    elif device is not None and device != "none":
        reading.drop(key, device, line(key), Effect.NEEDED, "expected none, cpu or nvme")
    else:
        reading.know(key)
    folder = rest.pop(path, None)
    if device != "nvme" or folder is None:
        reading.know(path)
    elif reading.value("sharding.nvme_path") in (None, folder):
        reading.take("sharding.nvme_path", folder, line(path), path)
    else:
        reading.drop(path, folder, line(path), Effect.NONE, "one folder holds all that is offloaded to nvme")
    if device not in ("cpu", "nvme"):  # what would be said of an offload that is not
        for other in [other for other in rest if other.startswith(f"{_ZERO}.{block}.")]:
            reading.know(other)
            del rest[other]


def _take_parallel(reading: Reading, rest: dict[str, Any], line: Lines) -> None:
    for key, ours in (("tensor_parallel.autotp_size", "tp_size"), ("sequence_parallel_size", "sp_size")):
        number = as_number(rest.pop(key, None))
        reading.know(key)
        if isinstance(number, int) and number > 1:
            reading.take(f"sharding.{ours}", number, line(key), key)
    for key in [key for key in rest if key.startswith("tensor_parallel.")]:
        reading.drop(key, rest.pop(key), line(key), Effect.NONE, "sharding.tp_size decides it")


def _drop_blocks(reading: Reading, rest: dict[str, Any], line: Lines) -> None:
    """Blocks that no recipe has: idle ones, and those with which another training would be done."""
    blocks: dict[str, dict[str, Any]] = {}
    for key in list(rest):
        top = key.partition(".")[0]
        if top in _IDLE_BLOCKS or top in _OTHER_TRAINING:
            blocks.setdefault(top, {})[key] = rest.pop(key)
    for top, keys in blocks.items():
        reading.know(*keys)
        on = keys.get(f"{top}.enabled", keys.get(top, False)) is True
        if top in _IDLE_BLOCKS:
            reading.drop(top, "{…}", line(top), Effect.NONE, _IDLE_BLOCKS[top])
        elif on or (top in ("expert_parallel", "moe") and any(keys.values())):
            reading.refuse(top, line(top), "is on: it trains in another way, which no recipe says")
        else:
            reading.know(top)


def _keep(reading: Reading, rest: dict[str, Any], line: Lines) -> None:
    """Keep what is left as a base profile, as far as DeepSpeed knows it; the others are dropped."""
    if not rest:
        return
    lines = {key: line(key) for key in rest}
    reading.know(*rest)
    _drop_unknown(reading, rest, line)
    given = json.dumps(_nested(rest))
    text, left = apply_fixes(given, reading.file)
    for finding in left:
        if finding.severity == "error" and finding.code not in _OPEN and finding.path in rest:
            reading.drop(finding.path, rest[finding.path], lines[finding.path], Effect.NONE, finding.message,
                         finding.hint or "")  # fmt: skip
    profile = parse_json(text)
    kept = flatten(profile)
    for finding in lint_text(given, reading.file):  # what was mended away
        if finding.edits and finding.path in rest and finding.path not in kept:
            reading.drop(finding.path, rest[finding.path], lines[finding.path], Effect.NONE, finding.message,
                         finding.hint or "")  # fmt: skip
    for finding in left:
        if finding.severity == "error" and finding.code not in _OPEN:
            where = next((key for key in (finding.path, finding.path.partition(".")[0]) if key), None)
            if where is not None and finding.path not in rest:
                reading.drop(finding.path, "{…}", line(finding.path), Effect.NONE, finding.message,
                             finding.hint or "")  # fmt: skip
            _remove(profile, finding.path)
    if profile:
        reading.profile = profile
        first = min((n for n in lines.values() if n is not None), default=None)
        reading.take("sharding.config", "profile", first, ", ".join(sorted(flatten(profile))))


def _nested(rest: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for key, value in rest.items():
        whole = isinstance(value, float) and value >= 1 and value == int(value)  # 1e9, as people write it
        _put(config, key, int(value) if whole else value)
    return config


def _drop_unknown(reading: Reading, rest: dict[str, Any], line: Lines) -> None:
    """Drop names that DeepSpeed does not read, and those that it reads no longer; no name is guessed."""
    for finding in lint_text(json.dumps(_nested(rest)), reading.file):
        if not finding.code.startswith(("ds-typo", "ds-removed-key")):
            continue
        gone = {key: rest.pop(key) for key in list(rest) if f"{key}.".startswith(f"{finding.path}.")}
        if gone:
            value = gone.get(finding.path, "{…}")
            effect = Effect.TRAINING if finding.path.endswith(_LEARNT) else Effect.NONE
            reading.drop(finding.path, value, line(finding.path), effect, finding.message, finding.hint or "")


_LEARNT = ("zeropp_loco_param",)
"""Keys of older versions that changed which tokens contribute to the loss."""
_OPEN = ("ds-auto-unresolved", "ds-no-batch-size", "ds-no-zero-block")


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
    config[last] = value


def _remove(config: dict[str, Any], key: str) -> None:
    """Take a dotted key out, and what is empty without it."""
    first, _, below = key.partition(".")
    inner = config.get(first)
    if below and isinstance(inner, dict):
        _remove(inner, below)
        if not inner:
            del config[first]
    elif not below:
        config.pop(first, None)


_PARAMS = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
_SWITCHES = ("torch_adam", "adam_w_mode", "bias_correction", "amsgrad", "set_grad_none", "fused", "foreach",
             "fp32_optimizer_states", "capturable", "differentiable", "maximize")  # fmt: skip
SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_HERE = {"lion": "lion_32bit", "adagrad": "adagrad", "sgd": "sgd"}


def take_optimizer(reading: Reading, block: Any, line: Lines) -> None:
    """Adam and AdamW, which both are AdamW in DeepSpeed, with their numbers; others are listed."""
    if not isinstance(block, Mapping):
        return
    kind, params = str(block.get("type", "")), block.get("params")
    params = params if isinstance(params, Mapping) else {}
    reading.know("optimizer", *(f"optimizer.params.{name}" for name in params))
    said = f"optimizer.type: {kind}"
    if kind.lower() not in ("adam", "adamw"):
        near = _HERE.get(kind.lower())
        hint = f"`trainer.optim: {near}` is another implementation" if near else "write trainer.optim"
        reading.drop("optimizer.type", kind, line("optimizer.type"), Effect.TRAINING,
                     "an optimizer of DeepSpeed's own", hint)  # fmt: skip
    elif params.get("adam_w_mode") is False:
        where = "optimizer.params.adam_w_mode"
        reading.refuse(where, line(where), "is false: Adam with L2 in its gradients, which no recipe has")
    else:
        reading.take("trainer.optim", "adamw_torch", line("optimizer.type"), said)
    for name, field in _PARAMS.items():
        _take_number(reading, f"optimizer.params.{name}", params.get(name), f"trainer.{field}", line)
    if "lr" not in params:
        reading.take("trainer.learning_rate", 1e-3, None, "optimizer.params.lr: 0.001", default=True)
    betas = params.get("betas")
    if isinstance(betas, list) and len(betas) == 2 and all(as_number(beta) is not None for beta in betas):
        where = "optimizer.params.betas"
        for beta, field in zip(betas, ("adam_beta1", "adam_beta2"), strict=True):
            reading.take(f"trainer.{field}", as_number(beta), line(where), f"{where}: {shown(betas)}")
    for name in params:
        where = f"optimizer.params.{name}"
        plain = name in (*_PARAMS, "betas") or (name in _SWITCHES and name != "amsgrad")
        if not plain and params[name] not in (None, False, "auto"):
            reading.drop(where, params[name], line(where), Effect.TRAINING, "no field of TrainingArguments")


def take_scheduler(reading: Reading, block: Any, line: Lines) -> None:
    """The warm-up schedules that transformers has as well; the others are listed."""
    if not isinstance(block, Mapping):
        return
    kind, params = str(block.get("type", "")), block.get("params")
    params = params if isinstance(params, Mapping) else {}
    reading.know("scheduler", *(f"scheduler.params.{name}" for name in params))
    if kind not in SCHEDULES:
        reading.drop("scheduler.type", kind, line("scheduler.type"), Effect.TRAINING,
                     "a schedule of DeepSpeed's own", "write trainer.lr_scheduler_type")  # fmt: skip
        return
    reading.take("trainer.lr_scheduler_type", SCHEDULES[kind], line("scheduler.type"),
                 f"scheduler.type: {kind}")  # fmt: skip
    where = "scheduler.params.warmup_num_steps"
    steps = params.get("warmup_num_steps", 1000)
    if steps != "auto":
        _take_number(reading, where, steps, "trainer.warmup_steps", line, "warmup_num_steps" not in params)
    _take_number(reading, "scheduler.params.warmup_max_lr", params.get("warmup_max_lr"),
                 "trainer.learning_rate", line)  # fmt: skip
    if (total := as_number(params.get("total_num_steps"))) is not None:
        where = "scheduler.params.total_num_steps"
        reading.take("trainer.max_steps", int(total), line(where), where)
    if str(params.get("warmup_type", "log")) != "linear":
        said = "scheduler.params.warmup_type" if "warmup_type" in params else "scheduler.params"
        reading.drop(said, params.get("warmup_type", "log"), line(said), Effect.TRAINING,
                     "a logarithmic warm-up, DeepSpeed's default; here it is linear")  # fmt: skip
    for name, plain in (("warmup_min_lr", 0), ("warmup_min_ratio", 0), ("cos_min_ratio", None)):
        value = params.get(name)
        if value not in (None, "auto", plain):
            where = f"scheduler.params.{name}"
            reading.drop(where, value, line(where), Effect.TRAINING, "the schedule here begins and ends at 0")


def _take_number(
    reading: Reading, said: str, value: Any, to: str, line: Lines, default: bool = False
) -> None:
    if value in (None, "auto"):
        return
    number = as_number(value)
    if number is None:
        reading.drop(said, value, line(said), Effect.NEEDED, "expected a number")
        return
    before = reading.taken.get(to)
    if before is not None and not before.is_default and before.value != number:
        reading.refuse(said, line(said), f"is {number}, but {before.said} says {before.value}")
        return
    name = said.rpartition(".")[2]
    reading.take(to, number, line(said), f"{name}: {number}" if default else said, default=default)
