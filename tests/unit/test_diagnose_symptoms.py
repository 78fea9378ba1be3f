"""Failures that print no error: a hidden nan, a loss that does not move, a step that never comes."""

from __future__ import annotations

import io
import json

import pytest

from launcher.knowledge.diagnose.examine import Examination, diagnose
from launcher.knowledge.diagnose.symptoms import FLAT_ROWS, HANG_S, NOT_A_NUMBER_ROWS
from launcher.knowledge.failures.catalogue import Failure

NAMES = ("nan-shown-as-zero", "labels-all-masked", "fp16-bf16-pretrained", "jit-stale-lock")
REGISTRY = tuple(Failure(name, name, "cause", "mend", "test", ()) for name in NAMES)
RUNNING = "2026-03-01 {clock} - INFO - ***** Running training *****\n"


def symptom(text):
    examination = Examination(REGISTRY)
    examination.read(io.BytesIO(text.encode()), "log", None)
    diagnosis = examination.verdict()
    assert not diagnosis.unknown
    return diagnosis.findings[0].failure.id if diagnosis.findings else None


def step(loss, norm, rate="1e-05"):
    return f"{{'loss': {loss}, 'grad_norm': {norm}, 'learning_rate': {rate}, 'epoch': 0.1}}\n"


@pytest.mark.parametrize("quote", ["", "'"])
@pytest.mark.parametrize(
    ("loss", "norm", "found"),
    [
        ("0.0", "nan", "nan-shown-as-zero"),
        ("nan", "nan", "nan-shown-as-zero"),
        ("0.0", "0.0", "labels-all-masked"),
        ("0.0", "0.7", None),
        ("0.5", "nan", None),
    ],
)
def test_losses_that_are_no_numbers(loss, norm, found, quote):
    row = step(quote + loss + quote, quote + norm + quote)
    assert symptom(row * NOT_A_NUMBER_ROWS) == found
    assert symptom(row * (NOT_A_NUMBER_ROWS - 1)) is None
    assert symptom(row * NOT_A_NUMBER_ROWS + step("1.5", "0.7")) is None


def test_a_loss_that_became_zero_was_not_masked_from_the_start():
    assert symptom(step("1.5", "0.7") + step("0.0", "0.0") * 5) == "nan-shown-as-zero"


def test_a_nan_counts_although_the_run_ends_in_success():
    assert (
        symptom(step("0.0", "nan") * 5 + "{'train_runtime': 3.0, 'train_loss': 0.0}\n") == "nan-shown-as-zero"
    )


def test_a_loss_that_does_not_move():
    rows = [step("2.3026", "0.01")] * FLAT_ROWS
    assert symptom("".join(rows)) == "loss-flat"
    assert symptom("".join(rows[1:])) is None
    assert symptom("".join([*rows[1:], step("2.3031", "0.01")])) is None
    assert symptom("".join(step("2.3026", "0.01", "0.0") for _ in rows)) is None


def test_every_step_skipped_for_overflow():
    skipped = "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536\n"
    assert symptom(skipped * 40 + step("0.0", "nan")) == "fp16-bf16-pretrained"
    assert symptom(skipped * 10 + step("1.5", "0.5")) is None


def test_a_first_step_that_never_comes():
    begun = RUNNING.format(clock="10:00:00")
    assert symptom(begun + "2026-03-01 10:31:00 - INFO - still here\n") == "no-step"
    assert symptom(begun + "2026-03-01 10:20:00 - INFO - still here\n") is None
    assert symptom(begun) is None
    assert symptom(begun + step("1.0", "0.5") + "2026-03-01 11:31:00 - INFO - still here\n") is None
    assert HANG_S == 1800


def test_a_first_step_that_waits_for_a_build():
    text = (
        RUNNING.format(clock="10:00:00")
        + "2026-03-01 10:40:00 Using /c/torch as PyTorch extensions root...\n"
    )
    assert symptom(text) == "jit-stale-lock"


def test_the_metrics_of_a_run_directory(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "logs").mkdir()
    rows = [{"step": n, "loss": 0.0, "grad_norm": None if n < 2 else "nan"} for n in range(6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{half")
    (finding,) = diagnose([str(tmp_path)], REGISTRY).findings
    assert finding.failure.id == "nan-shown-as-zero"
    assert (finding.error.file, finding.error.line) == (str(tmp_path / "metrics.jsonl"), 3)
