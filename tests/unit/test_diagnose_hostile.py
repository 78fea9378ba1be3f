"""Logs and run directories that are broken, or made to take long: a verdict all the same, and soon."""

from __future__ import annotations

import io
import json

import pytest
from counted_work import LINEAR, TIMES, cpu_growth

from launcher.errors import RecipeError
from launcher.knowledge.diagnose.examine import Examination, diagnose
from launcher.knowledge.failures.catalogue import FAILURES
from launcher.report.diagnosis_sections import diagnosis_text

DEEP = "[" * 100_000
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    main()\n'


def see(text):
    examination = Examination(FAILURES)
    examination.read(io.BytesIO(text.encode("utf-8", "surrogatepass")), "log", None)
    return examination.verdict()


@pytest.mark.parametrize(
    "line",
    [
        '{"level": "INFO Error", "message": ' + "[" * 7000 + "]" * 7000 + "}",
        f'  File "train.py", line {"9" * 5000}, in main',
        '{"level": "error", "message": "Error \\ud800"}',
        '{"level": "error", "message": "Traceback (most recent call last):\\n Error \\ud800"}',
    ],
)
def test_a_line_that_cannot_be_read_is_passed_over(line):
    diagnosis = see(f"{line}\n{TRACEBACK}torch.OutOfMemoryError: CUDA out of memory.\n")
    assert diagnosis.findings[0].failure.id == "cuda-oom"
    diagnosis_text(diagnosis).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("environment.json", '{"bound": {"log_bytes": {"rank-0.log": 1e999}}}'),
        ("environment.json", DEEP),
        ("logs/error-2.json", DEEP),
        ("metrics.jsonl", '{"loss": "x"}\n{"loss": ' + "9" * 401 + "}\n" + DEEP),
    ],
)
def test_a_file_of_a_run_directory_that_cannot_be_read_is_passed_over(tmp_path, name, content):
    (tmp_path / "logs").mkdir()
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "logs" / "rank-0.log").write_text(TRACEBACK + "KeyError: 'prompt'\n")
    (tmp_path / name).write_text(content)
    (unknown,) = diagnose([str(tmp_path)], FAILURES).unknown
    assert unknown.error.type == "KeyError"


def test_a_run_directory_in_which_nothing_ran_is_said_to_be_one(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(RecipeError, match="no logs"):
        diagnose([str(tmp_path)], FAILURES)


def test_a_logs_control_characters_do_not_reach_the_terminal():
    text = diagnosis_text(see(TRACEBACK + "KeyError: a\x07b\u202ec\x9bd\n"))
    assert all(c.isprintable() or c == "\n" for c in text)
    assert "\\x07" in text


WORDS = [
    "a", "libbitsandbytes_a", "out of memory. Tried to allocate x", "AssertionErrorx ", "wandba",
    "Target modules x", "validation errors for DeepSpeed x",
]  # fmt: skip


@pytest.mark.parametrize("word", WORDS)
def test_a_long_message_takes_no_long_time(word):
    def log(letters: int) -> str:
        return TRACEBACK + "RuntimeError: " + f"{(word * letters)[:letters]}\n" * 40

    assert cpu_growth(see, log, 4000) < 3 * TIMES  # TIMES squared if quadratic


@pytest.mark.parametrize("unit", ["{'loss': 1", '{"level": ', "1% |", "[rank1]: ", "Error: ", "AaError"])
def test_long_lines_take_no_long_time(unit):
    def log(letters: int) -> str:
        return ((unit * letters)[:letters] + " Error exit loss'\n") * 20

    assert cpu_growth(see, log, 4000) < 3 * TIMES  # TIMES squared if quadratic


def test_many_chained_tracebacks_take_no_long_time():
    link = "During handling of the above exception, another exception occurred:"

    def log(count: int) -> str:
        text = "".join(f"{TRACEBACK}RuntimeError: step {json.dumps(n)}\n\n{link}\n\n" for n in range(count))
        return text + TRACEBACK + "KeyError: 'prompt'\n"

    assert cpu_growth(see, log, 500) < LINEAR
