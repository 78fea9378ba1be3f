"""A DeepSpeed config: keys with a recipe key are taken, the others are kept as a base profile."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.engines.deepspeed_config import flatten
from launcher.errors import Problem, RecipeError
from launcher.files.safe_files import parse_json
from launcher.importing.conversions import To, as_number, offload, on, real, several, stage, take_nvme, whole
from launcher.importing.reading import Effect, Given, Reading
from launcher.knowledge.lint.check import PLAN_DECIDES, apply_fixes, lint_text
from launcher.knowledge.lint.document import LintFinding, read_json

TOOL = "DeepSpeed config"
Lines = Callable[[str], int | None]
"""Dotted key -> line."""
_ZERO, _MICRO = "zero_optimization", "train_micro_batch_size_per_gpu"
_TELLING = (
    _ZERO, "train_batch_size", _MICRO, "fp16", "bf16", "optimizer", "scheduler",
    "gradient_clipping", "zero_allow_untested_optimizer",
)  # fmt: skip
# Not read by the Trainer.
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
# Set by the plan, or DeepSpeed's default: a value that needs no report.
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
_GATHER = ("gather_16bit_weights_on_model_save", "gather_fp16_weights_on_model_save")
KEYS: Mapping[str, To] = {
    "gradient_clipping": To("trainer.max_grad_norm", real, effect=Effect.TRAINING),
    f"{_ZERO}.stage": To("sharding.zero_stage", stage),
    f"{_ZERO}.cpu_offload": To("sharding.offload_optimizer", on("cpu")),
    f"{_ZERO}.cpu_offload_params": To("sharding.offload_param", on("cpu")),
    f"{_ZERO}.cpu_offload_param": To("sharding.offload_param", on("cpu")),
    "tensor_parallel.autotp_size": To("sharding.tp_size", several, effect=Effect.NONE),
    "sequence_parallel_size": To("sharding.sp_size", several, effect=Effect.NONE),
}
"""Each alone is one recipe key."""


def is_config(data: Any) -> bool:
    """Whether a mapping is a DeepSpeed config."""
    if not isinstance(data, dict) or "distributed_type" in data:
        return False
    found = [key for key in _TELLING if key in data]
    if found == ["gradient_clipping"]:
        return False
    return bool(found) and all(
        isinstance(data[key], dict) or key not in ("fp16", "bf16", "optimizer", "scheduler") for key in found
    )


def read(text: str, file: str) -> Reading:
    """Read a config. Raises RecipeError if it is no JSON object."""
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
            reading.refuse(Given(finding.path, None, finding.line), finding.message, finding.hint)
    take_config(reading, document.root.plain(), line)
    return reading


@dataclass(slots=True)
class _Config:
    """A config while it is read."""

    reading: Reading
    values: Mapping[str, Any]
    rest: dict[str, Any]
    """Dotted key -> value, of those that are not dealt with yet."""
    line: Lines

    def pop(self, key: str) -> Given:
        """A key that is then dealt with; the value is None where it is absent."""
        return Given(key, self.rest.pop(key, None), self.line(key))

    def ignore(self, *prefixes: str) -> None:
        """Keys that need no report."""
        for key in [key for key in self.rest if key.startswith(prefixes)]:
            self.reading.know(key)
            del self.rest[key]


def take_config(reading: Reading, values: Mapping[str, Any], line: Lines) -> None:
    """Take a config into the recipe's keys and `reading.profile`. line: dotted key -> its line."""
    flat = flatten(values)
    config = _Config(reading, values, {k: v for k, v in flat.items() if v not in (None, "auto")}, line)
    reading.know(*flat.keys() - config.rest.keys())
    reading.take("sharding.engine", "deepspeed", Given(_ZERO, None, line(_ZERO)), said=_ZERO)
    _take_batch(config)
    _take_precision(config)
    for key in [key for key in KEYS if key in config.rest]:
        KEYS[key](reading, config.pop(key))
    _take_zero(config)
    for key in [key for key in config.rest if key.startswith("tensor_parallel.")]:
        reading.drop(config.pop(key), Effect.NONE, "sharding.tp_size decides it")
    _drop_blocks(config)
    _take_optimizer(config)
    _take_scheduler(config)
    for key in [key for key in config.rest if key.partition(".")[0] in ("optimizer", "scheduler")]:
        del config.rest[key]
    for key in list(config.rest):
        if config.rest[key] == _DEFAULTS.get(key, config) or key.endswith(_GATHER):
            reading.know(config.pop(key).name)
    _keep(config)


