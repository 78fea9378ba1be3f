"""The record that the planner reads is still true: types of it are run again, and its checks can fail."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from launcher.inputs import model_trace
from launcher.models import memory_trace
from launcher.models.model_types import found

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import coverage as model_coverage

pytestmark = pytest.mark.filterwarnings("ignore")
"""Of models that are not ours."""
RECORD = json.loads(model_coverage.RECORD.read_text(encoding="utf-8"))["causal_lm"]
PASSED = [(kind, field) for kind, row in RECORD.items() for field in model_coverage.CHECKS if row.get(field)]
SAMPLE = random.Random(23).sample(PASSED, 24)
LEAKS = [("lfm2", "eager"), ("llama4_text", "sdpa"), ("doge", "sdpa"), ("opt", "sdpa"), ("mamba", "varlen")]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(kind: str, field: str) -> None:
    model_coverage.CHECKS[field](model_coverage.small_config(kind))


@pytest.mark.parametrize(("kind", "field"), SAMPLE)
def test_a_type_still_passes_what_the_record_says(kind: str, field: str) -> None:
    assert field == "chunked" or field in found(kind).apart
    check(kind, field)


@pytest.mark.slow(share=10)
@pytest.mark.parametrize(("kind", "field"), [one for one in PASSED if one not in SAMPLE])
def test_every_type_still_passes_what_the_record_says(kind: str, field: str) -> None:
    check(kind, field)


@pytest.mark.parametrize(("kind", "field"), LEAKS)
def test_documents_that_see_each_other_are_noticed(kind: str, field: str) -> None:
    """Convolutions, states, places counted from the start of the row, keys that are chosen from all of it."""
    assert field not in found(kind).apart
    with pytest.raises(ValueError, match=r"logits differ by|has no attention"):
        check(kind, field)


def test_a_switch_that_changes_the_verdict_is_in_the_record() -> None:
    """Qwen2-MoE keeps its window from the kernel; Gemma 3 may cap its logits."""
    small = model_coverage.small_config("qwen2_moe")
    needed = model_coverage.needs(small, model_coverage.CHECKS["varlen"])
    assert needed == found("qwen2_moe").needs["varlen"] == {"layer_types": ["full_attention"]}
    assert found("gemma3_text").needs["chunked"]["final_logit_softcapping"] == [None]


@pytest.mark.parametrize("kind", ["afmoe", "stablelm"])
def test_a_type_with_padding_free_batches_and_the_chunked_loss_is_traced_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """AFMoE hands its mask to the kernel by name."""
    for module in (memory_trace, model_trace):
        monkeypatch.setattr(module, "ask_child", module.ask_child)  # the coverage answers in its own process
    plans: list[dict[str, Any]] = []
    small = model_coverage.small_config(kind)
    assert model_coverage.plan(tmp_path, small, plans, model_coverage.TEXT) == "trace"
    settings = {name: setting["value"] for name, setting in plans[0]["settings"].items()}
    decided = [settings[name] for name in ("model.attn_implementation", "data.padding_free", "model.loss")]
    assert decided == ["varlen", True, "chunked"]
