"""What DeepSpeed's optimizer and scheduler blocks take, and which "auto" values the Trainer fills."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

# Taken out of `optimizer.params` by the engine before Adam is built.
_POPPED = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
_NOT_SET = ("self", "params", "model_params", "optimizer", "args", "kwargs")


def parameters(cls: Any) -> dict[str, Any]:
    """Name -> default of what a class is built with, in JSON's values; a required one has no default."""
    found: dict[str, Any] = {}
    for base in (cls, *cls.__mro__[1:2]):
        given = inspect.signature(base.__init__).parameters.values()
        for parameter in given:
            if parameter.name not in _NOT_SET and parameter.kind in (
                parameter.POSITIONAL_OR_KEYWORD,
                parameter.KEYWORD_ONLY,
            ):
                found.setdefault(parameter.name, parameter.default is parameter.empty)
        if not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in given):
            break
    return found


def _names(*classes: Any, more: tuple[str, ...] = ()) -> list[str]:
    return sorted({name for cls in classes for name in parameters(cls)} | set(more))


def optimizers() -> dict[str, Any]:
    """Type -> the parameters on the device (`device`) and with offload (`offload`); `any_case` by name."""
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.engine import DeepSpeedEngine

    halves = {*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS}
    # The engine passes adamw_mode to the CPU's Adam itself.
    offload = [name for name in _names(DeepSpeedCPUAdam, more=_POPPED) if name != "adamw_mode"]
    adam = {
        "device": _names(FusedAdam, more=_POPPED),
        "offload": offload,
        "torch": _names(torch.optim.AdamW, more=(*_POPPED, "foreach")),
    }
    table: dict[str, Any] = {
        "adam": adam,
        "adamw": adam,
        "adagrad": {"device": _names(torch.optim.Adagrad), "offload": _names(DeepSpeedCPUAdagrad)},
        "lamb": {"device": _names(FusedLamb), "offload": _names(FusedLamb)},
        "lion": {"device": _names(FusedLion), "offload": _names(DeepSpeedCPULion)},
        "muon": {"device": sorted({*halves, *_POPPED, "muon_lr", "adam_lr", "per_head_muon", "foreach"})},
        **{name: {} for name in ("muadam", "muadamw", "musgd")},
    }
    unknown = set(table) ^ set(DEEPSPEED_OPTIMIZERS)
    if unknown:
        raise RuntimeError(f"DeepSpeed's own optimizers changed: {sorted(unknown)}")
    for row in table.values():
        row["any_case"] = True
    for name in dir(torch.optim):
        cls = getattr(torch.optim, name)
        real = inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and name != "Optimizer"
        if real and name.lower() not in table:
            table[name] = {"device": _names(cls), "any_case": False}
    return table


def schedulers() -> dict[str, Any]:
    """Type -> its parameters, True for each that has no default."""
    import torch
    from deepspeed.runtime import lr_schedules

    module = torch.optim.lr_scheduler
    classes = {name: getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES}
    for name in dir(module):
        cls = getattr(module, name)
        if inspect.isclass(cls) and issubclass(cls, module.LRScheduler) and not name.startswith("_"):
            classes.setdefault(name, cls)
    classes.pop("LRScheduler", None)
    return {name: parameters(cls) for name, cls in classes.items()}


def _first_words(source: str, calls: set[str]) -> list[str]:
    """First argument of each call of these methods, where it is written out."""
    tree = ast.parse(textwrap.dedent(source))
    return [
        str(node.args[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", None) in calls
        and node.args
        and isinstance(node.args[0], ast.Constant)
    ]


def filled_autos() -> list[str]:
    """Dotted keys whose "auto" the Trainer or accelerate's plugin fills under the Trainer."""
    from accelerate.utils.dataclasses import DeepSpeedPlugin
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    fills = {"fill_match", "fill_only"}
    found = set(_first_words(inspect.getsource(HfTrainerDeepSpeedConfig), fills))
    found |= set(_first_words(inspect.getsource(DeepSpeedPlugin.set_mixed_precision), fills))
    tree = ast.parse(textwrap.dedent(inspect.getsource(DeepSpeedPlugin.__post_init__)))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        if getattr(node.targets[0], "id", "") == "plugin_to_config_mapping":
            found |= {str(word.value) for word in node.value.values if isinstance(word, ast.Constant)}
    # accelerate overwrites it, whatever it says.
    return sorted(found | {"steps_per_print"})
