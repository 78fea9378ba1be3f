"""Deadlines of tests under an injected load and an injected clock: nothing here waits."""

from __future__ import annotations

from types import SimpleNamespace

import patience
import pytest
from patience import Deadline, load_factor, wait_until


@pytest.fixture
def machine(monkeypatch):
    """A machine with 2 cores: its clock advances only while a test sleeps."""
    found = SimpleNamespace(now=100.0, load=0.0)

    def sleep(seconds: float) -> None:
        found.now += seconds

    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: found.now, sleep=sleep))
    monkeypatch.setattr(patience.os, "getloadavg", lambda: (found.load, 50.0, 50.0))
    monkeypatch.setattr(patience.os, "cpu_count", lambda: 2)
    return found


@pytest.mark.parametrize(("load", "factor"), [(0.0, 1.0), (2.0, 1.0), (3.0, 1.5), (8.0, 4.0)])
def test_the_factor_is_the_load_per_core_and_at_least_one(machine, load, factor):
    machine.load = load
    assert load_factor() == factor
    assert patience.patience(10.0) == 10.0 * factor


def test_a_deadline_moves_away_while_it_is_waited_for_and_never_comes_nearer(machine):
    deadline = Deadline(10.0)
    assert deadline.left_s() == 10.0
    machine.now, machine.load = machine.now + 9.0, 8.0
    assert deadline.left_s() == 31.0
    machine.load = 0.0
    assert deadline.left_s() == 31.0
    machine.now += 30.0
    assert not deadline.passed()
    machine.now += 2.0
    assert deadline.passed()


@pytest.mark.parametrize(("load", "waited"), [(0.0, 10.0), (6.0, 30.0)])
def test_what_never_comes_fails_after_the_seconds_stretched_by_the_load(machine, load, waited):
    machine.load = load
    with pytest.raises(AssertionError, match=r"not within 10 s of an idle machine: the answer"):
        wait_until(lambda: None, 10.0, "the answer")
    assert machine.now - 100.0 == pytest.approx(waited, abs=2 * patience.POLL_S)


def test_the_true_result_is_returned_and_the_message_is_asked_for_only_at_a_failure(machine):
    asked = []
    assert wait_until(lambda: machine.now > 103.0 and "found", 10.0, lambda: asked.append(1)) == "found"
    assert asked == []
    with pytest.raises(AssertionError, match="the logs"):
        wait_until(lambda: False, 10.0, lambda: "the logs")
