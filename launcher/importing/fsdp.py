"""FSDP as TrainingArguments and accelerate say it: the engine, and options that only move memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.importing.found import Effect, Reading, shown

OFFLOAD = "memory only: FSDP keeps its shards on the device here"
NEAREST = "DeepSpeed offloads: sharding: {zero_stage: 3, offload_param: cpu, offload_optimizer: cpu}"
_MEMORY = "memory only: each block is gathered and dropped again"
# How each block is wrapped and gathered is the engine's own matter here, and needs no message.
_WRAPPING = (
    "auto_wrap_policy", "transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap",
    "transformer_cls_to_wrap", "min_num_params", "backward_prefetch",
    "backward_prefetch_policy", "forward_prefetch", "use_orig_params",
    "xla", "xla_fsdp_settings", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "limit_all_gathers", "version",
    "offload_pin_memory", "cpu_offload_pin_memory",
)  # fmt: skip
_LOADING = "host memory only: how the weights are loaded, not which"
_LEFT = {
    "offload_params": (Effect.NONE, OFFLOAD, NEAREST),
    "cpu_offload": (Effect.NONE, OFFLOAD, NEAREST),
    "cpu_ram_efficient_loading": (Effect.NONE, _LOADING, ""),
    "sync_module_states": (Effect.NONE, _LOADING, ""),
    "state_dict_type": (
        Effect.NONE,
        "the format of checkpoints alone",
        "",
    ),
    "final_state_dict_type": (Effect.NONE, "the format of the result alone: it is whole", ""),
    "ignored_modules": (Effect.TRAINING, "every module is sharded and synchronised here", ""),
    "mixed_precision_policy": (Effect.TRAINING, "`precision` decides it here", ""),
}
"""Options that are listed where they are on: effect, reason, hint."""
_STRATEGIES = {
    "FULL_SHARD": "full", "1": "full", "SHARD_GRAD_OP": "grad", "2": "grad", "NO_SHARD": "none",
    "3": "none", "HYBRID_SHARD": "hybrid", "4": "hybrid", "HYBRID_SHARD_ZERO2": "hybrid", "5": "hybrid",
}  # fmt: skip


def take_fsdp(reading: Reading, name: str, value: Any, line: int | None) -> None:
    """`fsdp: "full_shard auto_wrap"` of TrainingArguments; true and "" as its newer and older forms."""
    text = shown(value).lower() if not isinstance(value, list | tuple) else " ".join(map(str, value))
    words = [word.rpartition(".")[2].strip("'\"[]").lower() for word in text.replace(",", " ").split()]
    reading.know(name)
    if not words or words == ["false"]:
        return
    engine = "ddp" if "no_shard" in words else "fsdp"
    reading.take("sharding.engine", engine, line, f"{name}: {text}")
    if "offload" in words:
        reading.drop(f"{name}: offload", "offload", line, Effect.NONE, OFFLOAD, NEAREST)
    for word in ("shard_grad_op", "hybrid_shard", "hybrid_shard_zero2"):
        if word in words:
            reading.drop(f"{name}: {word}", word, line, Effect.NONE, _MEMORY)
    known = {"full_shard", "auto_wrap", "true", "offload", "no_shard", "shard_grad_op", "hybrid_shard",
             "hybrid_shard_zero2"}  # fmt: skip
    for word in words:
        if word not in known:
            reading.drop(f"{name}: {word}", word, line, Effect.NEEDED, "no word of `fsdp`")


def take_fsdp_options(reading: Reading, name: str, value: Any, line: int | None) -> None:
    """The mapping `fsdp_config`, with or without the prefix `fsdp_` of its keys."""
    if not isinstance(value, Mapping):
        reading.drop(name, value, line, Effect.NONE, "a file: give it as a FILE if it asks for offload")
        return
    reading.know(name)
    for key, item in value.items():
        take_fsdp_option(reading, f"{name}.{key}", str(key), item, line)


def take_fsdp_option(reading: Reading, said: str, key: str, value: Any, line: int | None) -> None:
    """One key of an fsdp_config; `said`: its full name in the file."""
    plain = key.removeprefix("fsdp_").replace("-", "_")
    switch = str(value).strip().lower() in ("true", "yes", "1", "on")
    reading.know(said)
    if value is None:
        return
    if plain in _LEFT:
        if str(value).strip().lower() not in ("false", "no", "0", "off", "none", ""):
            reading.drop(said, value, line, *_LEFT[plain])
    elif plain == "activation_checkpointing":
        if switch:
            reading.take("trainer.activation_checkpointing", True, line, f"{said}: true")
    elif plain in ("sharding_strategy", "reshard_after_forward"):
        _strategy(reading, said, value, line)
    elif plain == "version" and str(value) == "1":
        reading.drop(said, value, line, Effect.NONE, "FSDP2 is used, which learns the same")
    elif plain not in _WRAPPING:
        reading.drop(said, value, line, Effect.NONE, "no option of FSDP that is known here")


def _strategy(reading: Reading, said: str, value: Any, line: int | None) -> None:
    kind = _STRATEGIES.get(str(value).rpartition(".")[2].upper(), "full")
    if str(value).lower() in ("false", "no"):
        kind = "grad"
    if kind == "none":
        reading.take("sharding.engine", "ddp", line, f"{said}: {value}")
    elif kind != "full":
        reading.drop(said, value, line, Effect.NONE, _MEMORY)
