"""The figures of a finished run: memory predicted and measured, time, adapters; and their text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from reports import result

from launcher.execute.record import RunRecord
from launcher.report.memory_sections import memory_section
from launcher.report.result_text import result_text
from launcher.report.run_sections import FACTS, FIRST, run_rows
from launcher.report.sections import Figure, line

GIB = 2**30
ROWS = {"read": 9, "kept": 9, "truncated": 0, "split": 0, "dropped": 0, "train": 9, "eval": 0}


def record(step_s=None, **changes) -> RunRecord:
    time = {"likely": {"seconds_per_step": step_s}}
    return RunRecord("a", "finished", {"time": time}, run_dir="R", result=result(rows=ROWS, **changes))


def row(name, made, load=0.0):
    return next((row for row in run_rows(made, load) if row.name == name), None)


def figures(parts):
    return [(part.value, part.unit) for part in parts if isinstance(part, Figure)]


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


def tables(**changes):
    """Name of a row -> predicted, measured, without a plan beside."""
    section = memory_section({}, {"memory": memory(**changes)})
    state, moment = section.blocks[0].blocks[1:]
    return {
        row[0]: [getattr(cell, "value", None) for cell in row[1:3]] for row in (*state.rows, *moment.rows)
    }


def test_the_peak_has_its_prediction_and_its_error():
    peak = row("peak memory", record(memory=memory()))
    assert figures(peak.value) == [(11 * GIB, "bytes")]
    assert figures(peak.note) == [(10 * GIB, "bytes")]
    assert "+10.0" in line(peak.note)
    assert figures(row("peak memory", record(memory=memory(predicted=None))).note) == []


def test_every_part_that_was_measured_has_a_row():
    found = tables()
    assert found["weights"] == [2 * GIB, 2 * GIB]
    assert found["optimizer"] == [None, GIB]
    assert found["saving"] == [4 * GIB, 3 * GIB]
    assert found["evaluating"] == [3 * GIB, None]
    assert "context" not in found


def test_the_longest_batch_is_compared_with_the_planned_one():
    def told(tokens):
        return figures(memory_section({}, {"memory": memory(tokens=tokens)}).blocks[-1].items[-1])

    assert told({"planned": 1024, "largest": 300}) == [(300, "count"), (1024, "count")]
    assert told({"planned": None, "largest": None}) == []


@pytest.mark.parametrize(("told", "own"), [({"resumed_at": 30}, [10]), ({"resumed_at": 0}, []), ({}, [])])
def test_the_steps_of_a_resumed_run_are_told_from_those_before(told, own):
    steps = row("steps", record(**told))
    assert figures(steps.value) == [(40, "count")]
    assert [value for value, _ in figures(steps.note)] == own


@pytest.mark.parametrize(
    ("step_s", "load", "told", "ratio", "busy"),
    [
        (2.0, 0.5, {}, None, False),  # 80 s of 80 s
        (1.4, 0.5, {}, None, False),
        (1.0, 0.5, {}, "2 times the 40 s", False),
        (1.0, 3.0, {}, "2 times the 40 s", True),
        (4.0, 3.0, {}, "0.5 times the 2 min 40 s", False),
        (8.0, 0.5, {"resumed_at": 30}, None, False),  # 80 s for the last 10 steps
        (None, 3.0, {}, None, False),
    ],
)
def test_a_time_that_is_not_the_estimated_one_is_explained(step_s, load, told, ratio, busy):
    note = line(row("time", record(step_s, train_seconds=80.0, **told), load).note)
    assert ("that the plan estimated" in note) is (ratio is not None)
    assert (ratio or "") in note
    assert ("busy: 3.0 processes" in note) is busy


@pytest.mark.parametrize(("of", "shown"), [(3, ", …"), (1, "")])
def test_adapters_without_a_gradient_have_a_row(of, shown):
    idle = {"count": of, "of": 1200, "steps": 20, "first": ["a.b"]}
    text = line(row("adapters", record(idle_adapters=idle)).value)
    assert f"{of} of 1,200 " in text
    assert text.endswith(f"a.b{shown}")
    assert row("adapters", record(idle_adapters=None)) is None


def test_the_text_has_every_figure_and_the_memory():
    made = record(adaptations=[{"step": 3, "reason": "no memory", "changed": {"a": [2, 1]}}])
    lines = result_text(made, ["effilaunch", "generate", "R"]).splitlines()
    assert lines[0] == "done"
    names = {row.name for row in run_rows(made)} | {"try it", "memory of each device"}
    assert all(any(shown.strip().startswith(name) for shown in lines) for name in names)
    assert any("a: 2 → 1" in shown for shown in lines)


def test_every_described_figure_has_a_row_where_it_is_known():
    full = record(
        memory_footprint=GIB, optimizer="adamw", processes=2, trainable_params=10, total_params=20,
        checkpoints={"saved": 2, "bytes": GIB, "seconds": 1.5, "skipped": [8]},
        idle_adapters={"count": 1, "of": 9, "steps": 20, "first": ["a"]},
        mirror={"checkpoints": [{"step": 5}], "result": True, "url": "s3://x"},
        rollouts={"first": 0.1, "last": 0.2, "groups": 9, "groups_without_signal": 1, "completions": 18,
                  "seconds": 3.0, "warnings": ["short"]},
    )  # fmt: skip
    full = replace(full, restarts=[{"step": 1}], state="stopped", checkpoints=["checkpoint-5"])
    known = {fact.name for fact in (*FIRST, *FACTS)} - {"memory predicted", "{output}"} | {"model", "WARNING"}
    assert known <= {row.name for row in run_rows(full)}
    unmeasured = RunRecord("a", "planned", {"memory": {"total": GIB}})
    assert row("memory predicted", unmeasured) is not None
