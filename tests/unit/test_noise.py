"""What of the libraries' words is shown: nothing that is dealt with, everything else once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from every import every

from launcher.execute.output import _Filter
from launcher.knowledge.failures.catalogue import FAILURES
from launcher.knowledge.failures.noise import SIGNS_OF, is_noise

HEALTHY = Path(__file__).resolve().parents[1] / "corpus" / "healthy"
WITHOUT_A_TRAINER = (
    "code-that-quotes", "compiler", "empty", "generation", "git", "json", "nginx", "pip-not-found",
    "pip-satisfied", "plain-torch-loop", "plan", "pytest", "pytest-failing", "readme-that-quotes",
    "shell-trace",
)  # fmt: skip


def lines_of(name):
    """As `Output` sees them: of a bar what it shows last."""
    raw = (HEALTHY / f"{name}.log").read_bytes().split(b"\n")
    return [line.decode(errors="replace").rstrip("\r").rpartition("\r")[2] for line in raw]


def shown(lines):
    found = _Filter()
    return [line for line in lines if found.shows(line)]


@pytest.mark.parametrize("name", WITHOUT_A_TRAINER)
def test_other_programs_words_are_all_shown(name):
    lines = lines_of(name)
    assert [line for line in lines if is_noise(line)] == []
    warnings = len(lines) - len(shown(lines))
    assert warnings == 0


TRAINERS = sorted(path.stem for path in HEALTHY.glob("*.log") if path.stem not in WITHOUT_A_TRAINER)


@every("name", TRAINERS)
def test_of_a_training_neither_rows_nor_bars_are_shown(name):
    left = shown(lines_of(name))
    assert not [line for line in left if re.match(r"\{'(?:loss|eval_loss)'.*'epoch'", line)]
    assert not [line for line in left if re.search(r"\d%\|.*it/s\]$", line)]
    assert not [line for line in left if "Setting accelerator to CPU" in line]


def test_a_deepspeed_run_has_little_left():
    left = [line for line in shown(lines_of("deepspeed-zero3")) if line.strip()]
    assert len(left) <= 12, left


def test_a_users_own_words_are_shown():
    for line in (
        "{'input_ids': [5, 6], 'attention_mask': [1, 1]}",
        "{'loss': 3.0}",
        "100% of the rows are fine",
        "[2026-11-22 05:04:39,118] [WARNING] [engine.py:1:f] something odd",
        "[2026-11-22 05:04:39,118] [ERROR] [launch.py:1:f] something odd",
    ):
        assert not is_noise(line), line


def test_a_warning_that_nobody_knows_is_shown_once_and_without_its_code():
    text = [
        "/x/train.py:13: RuntimeWarning: this path is slow",
        "  warnings.warn('this path is slow')",
        "step one",
        "  an indented line of the user's",
        "/x/train.py:13: RuntimeWarning: this path is slow",
        "  warnings.warn('this path is slow')",
        "[2026-11-22 05:04:39,118] [WARNING] [engine.py:1:f] rank 0 is odd",
        "[2026-11-22 05:04:39,999] [WARNING] [engine.py:1:f] rank 1 is odd",
    ]
    assert shown(text) == [text[0], text[2], text[3], text[6]]


def test_a_step_that_deepspeed_skips_is_said_once():
    head = "[2026-11-22 05:04:39,118] [INFO] [loss_scaler.py:273:update_scale] "
    text = [
        head + "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768",
        head + "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 32768, reducing to 16384",
        "[2026-11-22 05:04:39,118] [INFO] [logging.py:107:log_dist] [Rank 0] Creating fp16 optimizer",
        "[2026-11-22 05:04:39,118] [INFO] [fused_optimizer.py:426:f] Grad overflow on iteration: 3",
    ]
    assert shown(text) == [text[0], text[3]]


def test_the_line_of_code_goes_with_a_warning_that_is_known():
    text = [
        "/v/modeling_utils.py:3303: FutureWarning: `is_gradient_checkpointing` is deprecated",
        "  warnings.warn(",
        "Preparing train data: 64 rows, 1 rows/s",
    ]
    assert shown(text) == text[2:]


def test_signs_that_are_left_out_are_handled():
    known = {failure.id: failure for failure in FAILURES}
    for name in SIGNS_OF:
        assert known[name].signs
        assert {kind for kind, _ in known[name].handled()} & {"fix", "worker"}, name
