"""Mappings inside `trainer:`, of which each key and value is checked as those of the recipe are.

What takes them is built when the model is loaded, hours later in a queue; some of it ignores what it does not
know. The tables are those of transformers 5.23, accelerate 1.13 and liger-kernel 0.8.5
(tests/contract/test_nested_fields.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

from launcher.errors import Problem
from launcher.files.safe_files import parse_json
from launcher.recipe.env import has_reference
from launcher.recipe.suggestions import close_key

CHECKPOINTING = (
    "use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop",
    "every_n_layers", "offload",
)  # fmt: skip
"""Without `context_fn`, a function, which no recipe can hold."""
ACCELERATOR = (
    "split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking",
    "gradient_accumulation_kwargs", "use_configured_state",
)  # fmt: skip
ACCUMULATION = ("adjust_scheduler", "sync_with_dataloader", "sync_each_batch")
"""Without `num_steps`, which is trainer.gradient_accumulation_steps: the two multiply."""
LIGER = (
    "rope", "cross_entropy", "fused_linear_cross_entropy", "rms_norm", "layer_norm", "swiglu", "geglu",
    "relu_squared",
)  # fmt: skip
SCHEDULERS: Mapping[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"),
    "warmup_stable_decay": (
        "num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles",
    ),
}  # fmt: skip
"""`lr_scheduler_type` -> keys of `lr_scheduler_kwargs`. Others take none, or whatever torch's class takes."""
ANY_SCHEDULE = ("reduce_lr_on_plateau", "greedy")
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}
"""`lr_scheduler_type` -> keys of which it needs one."""
_NUMBERS = frozenset(
    {name for names in SCHEDULERS.values() for name in names} | {"every_n_layers", "num_steps"}
)
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "determinism_check": ("default", "none"),
    **dict.fromkeys(("warmup_type", "decay_type"), ("linear", "cosine", "1-sqrt")),
}
"""Keys that hold one of some texts. What is neither here nor in `_NUMBERS` is true or false."""
NULLS = frozenset({
    "dispatch_batches", "gradient_accumulation_kwargs", "timescale", "num_stable_steps", "min_lr",
    "min_lr_rate", "warmup_lr_rate",
})  # fmt: skip
"""Keys that may be null, which is upstream's default."""
_SHARES = ("min_lr_rate", "min_lr_ratio")
_LOW_RANK = ("rank", "update_proj_gap", "scale", "proj_type")
_ADEMAMIX = ("beta1", "beta2", "beta3", "alpha", "eps", "t_alpha", "t_beta3")
OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "sgd": ("momentum", "dampening", "weight_decay", "nesterov"),
    "adagrad": ("lr_decay", "weight_decay", "eps"),
    "rmsprop": ("momentum", "alpha", "eps", "weight_decay", "centered"),
    "adamw_anyprecision": (
        "use_kahan_summation", "momentum_dtype", "variance_dtype", "compensation_buffer_dtype",
    ),
    "grokadamw": ("alpha_init", "lamb", "gamma", "grokking_signal_decay_rate", "gradient_clipping"),
    "stable_adamw": ("max_lr", "kahan_sum", "decouple_lr"),
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit"), ("block_size", "bf16_stochastic_round")),
    **dict.fromkeys(
        ("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"), ("weight_lr_power", "r")
    ),
    **dict.fromkeys(
        ("ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"), _ADEMAMIX
    ),
    **{
        f"galore_{name}{layerwise}": _LOW_RANK
        for name in ("adamw", "adamw_8bit", "adafactor") for layerwise in ("", "_layerwise")
    },
    **dict.fromkeys(("apollo_adamw", "apollo_adamw_layerwise"), (*_LOW_RANK, "proj", "scale_type")),
}  # fmt: skip
"""`optim` -> keys that it reads from `optim_args`; the others read none."""
_WORDS = frozenset({
    "proj", "proj_type", "scale_type", "momentum_dtype", "variance_dtype", "compensation_buffer_dtype",
})  # fmt: skip
"""Keys of `optim_args` that hold a name; `_SWITCHES` hold true or false, the others a number."""
_SWITCHES = frozenset(
    {"nesterov", "centered", "use_kahan_summation", "kahan_sum", "decouple_lr", "bf16_stochastic_round"}
)


def check_nested(trainer: Mapping[str, Any]) -> list[Problem]:
    """Problems of the keys of mappings in `trainer:`, and of a schedule, without file and line."""
    return [
        *_wrong("activation_checkpointing_kwargs", trainer, CHECKPOINTING),
        *_wrong("liger_kernel_config", trainer, LIGER),
        *_accelerator(trainer),
        *_optim_args(trainer),
        *_schedule(trainer),
    ]


