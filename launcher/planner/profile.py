"""A base DeepSpeed profile (`sharding.config`): kept where the plan owns nothing, refused where it fights."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.errors import Problem, RecipeError
from launcher.plan.draft import Draft

# Keys that the plan owns -> the recipe key that says the same thing.
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
# optimizer.params key -> TrainingArguments field that must say the same.
ELSEWHERE = {
    "tensor_parallel": "say sharding.tp_size: N, so that the batch, the memory and the save know of it",
    "sequence_parallel_size": "say sharding.sp_size: N, so that the batch and the loss know of it",
    "pipeline": "no engine here cuts a model by its layers: use sharding.tp_size, or zero_stage: 3",
    "expert_parallel": "experts are not shared out here: use zero_stage: 3",
}
"""Blocks of a profile that would change who computes what, without the plan."""
_ZERO = "zero_optimization."
_GROUP = f"{_ZERO}zero_hpz_partition_size"
# Read at stage 3 alone (deepspeed/runtime/engine.py hands them to no other optimizer).
STAGE3_ONLY = frozenset(
    {
        "sub_group_size",
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "model_persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
        "gather_16bit_weights_on_model_save",
        "gather_fp16_weights_on_model_save",
        "module_granularity_threshold",
        "use_all_reduce_for_fetch_params",
        "allgather_sequential",
        "zero_hpz_partition_size",
        "zero_quantized_weights",
        "zero_quantized_nontrainable_weights",
        "zero_quantized_gradients",
        "memory_efficient_linear",
        "override_module_apply",
        "log_trace_cache_warnings",
        "enable_sanity_checks",
        "save_muon_momentum_buffer_in_memory",
        "leaf_module",
        "pipeline_loading_checkpoint",
        "cpu_offload_param",
    }
)
OPTIMIZER_PARAMS = {"lr": "learning_rate", "weight_decay": "weight_decay", "eps": "adam_epsilon"}
FROM_PROFILE = "from the base profile"
"""The reason of a setting that the profile says."""


def record_profile(draft: Draft, profile: Mapping[str, object] | None, processes: int) -> None:
    """Put the profile's stage and offload into the draft and the rest into `deepspeed.profile`.

    processes: of the whole run. Raises RecipeError with every value that contradicts the plan's own.
    """
    if profile is None:
        draft.put("deepspeed.profile", {}, "no base profile")
        return
    problems: list[Problem] = []
    flat = flatten(profile)
    for key in ("stage", "offload_optimizer.device", "offload_param.device"):
        value = flat.get(f"zero_optimization.{key}")
        setting = OWNED[f"zero_optimization.{key}"]
        if value in (None, "auto"):
            continue
        if draft.explicit(setting) and draft.at(setting) not in (value, "auto"):
            problems.append(_conflict(draft, f"zero_optimization.{key}", value, setting))
        else:
            origin = draft.place("sharding.config")[0] or "sharding.config"
            draft.put(setting, value, FROM_PROFILE, source="recipe", by=origin)
    precision = draft.precision
    for kind in ("bf16", "fp16"):
        value = flat.get(f"{kind}.enabled")
        if isinstance(value, bool) and value and precision != kind:
            problems.append(_conflict(draft, f"{kind}.enabled", value, "precision"))
    for key in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ):
        value = flat.get(key)
        if value not in (None, "auto") and value != draft.at(OWNED[key]):
            problems.append(_conflict(draft, key, value, OWNED[key]))
    problems += [*_blocks(draft, profile), *_groups(draft, flat.get(_GROUP), processes)]
    extras = {key: value for key, value in flat.items() if key not in OWNED}
    extras = {k: _resolve(k, v, draft, problems) for k, v in extras.items() if _kept(k, v)}
    if problems:
        raise RecipeError(problems)
    draft.put_recipe("deepspeed.profile", extras, FROM_PROFILE)


def _blocks(draft: Draft, profile: Mapping[str, object]) -> list[Problem]:
    """Blocks that would do something behind the plan."""
    file, line = draft.place("sharding.config")
    problems = [
        Problem(
            "profile-parallel",
            f"`{block}` in the base profile changes what the ranks compute, which the plan decides",
            file=file,
            line=line,
            path="sharding.config",
            hint=hint,
        )
        for block, hint in ELSEWHERE.items()
        if block in profile
    ]
    if "scheduler" in profile:
        problems.append(
            Problem(
                "profile-scheduler",
                "a scheduler block replaces trainer.lr_scheduler_type without a word",
                file=file,
                line=line,
                path="sharding.config",
                hint="remove the block and set trainer.lr_scheduler_type and warmup_steps",
            )
        )
    return problems


def _groups(draft: Draft, size: object, processes: int) -> list[Problem]:
    """Groups of ranks with a copy of the weights (hpZ), which have to be alike. Read at stage 3 alone."""
    ranks = min(size, processes) if isinstance(size, int) and size > 1 else 1
    if draft.sharding.zero_stage not in (None, 3) or processes % ranks == 0:
        return []
    fit = ", ".join(str(n) for n in range(2, processes + 1) if processes % n == 0)
    file, line = draft.place("sharding.config")
    message = f"{processes} ranks do not divide into groups of {_GROUP} = {size}; DeepSpeed refuses that"
    hint = f"write a divisor of {processes} ({fit}), in general the devices of one machine"
    return [Problem("profile-conflict", message, file=file, line=line, path="sharding.config", hint=hint)]


def idle_keys(profile: Mapping[str, object], stage: int) -> list[str]:
    """Keys of a flat profile that DeepSpeed reads at stage 3 alone, where the plan has another."""
    named = {key: key.removeprefix(_ZERO).removeprefix("stage3_") for key in profile if key.startswith(_ZERO)}
    given = [key for key in named if profile[key] is not None and profile[key] is not False]
    return [key for key in given if stage < 3 and named[key].partition(".")[0] in STAGE3_ONLY]


def profile_value(profile: Mapping[str, object], dotted: str) -> object:
    """What a profile says for a dotted key, None where it says nothing."""
    return flatten(profile).get(dotted)


def _kept(key: str, value: object) -> bool:
    """ "auto" means: whatever the plan decides; only optimizer params have to be looked up."""
    return value != "auto" or key.startswith("optimizer.params.")


def _resolve(key: str, value: object, draft: Draft, problems: list[Problem]) -> object:
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


def _conflict(draft: Draft, key: str, value: object, setting: str) -> Problem:
    file, line = draft.place("sharding.config")
    return Problem(
        "profile-conflict",
        f"the base profile says {key} = {value!r}, the plan says {setting} = {draft.at(setting)!r}",
        file=file,
        line=line,
        path="sharding.config",
        hint=f'write "auto" for {key} in the profile and say {setting} in the recipe',
    )


def flatten(mapping: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Dotted key -> value; an empty mapping is a value."""
    flat: dict[str, object] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
