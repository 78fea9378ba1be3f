"""Faults are injected where they are asked for, once if so, and nowhere else."""

from __future__ import annotations

import json
import resource
import signal
from types import SimpleNamespace

import pytest

from launcher.errors import RecipeError
from launcher.train import faults
from launcher.train.faults import FULL_AT_BYTES, MARKER, VARIABLE


@pytest.fixture
def injected(monkeypatch) -> list:
    """What would have been sent, and for how long it would have hung."""
    found: list = []
    monkeypatch.setattr(faults.os, "kill", lambda pid, number: found.append((pid, number)))
    monkeypatch.setattr(faults, "time", SimpleNamespace(sleep=found.append))
    monkeypatch.setattr(faults.os, "getpid", lambda: 77)
    yield found
    faults.arm({}, None)


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path


def arm(run_dir, **asked) -> None:
    faults.arm({VARIABLE: json.dumps(asked)}, run_dir)


@pytest.mark.parametrize(
    ("asked", "rank", "expected"),
    [
        ({"fault": "kill-rank", "rank": 1}, "1", [(77, signal.SIGKILL)]),
        ({"fault": "kill-rank", "rank": 1}, "0", []),
        ({"fault": "kill-all"}, "0", [(77, signal.SIGKILL)]),
        ({"fault": "kill-all", "rank": None}, "1", [(77, signal.SIGKILL)]),
        ({"fault": "terminate"}, "0", [(4242, signal.SIGTERM)]),
        ({"fault": "terminate"}, "1", []),
        ({"fault": "kill-save"}, "0", []),
        ({"fault": "disk-full"}, "0", []),
    ],
)
def test_between_two_steps(asked, rank, expected, run_dir, injected, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("EFFILAUNCH_SUPERVISOR", "some-host:4242:99")
    arm(run_dir, step=3, **asked)
    for ended in (0, 1, 2, 4):
        faults.before_step(ended)
    assert injected == []
    faults.before_step(3)
    assert injected == expected


def test_a_rank_that_hangs_sleeps(run_dir, injected, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    arm(run_dir, fault="hang", step=0, rank=1)
    faults.before_step(0)
    assert injected
    assert injected[0] > 24 * 3600


def test_inside_a_save(run_dir, injected):
    arm(run_dir, fault="kill-save", step=4)
    faults.before_step(4)
    faults.inside_save(2)
    assert injected == []
    faults.inside_save(4)
    assert injected == [(77, signal.SIGKILL)]


def test_a_full_disk_fails_a_write_in_the_middle_and_is_over_with_the_save(run_dir, monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    arm(run_dir, fault="disk-full", step=2)
    file = run_dir / "weights"
    with faults.saving(1):
        file.write_bytes(bytes(3 * FULL_AT_BYTES))
    file.unlink()
    with pytest.raises(OSError, match="File too large"), faults.saving(2):
        file.write_bytes(bytes(3 * FULL_AT_BYTES))
    assert file.stat().st_size == FULL_AT_BYTES, "some of it was written"
    assert resource.getrlimit(resource.RLIMIT_FSIZE) == before
    monkeypatch.setenv("RANK", "1")
    with faults.saving(2):
        file.write_bytes(bytes(3 * FULL_AT_BYTES))
    faults.arm({}, run_dir)


def test_a_fault_with_times_is_injected_once_a_run_directory(run_dir, injected):
    arm(run_dir, fault="kill-all", step=1, times=1)
    assert not (run_dir / "logs" / MARKER).exists()
    faults.before_step(1)
    assert len(injected) == 1
    assert (run_dir / "logs" / MARKER).exists()
    arm(run_dir, fault="kill-all", step=1, times=1)
    faults.before_step(1)
    assert len(injected) == 1
    arm(run_dir, fault="kill-all", step=1)
    faults.before_step(1)
    assert len(injected) == 2, "without `times` it is injected at every attempt"


def test_without_the_variable_nothing_happens(run_dir, injected):
    arm(run_dir, fault="kill-all", step=1)
    faults.arm({}, run_dir)
    faults.before_step(1)
    faults.inside_save(1)
    assert injected == []


@pytest.mark.parametrize(
    "text",
    [
        "", "kill-all", "[]", "{}", '{"fault": "kill-all"}', '{"fault": "explode", "step": 1}',
        '{"fault": "kill-all", "step": "1"}', '{"fault": "kill-all", "step": true}',
        '{"fault": "kill-all", "step": -1}', '{"fault": "kill-save", "step": 0}',
        '{"fault": "kill-all", "step": 1, "more": 2}', '{"fault": "kill-rank", "step": 1}',
        '{"fault": "kill-rank", "step": 1, "rank": -1}', '{"fault": "hang", "step": 1, "rank": "0"}',
        '{"fault": "kill-all", "step": 1, "rank": 0}', '{"fault": "terminate", "step": 1, "rank": 1}',
        '{"fault": "kill-all", "step": 1, "times": 2}', '{"fault": "kill-all", "step": 1, "times": true}',
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(text, run_dir, injected):
    with pytest.raises(RecipeError) as caught:
        faults.arm({VARIABLE: text}, run_dir)
    assert caught.value.problems[0].code == "bad-drill"
    faults.before_step(1)
    assert injected == []
