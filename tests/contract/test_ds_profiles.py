"""transformers and DeepSpeed accept every base profile, as a plain Trainer would use it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

PROFILES = sorted((Path(__file__).resolve().parents[2] / "ds_configs").glob("*.json"))
assert PROFILES


@pytest.fixture
def zero_config():
    from deepspeed.runtime.zero.config import get_zero_config

    return get_zero_config


def resolved(profile: dict, **arguments) -> dict:
    """The profile after transformers has filled every "auto" from TrainingArguments."""
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    config = HfTrainerDeepSpeedConfig(copy.deepcopy(profile))
    training = TrainingArguments(report_to=[], use_cpu=True, **arguments)
    config.trainer_config_process(training)
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=64))
    config.trainer_config_finalize(training, model, num_training_steps=10)
    return config.config


def autos(value) -> bool:
    if isinstance(value, dict):
        return any(autos(inner) for inner in value.values())
    return value == "auto"


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_trainer_fills_every_auto(path, tmp_path):
    profile = json.loads(path.read_text(encoding="utf-8"))
    assert autos(profile)
    filled = resolved(
        profile,
        output_dir=str(tmp_path),
        per_device_train_batch_size=3,
        gradient_accumulation_steps=5,
        max_grad_norm=0.7,
        bf16=True,
    )
    assert not autos(filled)
    assert filled["train_micro_batch_size_per_gpu"] == 3
    assert filled["gradient_accumulation_steps"] == 5
    assert filled["gradient_clipping"] == 0.7
    assert (filled["bf16"]["enabled"], filled["fp16"]["enabled"]) == (True, False)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_deepspeed_knows_every_zero_key(path, zero_config, tmp_path):
    filled = resolved(json.loads(path.read_text(encoding="utf-8")), output_dir=str(tmp_path))
    config = zero_config(filled)
    assert config.stage == filled["zero_optimization"]["stage"]
    asked = filled["zero_optimization"].get("offload_optimizer")
    assert (config.offload_optimizer is None) == (asked is None)


def test_deepspeed_would_refuse_a_misspelt_zero_key(zero_config):
    with pytest.raises(ValueError, match="overlap_com"):
        zero_config({"zero_optimization": {"stage": 2, "overlap_com": True}})
