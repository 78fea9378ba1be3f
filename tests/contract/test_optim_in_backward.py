"""Weights that are updated in the backward pass learn what they learn after it, to the last bit."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from engine_runs import column, make_ground, planned, trained
from forked import KILL, Forks

if not find_spec("torch"):  # not imported here: that takes long
    pytest.skip("the training stack is not installed", allow_module_level=True)

FULL: dict[str, Any] = {
    "global_batch_size": 4,
    "trainer": {"optim": "adamw_torch", "learning_rate": 1e-2, "weight_decay": 0.1},
}
IN_BACKWARD = {"optim_in_backward": True}
RUNS: dict[str, dict[str, Any]] = {
    "recomputed": {"trainer": {"activation_checkpointing": True}},
    **{optim: {"trainer": {"optim": optim}} for optim in (
        "adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "adafactor", "sgd",
    )},
    "tied": {"model": {"name_or_path": "tied", "tokenizer": "tokenizer"}},
    "bf16": {"precision": "bf16"},
    "bf16-true": {"precision": "bf16-true"},
}  # fmt: skip
QUICK = ("paged_adamw_8bit",)


@pytest.fixture(scope="module")
def ground(tmp_path_factory) -> Path:
    folder = make_ground(tmp_path_factory.mktemp("ground"))
    tied = make_ground(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)
    (tied / "model").rename(folder / "tied")
    return folder


def said(name: str, **more: Any) -> dict[str, Any]:
    run = RUNS[name]
    return {**FULL, **run, "trainer": {**FULL["trainer"], **run.get("trainer", {})}, **more}


def weights(out: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(out / "model" / "model.safetensors")


def assert_same(one: Path, two: Path) -> None:
    import torch

    found, expected = weights(two), weights(one)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert column(two, "loss") == column(one, "loss")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RUNS]
)
def test_it_learns_the_same_with_one_gradient_at_a_time(name, ground, tmp_path, forks: Forks):
    after = trained(said(name), ground, tmp_path / "after", forks, world=0)
    within = trained(said(name, sharding=IN_BACKWARD), ground, tmp_path / "within", forks, world=0)
    assert_same(after, within)
    assert min(column(within, "grad_norm")) > 0
    half = 1e-2 if "true" in name else 1e-5
    assert column(within, "grad_norm") == pytest.approx(column(after, "grad_norm"), rel=half)
    measured = json.loads((within / "result.json").read_text())["memory"]["components"]["gradients"]
    width = 2 if "true" in name else 4
    assert measured == {"predicted": width * 1024 * 64, "measured": width * 1024 * 64}, "of the embedding"


def test_a_killed_run_goes_on_to_the_last_bit(ground, tmp_path, forks: Forks):
    kept = said("paged_adamw_8bit", sharding=IN_BACKWARD)
    straight = trained(kept, ground, tmp_path / "straight", forks, world=0)
    out, env = planned(kept, ground, tmp_path / "killed", forks, world=0)
    ended = forks.run(out, 0, {**env, KILL: "3"})
    assert ended.codes == (-9,), ended.said
    ended = forks.run(out, 0, {**env, "EFFILAUNCH_RESUME": "auto"})
    assert ended.codes == (0,), ended.said
    assert_same(straight, out)
