"""Schedulers: each module of the tuple implements the protocol, and no other file names one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import launcher
from launcher.schedulers import QUEUES, SCHEDULERS, queue_named, scheduler_named
from launcher.schedulers.scheduler import Queue, Scheduler

PACKAGE = Path(launcher.__file__).parent
_NAMES = "|".join(sorted({*SCHEDULERS, *QUEUES} - {"local"}))
OTHERS = re.compile(rf"(?:==|!=|\bin|\bcase) *\(?[\"'](?:{_NAMES})[\"']")


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_implements_the_protocol(name):
    found = scheduler_named(name)
    assert isinstance(found, Scheduler)
    assert isinstance(found, Queue) is (name in QUEUES)


def test_a_queue_is_recorded_under_the_name_that_finds_it_again():
    assert [queue_named(name).name for name in QUEUES] == list(QUEUES)
    assert set(QUEUES) <= set(SCHEDULERS)


def test_no_other_file_compares_the_name_of_a_scheduler():
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "schedulers"]
    assert [str(path) for path in files if OTHERS.search(path.read_text("utf-8"))] == []
