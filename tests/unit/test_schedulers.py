"""Schedulers: each module of the tuple implements the protocol, and no other file names one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import launcher
from launcher.errors import MachineError, Problem, RecipeError
from launcher.schedulers import QUEUES, SCHEDULERS, queue_named, scheduler_named
from launcher.schedulers.queue import Queue, submit_each
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


class Failing:
    """Takes two jobs, and not the third."""

    def __init__(self):
        self.cancelled = []

    def cancel(self, ids):
        self.cancelled += ids
        raise MachineError(Problem("no-answer", "gone"))


def test_jobs_before_one_that_is_refused_are_cancelled():
    queue, numbers = Failing(), iter("12")

    def submit():
        try:
            return next(numbers)
        except StopIteration:
            raise RecipeError(Problem("refused", "no room")) from None

    with pytest.raises(RecipeError):
        submit_each(queue, None, [submit] * 3)
    assert queue.cancelled == ["1", "2"]


def test_no_other_file_compares_the_name_of_a_scheduler():
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "schedulers"]
    assert [str(path) for path in files if OTHERS.search(path.read_text("utf-8"))] == []