def _mapping(value: Any) -> Mapping[str, Any]:
    """The mapping, also as JSON in a text; empty for anything else."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError:
            return {}
    return value if isinstance(value, Mapping) else {}


def _wrong(name: str, parent: Mapping[str, Any], known: Iterable[str], whose: str = "") -> Iterator[Problem]:
    expected = ", ".join(known) or "none"
    for key, value in _mapping(parent.get(name.rpartition(".")[2])).items():
        if key not in known:
            near = close_key(key, known)
            hint = f"did you mean `{near}`?" if near else "remove it: nothing would read it"
            message = f"unknown key, {whose or 'it'} takes {expected}"
            yield Problem("unknown-key", message, path=f"trainer.{name}.{key}", hint=hint)
        elif wrong := _wrong_type(key, value):
            yield Problem("wrong-value", wrong, path=f"trainer.{name}.{key}")


def _wrong_type(key: str, value: Any) -> str | None:
    """What is wrong with the value of a known key; None for nothing, or where the environment has it."""
    if has_reference(value) or (value is None and key in NULLS):
        return None
    if key == "gradient_accumulation_kwargs":
        fits, expected = isinstance(value, Mapping), "a mapping"
    elif choices := _CHOICES.get(key):
        fits, expected = value in choices, ", ".join(choices)
    elif key in _NUMBERS:
        fits, expected = _is_number(value), "a number"
    else:
        fits, expected = isinstance(value, bool), "true or false"
    if fits and key in _SHARES and value > 1:
        return f"is {value:g}, expected at most 1, a share of the learning rate: the rate would rise"
    return None if fits else f"has {value!r}, expected {expected}"


def _accelerator(trainer: Mapping[str, Any]) -> Iterator[Problem]:
    yield from _wrong("accelerator_config", trainer, ACCELERATOR)
    given = _mapping(trainer.get("accelerator_config"))
    name = "accelerator_config.gradient_accumulation_kwargs"
    inner = _mapping(given.get("gradient_accumulation_kwargs"))
    if "num_steps" in inner:
        message, hint = (
            "not allowed: it would accumulate what is accumulated already",
            "write `trainer.gradient_accumulation_steps`",
        )
        yield Problem("owned-key", message, path=f"trainer.{name}.num_steps", hint=hint)
    yield from _wrong(name, given, (*ACCUMULATION, "num_steps"))


def _optim_args(trainer: Mapping[str, Any]) -> Iterator[Problem]:
    given, path = trainer.get("optim_args"), "trainer.optim_args"
    if not isinstance(given, str) or not given or has_reference(given):
        return
    optim = str(trainer.get("optim", "adamw_torch_fused"))
    known = OPTIMIZERS.get(optim, ())
    for part in given.replace(" ", "").split(","):
        key, equals, value = part.partition("=")
        if not (key and equals and value) or "=" in value:
            message = f"has {part!r}, expected NAME=VALUE, with commas between several"
            yield Problem("wrong-value", message, path=path)
        elif key not in known:
            near = close_key(key, known)
            hint = f"did you mean `{near}`?" if near else "remove it, or use another `optim`"
            message = f"has {key}, which {optim} does not read; it takes {', '.join(known) or 'none'}"
            yield Problem("unknown-key", message, path=path, hint=hint)
        elif expected := _wrong_text(key, value):
            yield Problem("wrong-value", f"has {part!r}, expected {key}={expected}", path=path)


def _wrong_text(key: str, value: str) -> str | None:
    """What was expected in place of a value of `optim_args`; None where it fits."""
    if key in _SWITCHES:
        return None if value.lower() in ("true", "false", "1", "0", "yes", "no") else "true or false"
    try:
        key in _WORDS or float(value)
        return None
    except ValueError:
        return "a number"


def _schedule(trainer: Mapping[str, Any]) -> Iterator[Problem]:
    kind, name = str(trainer.get("lr_scheduler_type", "linear")), "lr_scheduler_kwargs"
    given = _mapping(trainer.get(name))
    known = SCHEDULERS.get(kind, ())
    if kind not in ANY_SCHEDULE:
        yield from _wrong(name, trainer, known, kind)
    needed = _NEEDED.get(kind, ())
    if needed and not any(given.get(key) is not None for key in needed):
        message = f"lacks {' or '.join(needed)}, which {kind} needs"
        yield Problem("missing-key", message, path=f"trainer.{name}", hint=f"write `{needed[0]}: ...` there")
    if refusal := rising_rate(trainer, trainer.get("learning_rate")):
        code, path, message, hint = refusal
        yield Problem(code, message, path=path, hint=hint)


def rising_rate(trainer: Mapping[str, Any], rate: Any) -> tuple[str, str, str, str] | None:
    """What to refuse where `min_lr` is above a learning rate, which may be the plan's; else None."""
    least = _mapping(trainer.get("lr_scheduler_kwargs")).get("min_lr")
    if not (_is_number(rate) and _is_number(least) and least > rate):
        return None
    message = f"is {least:g}, above the learning rate {rate:g}: the rate would rise"
    path, hint = "trainer.lr_scheduler_kwargs.min_lr", "write a rate below `learning_rate`"
    return "wrong-value", path, message, hint


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
