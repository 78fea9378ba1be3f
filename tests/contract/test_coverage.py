"""The coverage of model types: its record is of the installed types, and its checks can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cases import cases

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import coverage as model_coverage  # noqa: E402  (benchmarks is no package)

RECORD = json.loads(model_coverage.RECORD.read_text(encoding="utf-8"))


@pytest.mark.parametrize("part", ["causal_lm", "image_text_to_text"])
def test_the_record_has_every_type_of_the_installed_transformers(part: str) -> None:
    from transformers.models.auto import modeling_auto

    assert set(RECORD[part]) == set(getattr(modeling_auto, f"MODEL_FOR_{part.upper()}_MAPPING_NAMES"))
    found = model_coverage.summary(RECORD[part])
    assert {key: RECORD["summary"][part][key] for key in found} == found
    assert "/tmp/" not in json.dumps(RECORD)


def test_rows_of_some_types_leave_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps({**RECORD, "image_text_to_text": {"llava": {"type": "llava"}}}))
    monkeypatch.setattr(model_coverage, "RECORD", path)
    model_coverage.write(
        "image_text_to_text", {"aria": {"planned": "trace", "trained": [1.0]}}, {"torch": "x"}
    )
    written = json.loads(path.read_text())
    assert written["causal_lm"] == RECORD["causal_lm"]
    assert list(written["image_text_to_text"]) == ["aria", "llava"]
    counts = written["summary"]["image_text_to_text"]
    assert (counts["types"], counts["trained"], counts["whole"]) == (2, 1, 0)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    "kind", cases(["llava_next", "idefics2", "paligemma", "granite4_vision"], "idefics2")
)
def test_a_type_of_images_and_text_is_tried(kind: str) -> None:
    """No table has their processors; Idefics2's does not tell what it writes for an image, PaliGemma's has
    more tokens than other small models and refuses a text alone, Granite's images enter several layers.
    """
    script = [sys.executable, str(ROOT / "benchmarks" / "coverage.py"), "--images", kind]
    ran = subprocess.run(script, capture_output=True, text=True, timeout=300, check=True)
    last = json.loads(ran.stdout.splitlines()[-1])
    assert (last["types"], last["trained"], last["whole"]) == (1, 1, 1), ran.stdout


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("kind", "planned", "apart"),
    cases(
        [("llama", "closed-form", True), ("lfm2", "trace", False), ("qwen4_exp_text", "trace", False)],
        ("lfm2", "trace", False),
    ),
)
def test_a_type_is_tried_with_the_launchers_own_code(kind: str, planned: str, apart: bool) -> None:
    """LFM2's convolutions carry a document's last tokens into the next one."""
    script = [sys.executable, str(ROOT / "benchmarks" / "coverage.py"), kind]
    ran = subprocess.run(script, capture_output=True, text=True, timeout=300, check=True)
    last = json.loads(ran.stdout.splitlines()[-1])
    assert (last["types"], last["whole"]) == (1, 1)
    assert (last["sdpa"] == 1, last["varlen"] == 1) == (apart, apart)
    assert f"planned {planned}" in ran.stdout
