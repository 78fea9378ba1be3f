"""Schedulers: each module of the tuple implements the protocol, and no other file names one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import launcher
from launcher.schedulers import QUEUES, SCHEDULERS, queue_named, scheduler_named
from launcher.schedulers.queue import Queue
from launcher.schedulers.scheduler import Scheduler

PACKAGE = Path(launcher.__file__).parent
_NAMES = "|".join(sorted({*SCHEDULERS, *QUEUES} - {"local"}))
OTHERS = re.compile(rf"(?:==|!=|\bin|\bcase) *\(?[\"'](?:{_NAMES})[\"']")


@pytest.mark.parametrize("name", SCHEDULERS)
def test_what_starts_nodes_implements_the_protocol(name):
    assert isinstance(scheduler_named(name), Scheduler)


@pytest.mark.parametrize("name", QUEUES)
def test_a_queue_implements_the_protocol_and_is_found_by_its_name(name):
    found = queue_named(name)
    assert isinstance(found, Queue)
    assert found.name == name


def test_no_other_file_compares_the_name_of_a_scheduler():
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "schedulers"]
    assert [str(path) for path in files if OTHERS.search(path.read_text("utf-8"))] == []
