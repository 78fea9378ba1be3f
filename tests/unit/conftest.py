"""A head of two members on this machine, for the tests that have members in threads (joining.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from joining import FAST, a_place

from launcher.execute.nodes.group import Group
from launcher.facts.job_member import JobMember


@pytest.fixture
def place() -> JobMember:
    return a_place()


@pytest.fixture
def group(place) -> Iterator[Group]:
    group = Group(place, "asked", FAST)
    yield group
    group.goodbye(None)


@pytest.fixture
def no_handlers(monkeypatch):
    """Signals are for main threads; these members are none."""
    monkeypatch.setattr("launcher.execute.signals.signal.signal", lambda number, handler: None)