def _take_batch(config: _Config) -> None:
    names = (_MICRO, "gradient_accumulation_steps", "train_batch_size")
    micro, steps, total = (_whole(config, name) for name in names)
    reading = config.reading
    if micro is not None:
        reading.take("trainer.per_device_train_batch_size", micro.value, micro)
    if steps is not None and (micro is not None or total is None):
        reading.take("trainer.gradient_accumulation_steps", steps.value, steps)
    if total is not None and micro is not None and steps is not None:
        processes = f"{total.value / (micro.value * steps.value):g} processes"
        reason = f"for {processes}: the micro-batch and the accumulation set it for any number"
        reading.drop(total, Effect.NONE, reason)
    elif total is not None:
        reading.take("global_batch_size", total.value, total)
        if steps is not None:
            reading.drop(steps, Effect.NONE, "train_batch_size decides it with the number of devices")


def _whole(config: _Config, key: str) -> Given | None:
    """A key with its whole number; None where there is none."""
    given = config.pop(key)
    try:
        return None if given.value is None else Given(key, whole(given.value), given.line)
    except ValueError as error:
        config.reading.drop(given, Effect.NEEDED, f"expected {error}")
        return None


def _take_precision(config: _Config) -> None:
    reading, off = config.reading, False
    for block in ("bf16", "bfloat16", "fp16"):
        given = config.pop(f"{block}.enabled")
        name = block.replace("bfloat", "bf")
        before = reading.taken.get("precision")
        if given.value is not True:
            reading.know(*([given.name] if given.value is not None else []))
            off = off or given.value is not None
            continue
        if before is not None and not before.is_default and before.value != name:
            reading.refuse(given, f"is true, and so is {before.said}: DeepSpeed refuses both")
        reading.take("precision", name, given)
    if off and all(_is_off(config.values.get(name)) for name in ("bf16", "fp16")):
        line = config.line("fp16") or config.line("bf16")
        reading.default("precision", "fp32", "bf16, fp16: false", line=line)
    if reading.value("precision") != "fp16":  # loss scaling of a type that is not used
        config.ignore("fp16.")


def _is_off(block: Any) -> bool:
    return not isinstance(block, Mapping) or block.get("enabled") in (False, None)


def _take_zero(config: _Config) -> None:
    reading, zero = config.reading, config.values.get(_ZERO)
    if isinstance(zero, bool):  # an old form: true is stage 1
        reading.take("sharding.zero_stage", int(zero), config.pop(_ZERO))
    if not isinstance(zero, Mapping) or zero.get("stage") is None:
        reading.default("sharding.zero_stage", 0, f"{_ZERO}.stage")
    config.ignore(f"{_ZERO}.cpu_offload_use_pin_memory")
    for block in ("offload_optimizer", "offload_param"):
        _take_offload(config, f"{_ZERO}.{block}", f"sharding.{block}")


def _take_offload(config: _Config, block: str, to: str) -> None:
    reading, device, folder = config.reading, config.pop(f"{block}.device"), config.pop(f"{block}.nvme_path")
    To(to, offload)(reading, device)
    reading.know(folder.name)
    if device.value == "nvme" and folder.value is not None:
        take_nvme(reading, folder)
    if device.value not in ("cpu", "nvme"):  # options of an offload that is not used
        config.ignore(f"{block}.")


