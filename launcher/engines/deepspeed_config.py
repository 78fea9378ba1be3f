"""DeepSpeed's configuration: the base profile that is read, ds_config.json that is made."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from launcher.errors import RecipeError

if TYPE_CHECKING:
    from launcher.plan.draft import Draft, Refusal
    from launcher.plan.plan import Plan

OWNED = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "trainer.per_device_train_batch_size",
    "gradient_accumulation_steps": "trainer.gradient_accumulation_steps",
    "gradient_clipping": "trainer.max_grad_norm",
    "bf16.enabled": "precision",
    "fp16.enabled": "precision",
    "zero_optimization.stage": "sharding.zero_stage",
    "zero_optimization.offload_optimizer.device": "sharding.offload_optimizer",
    "zero_optimization.offload_param.device": "sharding.offload_param",
}
"""Keys that the plan owns -> the recipe key with the same meaning."""
ELSEWHERE = {
    "tensor_parallel": "set sharding.tp_size: N, so that batch, memory and save take it into account",
    "sequence_parallel_size": "set sharding.sp_size: N, so that batch and loss take it into account",
    "pipeline": "no engine here has pipeline parallelism: use sharding.tp_size, or zero_stage: 3",
    "expert_parallel": "there is no expert parallelism here: use zero_stage: 3",
}
"""Blocks of a profile that would change what each rank computes without the plan's knowledge."""
_ZERO = "zero_optimization."
_GROUP = f"{_ZERO}zero_hpz_partition_size"
STAGE3_ONLY = frozenset(
    {
        "sub_group_size", "prefetch_bucket_size", "param_persistence_threshold",
        "model_persistence_threshold", "max_live_parameters", "max_reuse_distance",
        "gather_16bit_weights_on_model_save", "gather_fp16_weights_on_model_save",
        "module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential",
        "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
        "zero_quantized_gradients", "memory_efficient_linear", "override_module_apply",
        "log_trace_cache_warnings", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory",
        "leaf_module", "pipeline_loading_checkpoint", "cpu_offload_param",
    }
)  # fmt: skip
"""Read at stage 3 alone (deepspeed/runtime/engine.py passes them to no other optimizer)."""
OPTIMIZER_PARAMS = {"lr": "learning_rate", "weight_decay": "weight_decay", "eps": "adam_epsilon"}
"""optimizer.params key -> TrainingArguments field that must have the same value."""
FROM_PROFILE = "from the base profile"
"""The reason of a setting that the profile sets."""
_LOSS_SCALING = {
    "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2,
    "min_loss_scale": 1,
}  # fmt: skip
"""fp16 without a profile's own: 0 is dynamic scaling; the others are DeepSpeed's defaults, written out."""
PRINT_NEVER = 1_000_000_000
"""steps_per_print: DeepSpeed's own step lines are off, since the Trainer logs."""


def record_profile(draft: Draft, profile: Mapping[str, object] | None, processes: int) -> None:
    """Put the profile's stage and offload into the draft and the rest into `deepspeed.profile`.

    processes: of the run. Raises RecipeError with every value that contradicts the plan's own.
    """
    if profile is None:
        draft.put("deepspeed.profile", {}, "no base profile")
        return
    flat, problems = flatten(profile), [*_blocks(profile)]
    for key in ("stage", "offload_optimizer.device", "offload_param.device"):
        key = f"zero_optimization.{key}"
        value, setting = flat.get(key), OWNED[key]
        if value in (None, "auto"):
            continue
        if draft.explicit(setting) and draft.at(setting) not in (value, "auto"):
            problems.append(_conflict(draft, key, value, setting))
        else:
            origin = draft.place("sharding.config")[0] or "sharding.config"
            draft.put(setting, value, FROM_PROFILE, source="recipe", by=origin)
    problems += [
        _conflict(draft, f"{kind}.enabled", True, "precision")
        for kind in ("bf16", "fp16")
        if flat.get(f"{kind}.enabled") is True and draft.precision != kind
    ]
    for key in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ):
        value = flat.get(key)
        if value not in (None, "auto") and value != draft.at(OWNED[key]):
            problems.append(_conflict(draft, key, value, OWNED[key]))
    problems += _groups(draft, flat.get(_GROUP), processes)
    extras = {key: value for key, value in flat.items() if key not in OWNED}
    extras = {k: _resolve(k, v, draft, problems) for k, v in extras.items() if _kept(k, v)}
    if problems:
        raise RecipeError([draft.problem(*problem) for problem in problems])
    draft.put_recipe("deepspeed.profile", extras, FROM_PROFILE)


