"""The optimizer and scheduler blocks of a DeepSpeed config, as TrainingArguments fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from launcher.importing.arguments import as_number
from launcher.importing.found import Effect, Reading, shown

Lines = Callable[[str], int | None]
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