def _drop_blocks(config: _Config) -> None:
    """Blocks that no recipe has: idle ones, and those that change the training."""
    blocks: dict[str, dict[str, Any]] = {}
    for key in list(config.rest):
        top = key.partition(".")[0]
        if top in _IDLE_BLOCKS or top in _OTHER_TRAINING:
            blocks.setdefault(top, {})[key] = config.rest.pop(key)
    for top, keys in blocks.items():
        given = Given(top, "{…}", config.line(top))
        config.reading.know(*keys, top)
        on = keys.get(f"{top}.enabled", keys.get(top, False)) is True
        if top in _IDLE_BLOCKS:
            config.reading.drop(given, Effect.NONE, _IDLE_BLOCKS[top])
        elif on or (top in ("expert_parallel", "moe") and any(keys.values())):
            config.reading.refuse(given, "is on: it trains in another way, which no recipe has")


def _keep(config: _Config) -> None:
    """Keep the rest as a base profile, as far as DeepSpeed knows it; the others are dropped."""
    rest, reading = config.rest, config.reading
    if not rest:
        return
    lines = {key: config.line(key) for key in rest}
    reading.know(*rest)
    _drop_unknown(config)
    given = json.dumps(_complete(_nested(rest)))
    text, left = apply_fixes(given, reading.file)
    left = [finding for finding in left if finding.code not in PLAN_DECIDES]
    profile = parse_json(text)
    kept = flatten(profile)
    fixed = [finding for finding in lint_text(given, reading.file) if finding.edits]
    for finding in [*left, *(finding for finding in fixed if finding.path not in kept)]:
        if finding.path in rest:
            _drop_found(reading, finding, Effect.NONE, rest[finding.path], lines[finding.path])
    for finding in left:
        if finding.path and finding.path not in rest:
            _drop_found(reading, finding, Effect.NONE, "{…}", config.line(finding.path))
        _remove(profile, finding.path)
    own = {key for key, value in flatten(profile).items() if value not in ("auto", {})}
    if said := ", ".join(sorted(own)):
        reading.profile = _complete(profile)
        first = min((n for n in lines.values() if n is not None), default=None)
        reading.take("sharding.config", "profile", Given(said, None, first), said=said)


def _complete(config: dict[str, Any]) -> dict[str, Any]:
    """With what a config of its own must have, so that `lint` finds nothing in the written file."""
    made = {_MICRO: "auto", _ZERO: {}, **config}
    for block in ("bf16", "fp16"):
        if isinstance(config.get(block), dict):
            made[block] = {"enabled": "auto", **config[block]}
    return made


def _drop_found(reading: Reading, finding: LintFinding, effect: Effect, value: Any, line: int | None) -> None:
    reading.drop(Given(finding.path, value, line), effect, finding.message, finding.hint or "")


