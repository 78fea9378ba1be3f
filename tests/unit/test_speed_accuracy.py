"""How well the speed model ranks what was measured, and the arithmetic of that comparison."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import speed_accuracy  # noqa: E402  (benchmarks is no package)
from comparison import ranks, spearman  # noqa: E402
from records import read_record  # noqa: E402
from speed_accuracy import gpu_correlations  # noqa: E402


def test_equal_values_share_a_rank():
    assert ranks([3.0, 1.0, 3.0, 2.0]) == [3.5, 1.0, 3.5, 2.0]


def test_rank_correlation_looks_at_the_order_alone():
    assert spearman([1, 2, 3, 4], [10, 20, 1000, 1001]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(0.8)
    with pytest.raises(ValueError, match="no rank correlation"):
        spearman([1, 2], [1, 2])


def test_a_gpus_record_is_judged_by_the_predictions_in_it(tmp_path):
    assert gpu_correlations(tmp_path) == []
    rows = [{"name": "matmul", "step_s": 1.0}, {"name": "skipped", "skipped": "no peft"}]
    rows += [{"name": f"row{n}", "step_s": n, "predicted_s": n * n} for n in (1.0, 3.0, 2.0)]
    (tmp_path / "gpu_throughput_one.json").write_text(json.dumps({"device": "H200", "rows": rows}))
    (tmp_path / "gpu_throughput_two.json").write_text(json.dumps({"device": "T4", "rows": rows[:4]}))
    assert gpu_correlations(tmp_path) == [("H200", 3, pytest.approx(1.0))]


def test_rows_that_were_not_measured_are_named():
    record = read_record(speed_accuracy.RECORD)
    del record["seconds"]["wide-b1-s128"]
    with pytest.raises(SystemExit, match="not measured: wide-b1-s128;"):
        speed_accuracy.timed_rows(record)


def test_the_model_ranks_the_record_and_chooses_what_is_fast(monkeypatch, capsys):
    """The targets, on a committed measurement: what changes the model changes what comes out here."""
    monkeypatch.setattr(sys, "argv", ["speed_accuracy.py", "--check"])
    assert speed_accuracy.main() == 0, capsys.readouterr().out
