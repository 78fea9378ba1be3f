"""CPU seconds of each test file, and the record of a session that `make stats` prints.

A test's seconds are those of its process, of the children that it has waited for, and of the processes that
fork ranks (`forked.py`): what a busy machine does not change much.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TICK = os.sysconf("SC_CLK_TCK")
SHOWN = 10
FEWEST_FILES = 30
"""Of a session whose slowest files are shown."""
RECORD = os.environ.pop("TEST_RECORD", None)
"""Where the record goes. Taken out of the environment: a test's own pytest would write it, too."""
BEGAN = time.monotonic()
FORKING: list[int] = []
"""Processes whose forks no test waits for itself."""
BY_FILE: Counter[str] = Counter()


def cpu_seconds() -> float:
    """Of this process, of children that have ended, and of FORKING with its ended children."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in spent) + sum(map(_of_process, FORKING))


def _of_process(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # it has ended: RUSAGE_CHILDREN has it
    return sum(map(int, fields[11:15])) / TICK


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[STARTED] = cpu_seconds()
    return (yield)


STARTED = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """The last report of a test brings its seconds to the process that shows them."""
    report = yield
    if call.when == "teardown":
        report.cpu_seconds = cpu_seconds() - item.stash[STARTED]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        BY_FILE[report.nodeid.partition("::")[0]] += getattr(report, "cpu_seconds", 0.0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if len(BY_FILE) < FEWEST_FILES:
        return
    terminalreporter.section(f"CPU seconds: {sum(BY_FILE.values()):.0f} in {len(BY_FILE)} files; the slowest")
    for name, seconds in BY_FILE.most_common(SHOWN):
        terminalreporter.line(f"{seconds:8.1f}  {name}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the session's record to $TEST_RECORD; .ci/run tries failed tests again only if it says so."""
    if RECORD is None or hasattr(session.config, "workerinput"):
        return
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=False)
    record = {
        "status": int(exitstatus),
        "seconds": round(time.monotonic() - BEGAN),
        "cpu_seconds": round(sum(used.ru_utime + used.ru_stime for used in spent)),
        "processes": session.config.getoption("numprocesses", None) or 1,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[1], 1),
        "commit": commit.stdout.strip(),
        "slowest": {name: round(seconds, 1) for name, seconds in BY_FILE.most_common(SHOWN)},
    }
    Path(RECORD).parent.mkdir(parents=True, exist_ok=True)
    Path(RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