def _nested(rest: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for key, value in rest.items():
        whole = isinstance(value, float) and value >= 1 and value == int(value)  # 1e9, as people write it
        _put(config, key, int(value) if whole else value)
    return config


def _drop_unknown(config: _Config) -> None:
    """Drop names that DeepSpeed does not read, or no longer; no name is guessed."""
    for finding in lint_text(json.dumps(_nested(config.rest)), config.reading.file):
        if not finding.code.startswith(("ds-typo", "ds-removed-key")):
            continue
        below = [key for key in config.rest if f"{key}.".startswith(f"{finding.path}.")]
        gone = {key: config.rest.pop(key) for key in below}
        if gone:
            effect = Effect.TRAINING if finding.path.endswith(_LEARNT) else Effect.NONE
            value = gone.get(finding.path, "{…}")
            _drop_found(config.reading, finding, effect, value, config.line(finding.path))


_LEARNT = ("zeropp_loco_param",)
"""Keys of older versions that changed which tokens contribute to the loss."""


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


def _block(config: _Config, name: str) -> tuple[Given, dict[str, Given]] | None:
    """The type and the params of `optimizer` or `scheduler`."""
    block = config.values.get(name)
    if not isinstance(block, Mapping):
        return None
    params = block.get("params")
    params = params if isinstance(params, Mapping) else {}
    keys = {key: f"{name}.params.{key}" for key in params}
    config.reading.know(name, *keys.values())
    kind = Given(f"{name}.type", str(block.get("type", "")), config.line(f"{name}.type"))
    return kind, {key: Given(path, params[key], config.line(path)) for key, path in keys.items()}


def _take_optimizer(config: _Config) -> None:
    """Adam and AdamW, which both are AdamW in DeepSpeed, with their numbers; others are listed."""
    found, reading = _block(config, "optimizer"), config.reading
    if found is None:
        return
    kind, params = found
    name = kind.value.lower()
    if name not in ("adam", "adamw"):
        near = _HERE.get(name)
        hint = f"`trainer.optim: {near}` is another implementation" if near else "write trainer.optim"
        reading.drop(kind, Effect.TRAINING, "an optimizer of DeepSpeed's own", hint)
    elif "adam_w_mode" in params and params["adam_w_mode"].value is False:
        reason = "is false: Adam with L2 in its gradients, which no recipe has"
        reading.refuse(params["adam_w_mode"], reason)
    else:
        reading.take("trainer.optim", "adamw_torch", kind)
    for name, field in _PARAMS.items():
        _take_number(reading, params.get(name), f"trainer.{field}")
    if "lr" not in params:
        reading.default("trainer.learning_rate", 1e-3, "optimizer.params.lr: 0.001")
    betas = params.get("betas")
    if betas is not None and isinstance(betas.value, list) and len(betas.value) == 2 and all(
        as_number(beta) is not None for beta in betas.value
    ):  # fmt: skip
        for beta, field in zip(betas.value, ("adam_beta1", "adam_beta2"), strict=True):
            reading.take(f"trainer.{field}", as_number(beta), betas)
    plain = {*_PARAMS, "betas", *_SWITCHES} - {"amsgrad"}
    for name, given in params.items():
        if name not in plain and given.value not in (None, False, "auto"):
            reading.drop(given, Effect.TRAINING, "no field of TrainingArguments")


def _take_scheduler(config: _Config) -> None:
    """The warm-up schedules that transformers has as well; the others are listed."""
    found, reading = _block(config, "scheduler"), config.reading
    if found is None:
        return
    kind, params = found
    if kind.value not in SCHEDULES:
        reading.drop(
            kind, Effect.TRAINING, "a schedule of DeepSpeed's own", "write trainer.lr_scheduler_type"
        )
        return
    reading.take("trainer.lr_scheduler_type", SCHEDULES[kind.value], kind)
    steps = params.get("warmup_num_steps")
    where = "scheduler.params.warmup_num_steps"
    _take_number(reading, steps or Given(where, 1000, config.line(where)), "trainer.warmup_steps", not steps)
    _take_number(reading, params.get("warmup_max_lr"), "trainer.learning_rate")
    total = params.get("total_num_steps")
    if total is not None and (number := as_number(total.value)) is not None:
        reading.take("trainer.max_steps", int(number), total)
    kind = params.get("warmup_type") or Given("scheduler.params", "log", config.line("scheduler.params"))
    if str(kind.value) != "linear":
        reason = "a logarithmic warm-up, DeepSpeed's default; here it is linear"
        reading.drop(kind, Effect.TRAINING, reason)
    for name, plain in (("warmup_min_lr", 0), ("warmup_min_ratio", 0), ("cos_min_ratio", None)):
        given = params.get(name)
        if given is not None and given.value not in (None, "auto", plain):
            reading.drop(given, Effect.TRAINING, "the schedule here begins and ends at 0")


def _take_number(reading: Reading, given: Given | None, to: str, default: bool = False) -> None:
    if given is None or given.value in (None, "auto"):
        return
    number = as_number(given.value)
    before = reading.taken.get(to)
    if number is None:
        reading.drop(given, Effect.NEEDED, "expected a number")
    elif before is not None and not before.is_default and before.value != number:
        reading.refuse(given, f"is {number}, but {before.said} is {before.value}")
    elif default:
        reading.default(to, number, given.name.rpartition(".")[2], line=given.line)
    else:
        reading.take(to, number, given)
