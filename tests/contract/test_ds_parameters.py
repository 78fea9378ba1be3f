"""Values of optimizers and schedules: the classes take what lint accepts, and refuse what it does not."""

from __future__ import annotations

import json
import warnings
from importlib import metadata

import pytest

from launcher.knowledge.lint.check import lint_text
from launcher.knowledge.lint.keys import deepspeed_version, vocabulary

# Two groups of parameters: a list of another length is lint's to accept, and a class's to refuse.
VALUES = ("1", "other", 0.0, 1.0, 0.5, 2, 2.5, -1, None, [0.0, 0.9], [0.5, 1.5], [0.9, 0.9, 0.9], ["1", "1"])
REQUIRED = {
    "total_num_steps": 9, "cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "T_max": 5, "T_0": 5, "base_lr": 0.1,
    "max_lr": 0.2, "gamma": 0.9, "milestones": [1, 2], "step_size": 2,
}  # fmt: skip
# A part that an engine takes out, and what needs a device, a closure, sparse gradients or a function.
NOT_HERE = {"torch_adam", "adam_w_mode", "fp32_optimizer_states", "capturable", "differentiable", "scale_fn"}
OTHERS = {"LBFGS", "SparseAdam", "ChainedScheduler", "SequentialLR", "LambdaLR", "MultiplicativeLR"}
REFUSED = {
    ("OneCycleLR.total_steps", "2"), ("OneCycleLR.total_steps", "null"), ("PolynomialLR.power", "-1"),
    ("SGD.nesterov", "true"),
}  # fmt: skip
"""Accepted by lint, and refused here: fewer steps than this run, a division by its end, no momentum."""
READ_LATER = {
    "SGD.dampening", "OneCycle.cycle_second_stair_count", "ConstantLR.total_iters", "CyclicLR.gamma",
    "CyclicLR.scale_mode", "MultiStepLR.milestones", "OneCycleLR.epochs", "OneCycleLR.steps_per_epoch",
    "ReduceLROnPlateau.cooldown", "WarmupLR.warmup_type", "WarmupDecayLR.warmup_type",
    "WarmupCosineLR.warmup_type",
}  # fmt: skip
"""A value of any type is taken: another parameter decides whether it is read, or it is compared alone."""
CONVERTED = {"OneCycle.cycle_first_step_size", "OneCycle.cycle_second_step_size", "CyclicLR.step_size_up",
             "CyclicLR.step_size_down"}  # fmt: skip
OWN = {"adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad"}


@pytest.fixture(autouse=True)
def _tested_version():
    pytest.importorskip("deepspeed")
    if metadata.version("deepspeed") != deepspeed_version():
        pytest.skip("the tested version of deepspeed is not installed")


def groups():
    import torch

    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    return [{"params": [parameter]} for parameter in parameters]


def trains(block, name, params):
    """Whether 12 steps run with these parameters."""
    import torch
    from deepspeed.runtime import lr_schedules

    try:
        if block == "optimizer":
            optimizer, schedule = getattr(torch.optim, OWN.get(name, name))(groups(), **params), None
        else:
            optimizer = torch.optim.AdamW(groups(), lr=0.1)
            cls = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name)
            schedule = cls(optimizer, **params)
        for _ in range(12):
            optimizer.step()
            if schedule is not None:
                schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    except (TypeError, ValueError, AssertionError, RuntimeError, ArithmeticError, LookupError):
        return False
    return True


def cases(block):
    """Class, name of a parameter, and the parameters without it."""
    for name, row in vocabulary()[f"{block}s"].items():
        names = list(row) if block == "scheduler" else row.get("torch", row.get("device", ()))
        mine = block == "optimizer" and name not in OWN and not name[0].isupper()  # DeepSpeed's kernels
        if name in OTHERS or mine:
            continue
        needed = {key: REQUIRED[key] for key, required in row.items() if block == "scheduler" and required}
        if name == "OneCycleLR":
            needed["total_steps"] = 100
        if name.startswith("Warmup"):
            needed["warmup_num_steps"] = 3
        yield from ((name, key, needed) for key in names if key not in NOT_HERE)


@pytest.mark.parametrize("block", ["optimizer", "scheduler"])
def test_every_parameter_of_a_class_has_a_row_and_no_row_is_left(block):
    """The rows stand in launcher/knowledge/lint/tables/deepspeed.json alone."""
    rows, used = vocabulary()[f"{block}_params"], set()
    for name, row in vocabulary()[f"{block}s"].items():
        kinds = ("device", "offload", "torch")
        for key in row if block == "scheduler" else [key for kind in kinds for key in row.get(kind, ())]:
            used.add(f"{name}.{key}" if f"{name}.{key}" in rows else key)
    assert used == rows.keys()


@pytest.mark.parametrize(("block", "fewest"), [("optimizer", 700), ("scheduler", 900)])
def test_lint_and_the_classes_agree_about_values(block, fewest):
    rows, seen, too_strict, too_lax = vocabulary()[f"{block}_params"], 0, set(), set()
    for name, key, needed in cases(block):
        row, where = rows.get(f"{name}.{key}") or rows[key], f"{name}.{key}"
        for value in VALUES if row["types"][0] != "bool" else (True, False):
            params = {**needed, key: value}
            written = {**params, "torch_adam": True} if name in ("adam", "adamw") else params
            text = json.dumps({"train_batch_size": 8, block: {"type": name, "params": written}})
            found = [f for f in lint_text(text, "x") if f.path.startswith(f"{block}.params.{key}")]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                runs = trains(block, name, params)
            seen += 1
            # The range of a schedule is its own to ignore: see below.
            is_checked = block == "optimizer" or (found and found[0].code == "ds-wrong-type")
            if runs and found and is_checked and where not in READ_LATER | CONVERTED:
                too_strict.add((where, json.dumps(value)))
            elif not runs and not found:
                too_lax.add((where, json.dumps(value)))
    assert seen >= fewest
    assert too_strict == set()
    assert {case for case in too_lax if case[1] != "[0.9, 0.9, 0.9]"} - REFUSED == set()


def test_a_schedule_that_lint_refuses_for_its_range_trains_with_other_rates_than_are_meant():
    """Schedules take them without a word."""
    import torch
    from deepspeed.runtime.lr_schedules import WarmupDecayLR, WarmupLR

    def rates(cls, **params):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = cls(optimizer, warmup_type="linear", **params)
        found = []
        for _ in range(6):
            schedule.step()
            found.append(round(optimizer.param_groups[0]["lr"], 4))
        return found

    assert rates(WarmupLR, warmup_num_steps=4, warmup_min_lr=-0.4, warmup_max_lr=0.4)[0] == -0.4
    falling = rates(WarmupLR, warmup_num_steps=4, warmup_min_lr=0.8, warmup_max_lr=0.4)
    assert falling == [0.8, 0.7, 0.6, 0.5, 0.4, 0.4]
    assert max(rates(WarmupDecayLR, total_num_steps=9, warmup_num_steps=4)) == 0.001, (
        "not the optimizer's 1.0"
    )
    assert rates(WarmupDecayLR, total_num_steps=-1, warmup_num_steps=4)[-1] == 0.0


def test_which_optimizers_zero_trains_unasked():
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    tested = {
        FusedAdam, DeepSpeedCPUAdam, torch.optim.Adagrad, DeepSpeedCPUAdagrad, FusedLion, DeepSpeedCPULion
    }  # fmt: skip
    assert tested <= {*ZERO_SUPPORTED_OPTIMIZERS}
    assert not {torch.optim.SGD, torch.optim.Adafactor, FusedLamb} & {*ZERO_SUPPORTED_OPTIMIZERS}
