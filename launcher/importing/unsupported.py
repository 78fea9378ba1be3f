"""Tools without a reader, known by their configs: they are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

MANUALLY = "docs/migrate/script.md describes how to move it manually"
Matches = Callable[[Mapping[str, Any]], bool]
"""Whether a mapping in a file is the tool's."""
SCRIPT = "import-script"
"""Code of a Python or shell script: what it does is not guessed."""
_PAGES = {"torchtune": "docs/migrate/torchtune.md has its keys and ours"}


def page_of(tool: str) -> str:
    """What to do with a config of that tool."""
    return _PAGES.get(tool, MANUALLY)


def _keys(*names: str) -> Matches:
    """All of the keys; `a|b` is one of the two."""
    return lambda data: all(any(one in data for one in name.split("|")) for name in names)


def _mentions(*words: str) -> Matches:
    """A class path or a key somewhere within."""
    return lambda data: any(word in str(data) for word in words)


def _inner(key: str, *names: str) -> Matches:
    """A mapping under a key with these keys in it."""
    return lambda data: isinstance(data.get(key), Mapping) and _keys(*names)(data[key])


def _texts(key: str, *names: str) -> Matches:
    """A text under a key, and other keys beside it."""
    return lambda data: isinstance(data.get(key), str) and _keys(*names)(data)


def _both(*matches: Matches) -> Matches:
    return lambda data: all(one(data) for one in matches)


OURS = "effilaunch itself"
_OF_SWIFT = (
    "tuner_type|train_type|rlhf_type|sft_type|split_dataset_ratio|template_type|system|attention_backend|"
    "attn_impl|device_groups|load_from_cache_file|template"
)
_CONFIGS: tuple[tuple[str, Matches], ...] = (
    (OURS, _both(_inner("model", "name_or_path|config"), _inner("data", "train"))),
    ("torchtune", _mentions("'_component_'")),
    ("Oumi", _both(_inner("model", "model_name"), _keys("training|generation|engine|tasks|peft"))),
    ("Oumi", _keys("judge_params")),
    ("NeMo", _keys("exp_manager")),
    ("NeMo", _mentions("nemo_automodel", "nemo.collections")),
    ("NeMo RL", _keys("policy", "cluster")),
    ("verl", _keys("actor_rollout_ref")),
    ("verl", _keys("data", "model", "optim", "trainer")),
    ("LitGPT", _mentions("litgpt.")),
    ("LitGPT", _keys("checkpoint_dir", "train", "eval")),
    ("LitGPT", _keys("model_name", "out_dir", "train", "eval")),
    ("Soup", _texts("base", "task", "data", "training")),
    ("Oumi", _keys("model", "data", "tuning")),
    ("GPT-NeoX", _keys("pipe-parallel-size|pipe_parallel_size")),
    ("LLM Foundry", _keys("max_duration", "train_loader")),
    ("nanotron", _keys("parallelism", "tokens", "general")),
    ("MLX LM", _keys("lora_parameters")),
    ("MLX LM", _keys("model", "train", "data", "iters")),
    ("Ludwig", _keys("input_features", "output_features")),
    ("H2O LLM Studio", _keys("experiment_name", "architecture", "augmentation")),
    ("LLaMA-Factory v1", _texts("model", "model_class")),
    ("ms-swift", _texts("model", "dataset", _OF_SWIFT)),
    ("ms-swift", _texts("model_id_or_path", "dataset", _OF_SWIFT)),
    ("MMEngine", _keys("optim_wrapper")),
    ("Lightning", _mentions("pytorch_lightning")),
    ("Lightning", _inner("trainer", "accelerator|devices")),
    ("SkyPilot or Oumi (a job)", _keys("run", "resources")),
    ("a notebook (`jupyter nbconvert --to script` makes a script of it)", _keys("nbformat")),
    ("transformers (a model's config.json)", _keys("model_type", "architectures")),
)
"""Name, and whether the keys of a config are that tool's; the first is meant."""


def config_tool_of(data: Mapping[str, Any]) -> str | None:
    """The tool that a config belongs to, where it is one that is known by its keys and has no reader."""
    return next((tool for tool, matches in _CONFIGS if matches(data)), None)
