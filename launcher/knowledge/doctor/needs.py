"""What a plan needs of a machine. Pure."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from launcher.engines import engine_of
from launcher.engines.deepspeed_ops import OPERATORS
from launcher.files.object_store import package_of
from launcher.memory.states import base_weight_bytes
from launcher.plan.plan import Plan

NEEDED = ("torch", "transformers", "accelerate", "datasets")
"""What every worker imports."""
_OF_TRACKER = ("wandb", "tensorboard", "trackio", "mlflow", "comet_ml", "clearml", "swanlab")
"""Those whose module has their name."""
_WITH_PLAN = ("wandb", "tensorboard", "trackio")
"""Trackers that get the plan (launcher/train/tracking.py)."""


def on_gpu(plan: Plan | None) -> bool:
    return plan is not None and not plan.hardware.is_cpu


def profile(plan: Plan) -> Mapping[str, Any]:
    """Dotted keys that the base DeepSpeed profile brings."""
    return plan.deepspeed.profile


def needed_modules(plan: Plan) -> list[str]:
    """What the workers import."""
    needed = [*NEEDED, *engine_of(plan).packages]
    if plan.adapter.type:
        needed.append("peft")
    if plan.model.quantization != "none":
        needed.append("bitsandbytes")
    needed += plan.task.packages
    has_kernels = importlib.util.find_spec("kernels") is not None  # then transformers uses the hub's kernel
    if plan.model.attn_implementation == "flash_attention_2" and not has_kernels:
        needed.append("flash_attn")
    if plan.trainer.use_liger_kernel:  # else the Trainer stops after loading the weights
        needed.append("liger_kernel")
    if plan.trainer.others.get("use_vllm"):  # trl's client of a server imports it, too
        needed.append("vllm")
    if plan.runtime.mirror and (package := package_of(plan.runtime.mirror)):
        needed.append(package)
    return needed + _tracker_modules(plan)


def _tracker_modules(plan: Plan) -> list[str]:
    """Modules without which the Trainer stops after loading the weights; `all` needs none."""
    asked = plan.trainer.report_to
    if asked in ("all", ["all"]):
        return []
    instead = ("tensorboard",) if importlib.util.find_spec("tensorboardX") is not None else ()
    return [name for name in trackers(asked) if name in _OF_TRACKER and name not in instead]


def built_ops(plan: Plan | None) -> list[str]:
    """The operators that DeepSpeed compiles at the start of the run."""
    return [] if plan is None else engine_of(plan).compiled_ops(plan)


def cuda_ops(plan: Plan | None) -> list[str]:
    """Those of them that need the CUDA toolkit."""
    return [op for op in built_ops(plan) if OPERATORS[op].nvcc and on_gpu(plan)]


def uses_nvme(plan: Plan | None) -> bool:
    """Whether states or parameters are offloaded to a disk."""
    return plan is not None and "nvme" in (plan.job.offload_optimizer, plan.job.offload_param)


def nvme_path(plan: Plan) -> str | None:
    """The folder for them; None where nothing is offloaded to a disk."""
    found = plan.sharding.nvme_path
    return str(found) if found and uses_nvme(plan) else None


def trackers(report_to: Any) -> list[str]:
    """The trackers in trainer.report_to, a name or a list of names; for `all`, those that get the plan."""
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    return list(_WITH_PLAN) if names == ["all"] else [name for name in names if name != "none"]


def reports_to(plan: Plan | None, tracker: str) -> bool:
    return plan is not None and tracker in trackers(plan.trainer.report_to)


def has_env(plan: Plan | None, name: str) -> bool:
    """Whether the workers get this variable from the plan."""
    return plan is not None and name in plan.launch.env


def hub_model(plan: Plan) -> str | None:
    """The hub id of the weights; None for weights in a folder and random weights."""
    name = plan.model.name_or_path
    if not name or plan.model.config is not None or plan.tiny:
        return None
    local = str(name).startswith(("/", "./", "../", "~", "package:"))
    return None if local or plan.spec.origin == "folder" else str(name)


def weights_bytes(plan: Plan) -> int:
    """The model's files as downloaded, at the width of its loaded weights or 2 bytes."""
    return base_weight_bytes(plan.spec, plan.job.dtype if plan.job.quantization == "none" else "float16")


def result_bytes(plan: Plan) -> int:
    """The trained weights as one save writes them: the adapter's, or the model's."""
    return plan.job.engine.result(plan.spec, plan.job)


def checkpoint_bytes(plan: Plan) -> int:
    """One checkpoint: weights and, unless save_only_model, the state of the run."""
    alone = bool(plan.trainer.save_only_model)
    return plan.job.engine.checkpoint(plan.spec, plan.job, weights_alone=alone)


def checkpoints_kept(plan: Plan) -> int | None:
    """Largest number of checkpoints on the disk; None without a limit and a known length of the run.

    A new one is written before the oldest is removed; the best one is kept besides the newest.
    """
    strategy = plan.trainer.save_strategy
    if strategy == "no":
        return 0
    limit: int | None = plan.trainer.save_total_limit
    every, steps = plan.trainer.save_steps or 500, plan.schedule.steps
    written: int | None = None
    if strategy == "steps" and steps and every:
        written = -(-steps // max(1, int(every if every >= 1 else every * steps)))
    if not limit or limit < 0:
        return written
    keeps_best = plan.trainer.load_best_model_at_end or plan.trainer.metric_for_best_model
    stay = max(limit, 2 if keeps_best else 1)
    return stay + 1 if written is None else min(stay + 1, written)


def written_bytes(plan: Plan) -> int:
    """Largest size of the run on the disk: its checkpoints, at least one, and the result."""
    kept = checkpoints_kept(plan)
    return result_bytes(plan) + checkpoint_bytes(plan) * (1 if kept is None else kept)


def saved_text(plan: Plan) -> str:
    """The checkpoints, for a message: `3 checkpoints of 16.3 GiB each`."""
    from launcher.knowledge.doctor.check import size

    kept, one = checkpoints_kept(plan), size(checkpoint_bytes(plan))
    return f"one checkpoint of {one}" if kept in (None, 1) else f"{kept} checkpoints of {one} each"