def _blocks(profile: Mapping[str, object]) -> Iterator[Refusal]:
    """Blocks that would override the plan."""
    for block, hint in ELSEWHERE.items():
        if block in profile:
            message = f"`{block}` in the base profile changes what the ranks compute, which the plan decides"
            yield "profile-parallel", "sharding.config", message, hint
    if "scheduler" in profile:
        message = "a scheduler block silently replaces trainer.lr_scheduler_type"
        hint = "remove the block and set trainer.lr_scheduler_type and warmup_steps"
        yield "profile-scheduler", "sharding.config", message, hint


def _groups(draft: Draft, size: object, processes: int) -> Iterator[Refusal]:
    """Groups of ranks with a copy of the weights (hpZ) need the same size. Read at stage 3 alone."""
    ranks = min(size, processes) if isinstance(size, int) and size > 1 else 1
    if draft.sharding.zero_stage in (None, 3) and processes % ranks:
        fit = ", ".join(str(n) for n in range(2, processes + 1) if processes % n == 0)
        message = f"{processes} ranks do not divide into groups of {_GROUP} = {size}; DeepSpeed refuses that"
        hint = f"write a divisor of {processes} ({fit}), in general the devices of one node"
        yield "profile-conflict", "sharding.config", message, hint


def key_of(draft: Draft, dotted: str) -> str:
    """The recipe's key for a setting that the base profile may have set."""
    from_profile = draft.origin(dotted) is None and draft.origin("sharding.config") is not None
    return "sharding.config" if from_profile else dotted


def idle_keys(profile: Mapping[str, object], stage: int) -> list[str]:
    """Keys of a flat profile without effect: DeepSpeed reads them at stage 3 alone."""
    named = {key: key.removeprefix(_ZERO).removeprefix("stage3_") for key in profile if key.startswith(_ZERO)}
    given = [key for key in named if profile[key] is not None and profile[key] is not False]
    return [key for key in given if stage < 3 and named[key].partition(".")[0] in STAGE3_ONLY]


def profile_value(profile: Mapping[str, object], dotted: str) -> object:
    """A profile's value of a dotted key; None where it has none."""
    return flatten(profile).get(dotted)


def _kept(key: str, value: object) -> bool:
    """Whether a key stays: "auto" means the plan's value, which only optimizer params need written out."""
    return value != "auto" or key.startswith("optimizer.params.")


def _resolve(key: str, value: object, draft: Draft, problems: list[Refusal]) -> object:
    prefix = "optimizer.params."
    if not key.startswith(prefix):
        return value
    name = key.removeprefix(prefix)
    if name == "betas":
        ours: object = [draft.trainer.adam_beta1, draft.trainer.adam_beta2]
        setting = "trainer.adam_beta1"
    elif name in OPTIMIZER_PARAMS:
        setting = f"trainer.{OPTIMIZER_PARAMS[name]}"
        ours = draft.settings.at(setting)
    else:
        return value
    if value not in ("auto", ours):
        problems.append(_conflict(draft, key, value, setting))
    return ours


def _conflict(draft: Draft, key: str, value: object, setting: str) -> Refusal:
    message = f"the base profile has {key} = {value!r}, the plan {setting} = {draft.at(setting)!r}"
    hint = f'write "auto" for {key} in the profile and set {setting} in the recipe'
    return "profile-conflict", "sharding.config", message, hint


def render_ds_config(plan: Plan) -> dict[str, Any]:
    """The content of ds_config.json: numbers from their TrainingArguments twins, no "auto"."""
    profile = plan.deepspeed.profile
    config: dict[str, Any] = {
        # train_batch_size is left out: DeepSpeed computes it, so it cannot disagree.
        "train_micro_batch_size_per_gpu": plan.batch.micro,
        "gradient_accumulation_steps": plan.batch.accumulation,
        "gradient_clipping": float(plan.trainer.max_grad_norm),
        "zero_optimization": _zero(plan),
        "steps_per_print": PRINT_NEVER,
        "wall_clock_breakdown": profile.get("wall_clock_breakdown", False),
        "zero_allow_untested_optimizer": True,
        # It would wait for the device twice in each micro-batch (utils/timer.py), for a speed not shown.
        "timers": {"throughput": {"enabled": False}},
    }
    tensor = plan.sharding.tp_size
    if tensor > 1:
        config["tensor_parallel"] = {"autotp_size": tensor}
        # Without it accelerate does not join the parts, and the Trainer saves no model at all.
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    precision = plan.precision
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    elif precision == "fp16":
        scaling = {key: profile.get(f"fp16.{key}", value) for key, value in _LOSS_SCALING.items()}
        config["fp16"] = {"enabled": True, **scaling}
    if plan.deepspeed.aio:
        config["aio"] = dict(plan.deepspeed.aio)
    for dotted, value in profile.items():
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


def flatten(mapping: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Dotted key -> value; an empty mapping is a value."""
    flat: dict[str, object] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
