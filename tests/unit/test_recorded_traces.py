"""Recorded answers of the tracing process: each is used for what it was asked, and for nothing else."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from launcher.models import recorded_traces
from launcher.models.recorded_traces import line_of, packed, read_records, recorded, surroundings

ASKED = {"ask": "trace", "config": {"model_type": "x"}, "batches": [1, 2]}
MOMENT = {
    "segment": "step/start", "gradients": [1.0, 0.0], "activations": [0.5, 2.0], "logits": [0.0, 0.0],
    "temporary": [0.0, 4.0],
}  # fmt: skip
ANSWER = {
    "moments": [MOMENT], "states": {"weights": 8.0}, "depths": [4], "versions": {"torch": "2"},
    "fragmentation": None,
}  # fmt: skip


class Child:
    """Counts what it is asked; `replays` are not kept."""

    def __init__(self, answer=ANSWER):
        self.asked, self.answer, self.said = 0, answer, []

    def __call__(self):
        self.asked += 1
        return {**self.answer, "replays": [{"sizes": [1], "events": [0]}]}

    def about(self, asked=ASKED, python=sys.executable):
        return recorded(asked, python, self, self.said.append)


def own_files() -> list[Path]:
    return list((Path(os.environ["EFFILAUNCH_CACHE"]) / "traces").glob("*"))


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    path = tmp_path / "shipped.jsonl"
    monkeypatch.setattr(recorded_traces, "SHIPPED", path)
    return path


def test_each_request_is_traced_once(shipped):
    child = Child()
    for _ in range(2):
        assert child.about() == ANSWER
    assert (child.asked, len(own_files())) == (1, 1)
    child.about({**ASKED, "batches": [1, 3]})
    assert child.asked == 2


def test_the_versions_of_another_interpreter_are_not_known(shipped):
    child = Child()
    for _ in range(2):
        child.about(python="/usr/bin/other")
    assert (child.asked, own_files()) == (2, [])


def test_a_failure_is_not_kept(shipped):
    def fail():
        raise ValueError("data dependent")

    with pytest.raises(ValueError, match="data dependent"):
        recorded(ASKED, sys.executable, fail, print)
    assert own_files() == []


@pytest.mark.parametrize("folder", [recorded_traces.TRAIN, recorded_traces.TRACER], ids=["own", "shipped"])
def test_a_changed_module_of_the_worker_makes_records_stale(folder, shipped, monkeypatch):
    child = Child()
    if folder == recorded_traces.TRACER:
        shipped.write_text(line_of("trace", ASKED, packed(ANSWER), surroundings(folder)))
    else:
        child.about()
    before = child.asked
    child.about()
    assert child.asked == before
    monkeypatch.setattr(recorded_traces, "surroundings", lambda _folder: "another tracer")
    child.about()
    assert child.asked == before + 1


def test_surroundings_are_every_module_and_the_versions(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.py").write_text("1")
    found = [surroundings(tmp_path)]
    surroundings.cache_clear()
    (tmp_path / "model" / "a.py").write_text("2")
    found.append(surroundings(tmp_path))
    surroundings.cache_clear()
    (tmp_path / "model" / "a.py").write_text("from launcher.plan import settings\n2")
    assert surroundings(tmp_path) == found[-1]  # a module of ours has moved
    surroundings.cache_clear()
    monkeypatch.setattr(recorded_traces, "installed_version", lambda name: f"0 of {name}")
    found.append(surroundings(tmp_path))
    surroundings.cache_clear()
    assert len(set(found)) == 3


@pytest.mark.parametrize("where", ["own", "shipped"])
def test_a_record_that_was_edited_is_not_used(where, shipped):
    child = Child()
    child.about()
    (path,) = own_files()
    if where == "shipped":
        shipped.write_text(line_of("trace", ASKED, packed(ANSWER), surroundings(recorded_traces.TRACER)))
        path.unlink()
        path = shipped
    child.about()
    assert child.asked == 1
    record = json.loads(path.read_text())
    record["answer"]["states"]["weights"] = 9
    path.write_text(json.dumps(record) + "\n")
    assert child.about() == ANSWER
    assert child.asked == 2


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"case": "a", "digest": "b", "answer": 7}', "\0"])
@pytest.mark.parametrize("where", ["own", "shipped"])
def test_a_damaged_record_is_named_and_the_model_traced(where, text, shipped):
    child = Child()
    child.about()
    (path,) = own_files()
    if where == "shipped":
        path.unlink()
        path = shipped
    path.write_text(text)
    assert child.about() == ANSWER
    assert child.asked == 2
    assert [line.startswith(f"{path}:1: ") for line in child.said] == [True]


def test_a_cache_that_cannot_be_written_is_said(shipped, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EFFILAUNCH_CACHE", str(tmp_path / "file"))
    child = Child()
    assert child.about() == ANSWER
    assert [str(tmp_path / "file") in line for line in child.said] == [True]


def test_the_shipped_records_can_be_read():
    assert read_records(recorded_traces.SHIPPED)
