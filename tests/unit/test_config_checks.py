"""Configurations that no model can have are refused, each with its key and what was expected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from every import every
from hypothesis import given
from hypothesis import strategies as st

from launcher.cli import main
from launcher.errors import RecipeError
from launcher.models.model import FAMILY_TASKS, read_model_spec

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 100,
}  # fmt: skip

ABSURD = [
    ({"hidden_size": -4096}, "hidden_size"),
    ({"hidden_size": 0}, "hidden_size"),
    ({"hidden_size": "4096"}, "hidden_size"),
    ({"hidden_size": 4096.5}, "hidden_size"),
    ({"hidden_size": True}, "hidden_size"),
    ({"hidden_size": [64]}, "hidden_size"),
    ({"hidden_size": float("nan")}, "hidden_size"),
    ({"hidden_size": 66}, "hidden_size"),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"num_key_value_heads": 8}, "num_key_value_heads"),
    ({"num_key_value_heads": 3}, "key-value heads"),
    ({"num_key_value_heads": -1}, "num_key_value_heads"),
    ({"intermediate_size": "wide"}, "intermediate_size"),
    ({"vocab_size": 0}, "vocab_size"),
    ({"vocab_size": None}, "vocab_size"),
    ({"head_dim": 0}, "head_dim"),
    ({"max_position_embeddings": -2048}, "max_position_embeddings"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
    ({"num_labels": -1}, "num_labels"),
    ({"model_type": "gpt2", "n_embd": 65, "n_head": 4}, "hidden_size"),
    ({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "attn_pdrop": 7}, "attn_pdrop"),
    ({"model_type": "gpt2", "attn_pdrop": float("nan")}, "attn_pdrop"),
    ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok"),
    ({"model_type": "qwen3_moe", "num_key_value_heads": 4, "decoder_sparse_step": 0}, "decoder_sparse_step"),
    ({"model_type": "vit", "image_size": [224, -1]}, "image_size"),
    ({"model_type": "vit", "patch_size": 512}, "patch_size"),
]


def spec_of(config: dict[str, Any]) -> None:
    read_model_spec("x", config, "test", FAMILY_TASKS[config["model_type"]][0])


@every(("changes", "key"), ABSURD)
def test_absurd_configurations_are_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(RecipeError) as caught:
        spec_of(changes if "model_type" in changes else LLAMA | changes)
    assert {problem.code for problem in caught.value.problems} == {"bad-model-config"}
    assert key in caught.value.problems[0].message
    assert caught.value.exit_code == 2


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        spec_of(LLAMA | {"hidden_size": -1, "vocab_size": "many", "num_hidden_layers": 0})
    assert len(caught.value.problems) == 3


def test_sizes_that_look_odd_and_are_right() -> None:
    spec_of(LLAMA | {"hidden_size": 66, "head_dim": 16})
    spec_of(LLAMA | {"num_key_value_heads": 1, "rope_theta": 1e6})
    spec_of({"model_type": "gpt2", "n_inner": None})
    spec_of({"model_type": "vit", "image_size": [32, 48], "patch_size": 16})


SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
         "intermediate_size", "head_dim", "max_position_embeddings")  # fmt: skip
JUNK = st.one_of(
    st.integers(-(10**13), 10**13), st.floats(), st.text(max_size=5), st.none(), st.booleans(),
    st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(SIZES), JUNK, min_size=1))
def test_any_junk_is_either_a_model_or_refused(changes: dict[str, Any]) -> None:
    try:
        params = read_model_spec("x", LLAMA | changes, "test").params
    except RecipeError:
        return
    assert params > 0


def estimate(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = main(["estimate", *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"hidden_size": -1}, "bad-model-config"),
        ({"hidden_size": float("nan")}, "bad-model-config"),
        ({"num_hidden_layers": 10**12}, "bad-model-config"),
        ({"model_type": "nonesuch"}, "not-in-closed-form"),
        ({"model_type": None}, "unknown-architecture"),
        ({"model_type": ["llama"]}, "unknown-architecture"),
    ],
)
def test_estimate_of_an_absurd_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, Any], code: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes), encoding="utf-8")
    exit_code, answer = estimate(capsys, str(tmp_path), "--on", "1xA100-80GB")
    assert exit_code == 2
    assert {problem["code"] for problem in answer["errors"]} == {code}
    assert "rows" not in answer


def test_estimate_on_a_device_that_is_not_in_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code, answer = estimate(capsys, "huggyllama/llama-7b", "--on", "8xA1000-8TB")
    assert exit_code == 2
    assert answer["errors"][0]["code"] == "unknown-device"
    assert "rows" not in answer


@pytest.mark.parametrize(
    ("model", "ranks", "on", "words"),
    [
        (
            "huggyllama/llama-7b",
            64,
            "64xA100-80GB",
            "64 tensor-parallel ranks are more than the 32 attention",
        ),
        ("huggyllama/llama-7b", 3, "8xA100-80GB", "32 attention heads of huggyllama/llama-7b do not divide"),
        (
            "huggyllama/llama-7b",
            16,
            "8xA100-80GB",
            "8 devices of 8xA100-80GB do not divide into groups of 16",
        ),
        ("huggyllama/llama-7b", 0, "8xA100-80GB", "0 tensor-parallel ranks: expected at least 1"),
        ("huggyllama/llama-7b", 4, "2x6xA100-80GB", "groups of 4 do not fit nodes of 6 devices"),
    ],
)
def test_tensor_parallel_ranks_that_cannot_be(
    capsys: pytest.CaptureFixture[str], model: str, ranks: int, on: str, words: str
) -> None:
    exit_code, answer = estimate(capsys, model, "--on", on, "--tensor-parallel", str(ranks))
    assert exit_code == 2
    assert answer["errors"][0]["code"] == "bad-tensor-parallel"
    assert words in answer["errors"][0]["message"]
    assert "rows" not in answer
