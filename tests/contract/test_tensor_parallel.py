"""Ranks that share each layer's matrices learn what one process learns: DeepSpeed's AutoTP and transformers.

Plain SGD without clipping, and four samples a step: nothing hides a gradient of the wrong size.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cases import cases
from engine_runs import (
    LLAMA,
    alone,
    assert_goes_on,
    assert_keeps_best,
    assert_readable,
    check_alike,
    column,
    make_ground,
    planned,
    result,
    trained,
)
from grounds import write_rows

from launcher.engines import engine_named
from launcher.memory.tensor_parallel import rank_spec
from launcher.models.model import read_model_spec

if not find_spec("deepspeed"):  # not imported here: that takes long
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)

AUTO = {"engine": "deepspeed", "tp_size": 2}
AGAIN = {"activation_checkpointing": True}


@pytest.fixture(scope="module")
def ground(tmp_path_factory) -> Path:
    folder = make_ground(tmp_path_factory.mktemp("ground"))
    full = [{"prompt": f"w{i} w{i + 1} w3 w4", "completion": f" w{2 * i} w7 w8"} for i in range(16)]
    write_rows(folder / "full.jsonl", full)  # eight tokens each
    return folder


def family(model_type: str, **more: Any) -> dict[str, Any]:
    config = {**LLAMA, "model_type": model_type, "head_dim": 16, "sliding_window": None, **more}
    return {"model": {"config": config, "tokenizer": "tokenizer"}}


PACKED = {"data": {"train": [{"path": "rows.jsonl"}], "max_length": 32, "packing": True}}
FLAT = {"data": {"train": [{"path": "rows.jsonl"}], "max_length": 32, "padding_free": True}}
EAGER = {"name_or_path": "model", "tokenizer": "tokenizer", "attn_implementation": "eager"}
FAMILIES = ("gemma", "mistral", "qwen2", "qwen3")
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "ZeRO-2": ({}, {**AUTO, "zero_stage": 2}, 2),
    "ZeRO-1, recomputed": ({"trainer": AGAIN}, {**AUTO, "zero_stage": 1}, 2),
    "ZeRO-0": ({}, {**AUTO, "zero_stage": 0}, 2),
    "ZeRO-2, two copies": ({}, {**AUTO, "zero_stage": 2}, 4),
    "tied": (family("llama", tie_word_embeddings=True), {**AUTO, "zero_stage": 1}, 2),
    "ZeRO-1, packed": (PACKED, {**AUTO, "zero_stage": 1}, 2),
    "ZeRO-1, padding-free": (FLAT, {**AUTO, "zero_stage": 1}, 2),
    "ZeRO-1, eager": ({"model": EAGER}, {**AUTO, "zero_stage": 1}, 2),
    "bf16": ({"precision": "bf16"}, {**AUTO, "zero_stage": 2}, 2),
    **{name: (family(name), {**AUTO, "zero_stage": 2}, 2) for name in FAMILIES},
}
SHORT = ("ZeRO-2",)
PARAMS = [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", PARAMS)
def test_ranks_learn_what_one_process_learns(name, ground, tmp_path, forks):
    said, sharding, world = CASES[name]
    one = alone(said, ground, tmp_path / "one", forks)
    parts = trained({**said, "sharding": sharding}, ground, tmp_path / "parts", forks, world)
    check_alike(one, parts, half="bf16" in name, norms=sharding.get("zero_stage") != 0)
    assert result(parts)["tokens"] == result(one)["tokens"]
    plan = json.loads((parts / "plan.json").read_text())
    assert (plan["batch"]["data_parallel"], plan["batch"]["global"]) == (world // 2, 4)
    assert_readable(parts)
    components = result(parts)["memory"]["components"]
    for kind in ("gradients", "optimizer", "weights"):
        assert components[kind]["measured"] == pytest.approx(components[kind]["predicted"], rel=0.01), kind


TIED = family("llama", tie_word_embeddings=True)
SCALES = family("gemma", tie_word_embeddings=True)
WORDS = {
    "AutoTP": ({}, AUTO),
    "AutoTP, tied": (TIED, AUTO),
    "AutoTP, tied to an embedding that scales": (SCALES, AUTO),
}


@pytest.mark.parametrize("name", cases(WORDS, "AutoTP, tied"))
def test_ranks_hold_the_words_that_the_plan_counts(name, ground, tmp_path, forks):
    said, sharding = WORDS[name]
    rows = [{"path": "full.jsonl"}]
    data = {"train": rows, "max_length": 8, "eval": rows}
    trainer = {"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 16}
    said = {**said, "data": data, "trainer": trainer, "sharding": sharding}
    said["global_batch_size"] = 16
    for attempt in range(3):  # a busy machine delays a thread of gloo by more than one piece
        out = trained(said, ground, tmp_path / str(attempt), forks, prelude="widths_seen")
        memory = result(out)["memory"]
        if all(peak["measured"] < 1.2 * peak["predicted"] for peak in (memory, memory["eval"])):
            break
    config = said.get("model", {}).get("config", LLAMA)
    part = rank_spec(read_model_spec(name, config, "test"), 2, engine_named(sharding["engine"]))
    head, words = part.head.out_features, part.head.gathered or part.head.out_features
    counted = {"training": words, "evaluation": words, "head": head, "table": part.vocab_size}
    for rank in range(2):
        assert json.loads((out / f"widths-{rank}.json").read_text()) == counted
    # A thread of gloo lets go of what it has gathered when its turn comes.
    late = 4 * 16 * 8 * part.head.gathered
    for peak in (memory, memory["eval"]):
        assert 0.97 * peak["predicted"] < peak["measured"] < 1.03 * peak["predicted"] + late


@pytest.mark.parametrize("stage", cases((0, 2)))
def test_clipping_and_adam_see_the_same_gradients(stage, ground, tmp_path, forks):
    said = {"trainer": {"optim": "adamw_torch", "max_grad_norm": 0.5, "learning_rate": 1e-2}}
    sharding = {**AUTO, "zero_stage": stage}
    one = alone(said, ground, tmp_path / "one", forks)
    parts = trained({**said, "sharding": sharding}, ground, tmp_path / "parts", forks)
    assert column(parts, "loss") == pytest.approx(column(one, "loss"), rel=2e-5)


def test_evaluations_count_each_row_once(ground, tmp_path, forks):
    """Five rows in batches of two: the last one is not full."""
    said = {
        "data": {"train": [{"path": "rows.jsonl"}], "max_length": 32, "eval": [{"path": "five.jsonl"}]},
        "trainer": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2},
    }
    sharding = {**AUTO, "zero_stage": 1}
    one = alone(said, ground, tmp_path / "one", forks)
    parts = trained({**said, "sharding": sharding}, ground, tmp_path / "parts", forks)
    assert column(parts, "eval_loss") == pytest.approx(column(one, "eval_loss"), rel=2e-6)


@pytest.mark.parametrize("stage", cases((0, 2)))
def test_a_killed_run_goes_on_as_if_nothing_had_happened(stage, ground, tmp_path, forks):
    adam = {"optim": "adamw_torch", "learning_rate": 1e-2}
    assert_goes_on({"sharding": {**AUTO, "zero_stage": stage}, "trainer": adam}, ground, tmp_path, forks)


@pytest.mark.slow
def test_the_best_checkpoint_is_what_stays(ground, tmp_path, forks):
    assert_keeps_best({"sharding": {**AUTO, "zero_stage": 1}}, ground, tmp_path, forks)


@pytest.mark.slow
def test_accelerate_puts_no_parts_together_unless_it_is_told_to(ground, tmp_path, forks):
    """Why ds_config.json says so: else the Trainer saves no model, and DeepSpeed's states in its place."""
    out, env = planned({"sharding": {**AUTO, "zero_stage": 1}}, ground, tmp_path / "run", forks)
    file = out / "ds_config.json"
    config = json.loads(file.read_text())
    assert config["zero_optimization"].pop("stage3_gather_16bit_weights_on_model_save") is True
    file.write_text(json.dumps(config))
    forks.run(out, 2, env)
    assert not list((out / "model").glob("*.safetensors"))
