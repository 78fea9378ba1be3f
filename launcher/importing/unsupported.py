"""Tools without a reader, known by their configs: they are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

MANUALLY = "docs/migrate/script.md describes how to move it manually"
SCRIPT = "import-script"
"""Code of a Python or shell script: what it does is not guessed."""
_PAGES = {"torchtune": "docs/migrate/torchtune.md has its keys and ours"}


def page_of(tool: str) -> str:
    """What to do with a config of that tool."""
    return _PAGES.get(tool, MANUALLY)


def _has(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda data: all(name in data for name in names)


def _any(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda data: any(name in data for name in names)


def _mentions(*words: str) -> Callable[[Mapping[str, Any]], bool]:
    """A class path or a key somewhere within."""
    return lambda data: any(word in str(data) for word in words)


def _oumi(data: Mapping[str, Any]) -> bool:
    model = data.get("model")
    named = isinstance(model, Mapping) and "model_name" in model
    return named and any(key in data for key in ("training", "generation", "engine", "tasks", "peft"))


def _swift(data: Mapping[str, Any]) -> bool:
    if not isinstance(data.get("model", data.get("model_id_or_path")), str) or "dataset" not in data:
        return False
    own = (
        "tuner_type", "train_type", "rlhf_type", "sft_type", "split_dataset_ratio", "template_type", "system",
        "attention_backend", "attn_impl", "device_groups", "load_from_cache_file", "template",
    )  # fmt: skip
    return any(key in data for key in own)


def _lightning(data: Mapping[str, Any]) -> bool:
    trainer = data.get("trainer")
    return isinstance(trainer, Mapping) and ("accelerator" in trainer or "devices" in trainer)


def _ours(data: Mapping[str, Any]) -> bool:
    model, rows = data.get("model"), data.get("data")
    if not isinstance(model, Mapping) or not isinstance(rows, Mapping):
        return False
    return bool({"name_or_path", "config"} & model.keys()) and "train" in rows


OURS = "effilaunch itself"
_CONFIGS: tuple[tuple[str, Callable[[Mapping[str, Any]], bool]], ...] = (
    (OURS, _ours),
    ("torchtune", _mentions("'_component_'")),
    ("Oumi", _oumi),
    ("Oumi", _has("judge_params")),
    ("NeMo", lambda data: "exp_manager" in data or _mentions("nemo_automodel", "nemo.collections")(data)),
    ("NeMo RL", _has("policy", "cluster")),
    ("verl", _any("actor_rollout_ref")),
    ("verl", _has("data", "model", "optim", "trainer")),
    ("LitGPT", lambda data: "litgpt." in str(data) or {"checkpoint_dir", "train", "eval"} <= data.keys()),
    ("LitGPT", _has("model_name", "out_dir", "train", "eval")),
    ("Soup", lambda data: isinstance(data.get("base"), str) and {"task", "data", "training"} <= data.keys()),
    ("Oumi", _has("model", "data", "tuning")),
    ("GPT-NeoX", lambda data: any(str(key).replace("_", "-") == "pipe-parallel-size" for key in data)),
    ("LLM Foundry", _has("max_duration", "train_loader")),
    ("nanotron", _has("parallelism", "tokens", "general")),
    ("MLX LM", lambda data: "lora_parameters" in data or {"model", "train", "data", "iters"} <= data.keys()),
    ("Ludwig", _has("input_features", "output_features")),
    ("H2O LLM Studio", _has("experiment_name", "architecture", "augmentation")),
    ("LLaMA-Factory v1", lambda data: "model_class" in data and isinstance(data.get("model"), str)),
    ("ms-swift", _swift),
    ("MMEngine", _any("optim_wrapper")),
    ("Lightning", lambda data: "pytorch_lightning" in str(data) or _lightning(data)),
    ("SkyPilot or Oumi (a job)", lambda data: "run" in data and "resources" in data),
    ("a notebook (`jupyter nbconvert --to script` makes a script of it)", _any("nbformat")),
    ("transformers (a model's config.json)", _has("model_type", "architectures")),
)
"""Name, and whether the keys of a config are that tool's; the first is meant."""


def config_tool_of(data: Mapping[str, Any]) -> str | None:
    """The tool that a config belongs to, where it is one that is known by its keys and has no reader."""
    return next((tool for tool, matches in _CONFIGS if matches(data)), None)
