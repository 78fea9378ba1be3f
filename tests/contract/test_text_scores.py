"""Regression and several labels a row, from the recipe to eval, generate and merge; real tiny models."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cases import cases

pytest.importorskip("torch")

import torch
from launched import effilaunch

sys.path.insert(0, str(Path(__file__).parent))
from engine_runs import result as result_of
from engine_runs import weights
from library_cases import CASES, make_ground
from plans import generate

pytestmark = pytest.mark.usefixtures("warm")
RECIPE = """\
task: sequence-classification
model: {{name_or_path: model}}
{adapter}
data:
  train: [{{path: rows.jsonl}}]
  eval: [{{path: eval.jsonl}}]
  max_length: 32
  problem_type: {kind}
  metrics: [{metrics}]
precision: {precision}
trainer: {{max_steps: 6, per_device_train_batch_size: 4, learning_rate: 1.0e-3, logging_steps: 1,
          save_strategy: 'no', eval_strategy: steps, eval_steps: 3}}
"""
LORA = "adapter: {type: lora, r: 4}"


def run(folder: Path, name: str, kind: str, metrics: str, adapter: str = "", precision: str = "fp32") -> Path:
    make_ground(CASES[f"sequence-classification, {name}"], folder)
    said = RECIPE.format(kind=kind, metrics=metrics, adapter=adapter, precision=precision)
    (folder / "r.yaml").write_text(said)
    out = folder / "out"
    result = effilaunch("run", folder / "r.yaml", "--on", "cpu", "--output-dir", out)["result"]
    again = effilaunch("eval", out)["metrics"]
    for metric in metrics.split(", "):
        assert again[metric] == pytest.approx(result["eval"][f"eval_{metric}"], rel=1e-4, abs=1e-6), metric
    return out


@pytest.mark.slow
def test_regression_with_an_adapter(tmp_path):
    out = run(tmp_path, "regression", "regression", "mse, mae, r2, pearson, spearman", LORA)
    row = json.loads((tmp_path / "eval.jsonl").read_text().splitlines()[0])
    found = effilaunch("generate", out, row["text"])
    assert float(generate(out, row["text"])) == pytest.approx(float(found["text"]), abs=1e-3)
    merged = tmp_path / "merged"
    effilaunch("merge", out, "--output", merged)
    config = json.loads((merged / "config.json").read_text())
    assert (config["problem_type"], config["id2label"]) == ("regression", {"0": "LABEL_0"})
    from transformers import pipeline

    (answer,) = pipeline("text-classification", str(merged), device="cpu")(row["text"])
    assert answer["score"] == pytest.approx(float(found["text"]), abs=1e-3), "the number, without a sigmoid"
    card = (out / "adapter" / "README.md").read_text()
    assert "regression" in card


def test_several_labels(tmp_path):
    out = run(tmp_path, "multi-label", "multi_label_classification", "accuracy, f1, f1_micro")
    # 12 rows of training are those of the evaluation.
    rows = CASES["sequence-classification, multi-label"].rows
    without = sum(not row["label"] for row in [*rows, *rows[:12]])
    assert result_of(out)["rows"]["notes"] == {"without-label": without}
    config = json.loads((out / "model" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    assert config["id2label"] == {"0": "a", "1": "b", "2": "c"}
    assert weights(out)["classifier.weight"].shape == torch.Size([3, 32])
    shares = [line.split("\t") for line in generate(out, "w1 w22").splitlines()]
    from transformers import pipeline

    (every,) = pipeline("text-classification", str(out / "model"), device="cpu", top_k=None)(["w1 w22"])
    applying = {one["label"]: one["score"] for one in every if one["score"] >= 0.5}
    if applying:
        assert {name: float(share) for name, share in shares} == pytest.approx(applying, abs=1e-3)
    else:
        assert "no label reaches 0.5" in shares[0][0]


@pytest.mark.parametrize("precision", cases(("bf16", "bf16-true")))
def test_scores_in_sixteen_bits(tmp_path, precision):
    run(tmp_path, "regression", "regression", "mse", precision=precision)


@pytest.mark.parametrize("kind", cases(("regression", "multi_label_classification"), "regression"))
def test_a_rehearsal_makes_up_such_rows(tmp_path, kind):
    make_ground(CASES["sequence-classification, regression"], tmp_path)
    said = RECIPE.format(kind=kind, metrics="", adapter="", precision="fp32")
    (tmp_path / "r.yaml").write_text(said)
    out = tmp_path / "out"
    effilaunch("run", tmp_path / "r.yaml", "--tiny", "--output-dir", out)
    assert json.loads((out / "model" / "config.json").read_text())["problem_type"] == kind


def test_a_list_of_scores_without_the_key_is_refused_with_its_line(tmp_path):
    make_ground(CASES["sequence-classification, multi-label"], tmp_path)
    said = RECIPE.format(kind="null", metrics="", adapter="", precision="fp32")
    (tmp_path / "r.yaml").write_text(said)
    out = tmp_path / "out"
    found = effilaunch("run", tmp_path / "r.yaml", "--on", "cpu", "--output-dir", out, expect=2)
    assert [(p["code"], p["line"], p["path"]) for p in found["errors"]] == [
        ("bad-row", 1, "data.problem_type")
    ]
