"""The resolved DeepSpeed configuration: each number comes from the setting of its TrainingArguments twin."""

from __future__ import annotations

import copy
from typing import Any

from launcher.plan.plan import Plan

PRINT_NEVER = 1_000_000_000
"""DeepSpeed's own step lines; the Trainer logs what matters."""


def render_ds_config(plan: Plan) -> dict[str, Any] | None:
    """The content of ds_config.json; None for engine ddp. No value is "auto"."""
    if plan.sharding.engine != "deepspeed":
        return None
    config: dict[str, Any] = {
        # train_batch_size is left out: DeepSpeed computes it, so it cannot disagree.
        "train_micro_batch_size_per_gpu": plan.batch.micro,
        "gradient_accumulation_steps": plan.batch.accumulation,
        "gradient_clipping": float(plan.trainer.max_grad_norm),
        "zero_optimization": _zero(plan),
        "steps_per_print": PRINT_NEVER,
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": True,
    }
    tensor = plan.sharding.tp_size
    if tensor > 1:
        config["tensor_parallel"] = {"autotp_size": tensor}
        # Without it accelerate does not put the parts together, and the Trainer saves no model at all.
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    precision = plan.precision
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    elif precision == "fp16":
        # 0 is dynamic scaling; the others are DeepSpeed's defaults, written so that they are seen.
        config["fp16"] = {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 1,
        }
    if plan.deepspeed.aio:
        config["aio"] = dict(plan.deepspeed.aio)
    for dotted, value in plan.deepspeed.profile.items():
        _put(config, dotted.split("."), copy.deepcopy(value))
    return config


def _zero(plan: Plan) -> dict[str, Any]:
    stage = plan.sharding.zero_stage
    assert stage is not None, "every plan of this engine has one"
    zero: dict[str, Any] = {"stage": stage}
    if stage >= 1:
        zero["reduce_bucket_size"] = plan.deepspeed.reduce_bucket_size
        zero["overlap_comm"] = plan.deepspeed.overlap_comm
        zero["contiguous_gradients"] = True
    if stage in (1, 2):
        zero["allgather_bucket_size"] = plan.deepspeed.allgather_bucket_size
    if stage == 3:
        width = plan.spec.hidden_size
        # The integers that the Trainer computes for "auto" (transformers/integrations/deepspeed.py).
        zero["stage3_prefetch_bucket_size"] = int(0.9 * width * width)
        zero["stage3_param_persistence_threshold"] = 10 * width
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    offloads = {
        "offload_optimizer": plan.sharding.offload_optimizer,
        "offload_param": plan.sharding.offload_param,
    }
    for what, device in offloads.items():
        if device == "nvme":
            prefix = f"{what}."
            buffers = {
                name.removeprefix(prefix): value
                for name, value in plan.fields(plan.deepspeed).items()
                if name.startswith(prefix)
            }
            zero[what] = {"device": device, "nvme_path": plan.sharding.nvme_path, **buffers}
        elif device != "none":
            zero[what] = {"device": device, "pin_memory": not plan.hardware.is_cpu}
    if plan.sharding.offload_param == "nvme":
        zero["stage3_max_reuse_distance"] = plan.deepspeed.stage3_max_reuse_distance
    return zero


def _put(config: dict[str, Any], keys: list[str], value: Any) -> None:
    """Set a nested key that the plan does not own; the plan's own values stay."""
    for key in keys[:-1]:
        config = config.setdefault(key, {})
    config.setdefault(keys[-1], value)
