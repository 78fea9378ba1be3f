"""Each task learns what the library's own Trainer learns, started by a plain script on the same rows.

20 steps of two micro-batches, over an epoch that ends with a step of one. Our side is a recipe, planned and
run by a worker. Losses are compared step by step, and the trained weights at the end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cases import cases

pytest.importorskip("torch")

import torch

sys.path.insert(0, str(Path(__file__).parent))
from engine_runs import column, weights
from library_cases import CASES, SEED, TRAINER, make_ground, make_run

USUAL = ("causal-lm", "seq2seq-lm", "token-classification", "dpo", "kto", "embedding", "reranker")


@pytest.mark.parametrize("name", cases(CASES, *USUAL))
def test_losses_are_those_of_the_library(name, tmp_path, monkeypatch):
    from launcher.train.job import read_job
    from launcher.train.worker import train

    case = CASES[name]
    pytest.importorskip(case.package.replace("-", "_"))
    make_ground(case, tmp_path)
    for key, value in make_run(case, tmp_path, tmp_path / "ours", save_strategy="no").items():
        monkeypatch.setenv(key, value)
    train(read_job(tmp_path / "ours"))
    losses, trained = column(tmp_path / "ours", "loss"), weights(tmp_path / "ours")

    args = {
        **TRAINER, "output_dir": str(tmp_path / "plain"), "seed": SEED, "use_cpu": True, "disable_tqdm": True,
        "save_strategy": "no", "dataloader_pin_memory": False, **case.plain_args,
    }  # fmt: skip
    plain = case.plain(tmp_path / "model", case.rows, args)
    plain.train()
    expected = [row["loss"] for row in plain.state.log_history if "loss" in row]
    assert len(expected) == len(losses) == TRAINER["max_steps"]
    assert len(set(expected)) > 10, "there was something to learn"
    assert losses == pytest.approx(expected, rel=case.differs)
    plain.save_model(str(tmp_path / "plain" / "model"))  # under the names of a checkpoint
    state = weights(tmp_path / "plain")
    assert trained.keys() == state.keys() != set()
    for key, tensor in trained.items():
        torch.testing.assert_close(tensor, state[key], rtol=1e-3, atol=2e-5, msg=key)
    result = json.loads((tmp_path / "ours" / "result.json").read_text())
    assert result["rows"]["kept"] == len(case.rows)
