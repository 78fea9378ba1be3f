"""Specs against the real classes: parameter counts, linears and LoRA on small configurations."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

import pytest

from launcher.facts.model import read_model_spec
from launcher.facts.shipped import facts_file

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

# peft sets the first for GPT-2; the second is its own rewriting of targets in expert models.
pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys"),
]

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": 512}
MOE = {"num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **LLAMA},
    "llama-bias": {"model_type": "llama", **LLAMA, "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", **LLAMA},
    "qwen2": {"model_type": "qwen2", **LLAMA, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **LLAMA},
    "gemma": {"model_type": "gemma", **LLAMA},
    "gemma2": {"model_type": "gemma2", **LLAMA},
    "gemma3_text": {"model_type": "gemma3_text", **LLAMA},
    "phi3": {"model_type": "phi3", **LLAMA, "pad_token_id": 0},
    "starcoder2": {"model_type": "starcoder2", **LLAMA},
    "gpt_bigcode": {"model_type": "gpt_bigcode", **GPT2},
    "gpt_bigcode-mha": {"model_type": "gpt_bigcode", **GPT2, "multi_query": False},
    "gpt2": {"model_type": "gpt2", **GPT2},
    "gpt_neox": {"model_type": "gpt_neox", **LLAMA},
    "opt": {"model_type": "opt", **LLAMA, "ffn_dim": 160},
    "opt-projected": {"model_type": "opt", **LLAMA, "ffn_dim": 160, "word_embed_proj_dim": 32},
    "mixtral": {"model_type": "mixtral", **LLAMA, "num_local_experts": 4},
    "qwen3_moe": {"model_type": "qwen3_moe", **LLAMA, **MOE},
}


def build(name: str) -> Any:
    config = transformers.AutoConfig.for_model(**CONFIGS[name])
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def shapes(model: Any) -> Counter[tuple[str, int, int]]:
    found: Counter[tuple[str, int, int]] = Counter()
    for path, module in model.named_modules():
        if path == "lm_head":
            continue
        kind = type(module).__name__
        if kind == "Linear":
            found[path, module.in_features, module.out_features] += 1
        elif kind == "Conv1D":
            found[path, module.nx, module.nf] += 1
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_linears_and_lora_match_the_real_model(name: str) -> None:
    spec = read_model_spec(name, CONFIGS[name], "test")
    model = build(name)
    assert spec.params == sum(p.numel() for p in model.parameters())
    expected: Counter[tuple[str, int, int]] = Counter()
    for linear in spec.linears:
        for index in range(linear.count):
            expected[linear.path.format(index), linear.in_features, linear.out_features] += 1
    assert shapes(model) == expected
    config = peft.LoraConfig(r=5, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"):
        adapted = peft.get_peft_model(model, config)
    trainable = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert spec.lora_params(5, "all-linear") == trainable


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_bigcode", "opt", "gpt_neox"])
def test_default_lora_targets_are_those_of_peft(name: str) -> None:
    spec = read_model_spec(name, CONFIGS[name], "test")
    with torch.device("meta"):
        adapted = peft.get_peft_model(build(name), peft.LoraConfig(r=5, task_type="CAUSAL_LM"))
    trainable = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert spec.lora_params(5, None) == trainable


def test_shipped_defaults_are_those_of_the_installed_classes() -> None:
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    shipped = json.loads(facts_file("config_defaults.json").read_text())["defaults"]
    for model_type, defaults in shipped.items():
        fields = {f.name: f.default for f in dataclasses.fields(mapping[model_type])}
        assert {key: fields[key] for key in defaults} == defaults
