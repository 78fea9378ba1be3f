"""Which of the slow tests CI runs with a change: a share of them, drawn by the commit.

Most are one assertion about many models, engines or recipes, of which some are quick tests. `make test-full`
runs all; a release needs that.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARE = 8
"""One of so many is drawn, unless its mark says `slow(share=N)`."""


@cache
def commit() -> str:
    """Empty without git: then the same ones are always drawn."""
    asked = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def is_drawn(name: str, share: int, seed: str) -> bool:
    """Whether one of `share` names of this seed is drawn; each by itself, whatever others there are."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:8]) % share == 0


def left_out(items: Iterable[pytest.Item], seed: str) -> list[pytest.Item]:
    """The slow tests that are not drawn."""
    marks = ((item, item.get_closest_marker("slow")) for item in items)
    return [
        item
        for item, mark in marks
        if mark is not None and not is_drawn(item.nodeid, mark.kwargs.get("share", SHARE), seed)
    ]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--drawn", action="store_true", help="of the slow tests only some, drawn by the commit")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--drawn"):
        return
    if left := left_out(items, commit()):
        config.hook.pytest_deselected(items=left)
        without = set(left)
        items[:] = [item for item in items if item not in without]
