"""The coverage of model types: its record is of the installed types, and its checks can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import coverage as model_coverage  # noqa: E402  (benchmarks is no package)

RECORD = json.loads(model_coverage.RECORD.read_text(encoding="utf-8"))


def test_the_record_has_every_type_of_the_installed_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    assert set(RECORD["causal_lm"]) == set(NAMES)
    found = model_coverage.summary(RECORD["causal_lm"])
    assert {key: RECORD["summary"]["causal_lm"][key] for key in found} == found
    assert "/tmp/" not in json.dumps(RECORD)


@pytest.mark.parametrize(
    ("kind", "planned", "apart"), [("llama", "closed-form", True), ("lfm2", "trace", False)]
)
def test_a_type_is_tried_with_the_launchers_own_code(kind: str, planned: str, apart: bool) -> None:
    """LFM2's convolutions carry a document's last tokens into the next one."""
    script = [sys.executable, str(ROOT / "benchmarks" / "coverage.py"), kind]
    ran = subprocess.run(script, capture_output=True, text=True, timeout=300, check=True)
    last = json.loads(ran.stdout.splitlines()[-1])
    assert (last["types"], last["whole"]) == (1, 1)
    assert (last["sdpa"] == 1, last["varlen"] == 1) == (apart, apart)
    assert f"planned {planned}" in ran.stdout
