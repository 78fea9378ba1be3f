"""The text of a finished run: memory predicted and measured, time."""

from __future__ import annotations

import pytest
from reports import result

from launcher.report.result_text import measured_lines, result_text

GIB = 2**30


def pair(predicted, measured):
    return {"predicted": predicted, "measured": measured}


def memory(**changes):
    found = {
        "predicted": 10 * GIB, "measured": 11 * GIB, "method": "cuda-reserved+context", "allocated": 9 * GIB,
        "load": pair(2 * GIB, 2 * GIB), "eval": pair(3 * GIB, None), "save": pair(4 * GIB, 3 * GIB),
        "host": pair(5 * GIB, 6 * GIB),
        "components": {
            "weights": pair(2 * GIB, 2 * GIB), "gradients": pair(GIB, GIB), "optimizer": pair(None, GIB),
            "context": pair(0, 0),
        },
        "device_bytes": None, "tokens": {"planned": 1024, "largest": 1024},
    }  # fmt: skip
    return {**found, **changes}


def test_the_peak_has_its_prediction_error():
    assert measured_lines(memory())[0] == (
        "  memory    predicted 10.00 GiB, measured 11.00 GiB: 10.0% more (cuda-reserved+context)"
    )
    less = measured_lines(memory(measured=9 * GIB))[0]
    assert "measured 9.00 GiB: 10.0% less" in less
    unknown = measured_lines(memory(predicted=None))[0]
    assert "predicted unknown, measured 11.00 GiB (" in unknown


def test_every_part_that_was_measured_has_a_row():
    rows = {line.split()[0]: line.split()[1:] for line in measured_lines(memory())[2:]}
    assert rows["weights"] == ["2.00", "GiB", "2.00", "GiB"]
    assert rows["optimizer"] == ["unknown", "1.00", "GiB"]
    assert rows["saving"] == ["4.00", "GiB", "3.00", "GiB"]
    assert "evaluating" not in rows
    assert "context" not in rows
    assert all(len(line) <= 100 for line in measured_lines(memory()))


def test_shorter_batches_than_planned_are_reported():
    assert not any("longest batch" in line for line in measured_lines(memory()))
    short = measured_lines(memory(tokens={"planned": 1024, "largest": 300}))
    assert short[-1].strip() == "the longest batch had 300 of the 1,024 tokens that were planned for"
    pictures = measured_lines(memory(tokens={"planned": None, "largest": None}))
    assert len(pictures) == len(short) - 1


@pytest.mark.parametrize(
    ("told", "line"),
    [
        ({"resumed_at": 30}, "  steps     40, the last 10 of them in 95 s"),
        ({"resumed_at": 0}, "  steps     40 in 95 s"),
        ({}, "  steps     40 in 95 s"),
    ],
)
def test_the_time_of_a_resumed_run_is_that_of_its_last_steps(told, line):
    rows = {"read": 9, "kept": 9, "truncated": 0, "split": 0, "dropped": 0, "train": 9, "eval": 0}
    assert line in result_text(result(rows=rows, **told), "R", []).splitlines()


ROWS = {"read": 9, "kept": 9, "truncated": 0, "split": 0, "dropped": 0, "train": 9, "eval": 0}


@pytest.mark.parametrize(
    ("step_s", "load", "told", "said"),
    [
        (2.0, 0.5, {}, ""),  # 80 s of 80 s
        (1.4, 0.5, {}, ""),
        (1.0, 0.5, {}, ", 2 times the 40 s that the plan estimated"),
        (
            1.0,
            3.0,
            {},
            ", 2 times the 40 s that the plan estimated; this machine is busy: 3.0 processes per core",
        ),
        (4.0, 3.0, {}, ", 0.5 times the 2 min 40 s that the plan estimated"),
        (8.0, 0.5, {"resumed_at": 30}, ""),  # 80 s for the last 10 steps
        (None, 3.0, {}, ""),
    ],
)
def test_a_time_that_is_not_the_estimated_one_is_explained(step_s, load, told, said):
    lines = result_text(
        result(rows=ROWS, train_seconds=80.0, **told), "R", [], step_s=step_s, load=load
    ).splitlines()
    (line,) = [line for line in lines if line.startswith("  steps  ")]
    assert line.partition(" in 95 s")[2] == said


@pytest.mark.parametrize(("of", "shown"), [(3, ", …"), (1, "")])
def test_adapters_without_a_gradient_have_a_line(of, shown):
    rows = {"read": 9, "kept": 9, "truncated": 0, "split": 0, "dropped": 0, "train": 9, "eval": 0}
    idle = {"count": of, "of": 1200, "steps": 20, "first": ["a.b"]}
    lines = result_text(result(rows=rows, idle_adapters=idle), "R", []).splitlines()
    line = next(line for line in lines if line.startswith("  adapters  "))
    assert f"{of} of 1,200 " in line
    assert line.endswith(f"a.b{shown}")
    none = result_text(result(rows=rows, idle_adapters=None), "R", [])
    assert "  adapters  " not in none
