"""Kept answers of the tracing process are those that it gave, and none of another request or program."""

from __future__ import annotations

import json

import answered
import pytest
from answered import answering, surroundings

from launcher.facts.memory_trace import Untraceable


def test_a_request_is_asked_once_and_each_other_one_for_itself(tmp_path, monkeypatch):
    asked = []

    def ask(request, python):
        asked.append((request, python))
        return {"states": len(asked), "line": [1, 2.5]}

    ask_once = answering(ask, tmp_path)
    first = ask_once({"ask": "trace", "batches": [1, 2]}, "python")
    assert ask_once({"batches": [1, 2], "ask": "trace"}, "python") == first == {"states": 1, "line": [1, 2.5]}
    assert ask_once({"ask": "trace", "batches": [1, 3]}, "python")["states"] == 2
    assert ask_once({"ask": "trace", "batches": [1, 2]}, "other")["states"] == 3
    monkeypatch.setattr(answered, "surroundings", lambda: "another tracer")
    assert ask_once({"ask": "trace", "batches": [1, 2]}, "python")["states"] == 4


def test_a_failure_is_no_answer(tmp_path):
    def ask(request, python):
        raise Untraceable("data dependent")

    for _ in range(2):
        with pytest.raises(Untraceable):
            answering(ask, tmp_path)({"ask": "trace"}, "python")
    assert not list(tmp_path.glob("*.json"))
    assert answering(lambda request, python: {}, tmp_path)({"ask": "trace"}, "python") == {}
    (kept,) = tmp_path.glob("*.json")
    assert json.loads(kept.read_text()) == {}


def test_each_module_of_the_worker_counts(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.py").write_text("1")
    before = surroundings(tmp_path)
    surroundings.cache_clear()
    (tmp_path / "model" / "a.py").write_text("2")
    assert surroundings(tmp_path) != before
