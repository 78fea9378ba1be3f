"""What the contract tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from forked import Forks


@pytest.fixture(scope="session")
def forks(tmp_path_factory) -> Iterator[Forks]:
    """The process that forks ranks, once: its imports take most of ten seconds."""
    home = str(tmp_path_factory.mktemp("forks-home"))
    environ = {**os.environ, "EFFILAUNCH_CACHE": home, "HOME": home, "XDG_CACHE_HOME": home}
    for name in ("EFFILAUNCH_RESUME", "EFFILAUNCH_DRILL", "EFFILAUNCH_SUPERVISOR"):
        environ.pop(name, None)
    with Forks(environ) as found:
        assert found.threads == [], "a fork would lose the other threads"
        yield found
