"""What a machine's supervisor sees of ranks that run elsewhere, and how their end is told."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from unittest.mock import Mock

import pytest
from patience import patience

from launcher.errors import RunFailed
from launcher.execute.attempts import may_pass
from launcher.execute.endings import supervised_failure
from launcher.execute.following import Ended, Start, follow
from launcher.execute.nodes import Nodes, Part, Said
from launcher.execute.supervise import Watch
from launcher.files.rank_status import RankStatus, process_started
from launcher.machine.job_member import JobMember
from launcher.machine.probe import OomKills

ROOT = Path(__file__).resolve().parents[2]
GONE = 2**22 + 1
"""No process has this id."""
NEVER = OomKills(0, 0)


@pytest.fixture
def run(tmp_path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def elsewhere(rank: int, **changes: object) -> dict[int, RankStatus]:
    """What another node told of its rank, whose process this machine cannot look at."""
    values = {"rank": rank, "host": "hostb", "pid": GONE, "started": 1, "phase": "train", "step": 3,
              "since": 0.0, "median": 0.1, "code": None}  # fmt: skip
    return {rank: RankStatus(**{**values, **changes})}


def says(run: Path, rank: int, pid: int, host: str | None = None, **changes: object) -> None:
    values = {"rank": rank, "host": host or socket.gethostname(), "pid": pid, "phase": "train", "step": 3,
              "started": process_started(pid) or 0, "since": 0.0, "median": 0.1, "code": None}  # fmt: skip
    (run / "logs" / f"status-rank-{rank}.json").write_text(json.dumps({**values, **changes}))


def test_a_member_looks_at_its_own_ranks_although_others_have_its_hosts_name(run):
    says(run, 0, GONE)
    says(run, 1, os.getpid())
    member = Watch(run, 0.0, own=frozenset({1}))
    member.look(0.5)
    assert (sorted(member.statuses), member.lost) == ([1], {})
    alone = Watch(run, 0.0)
    alone.look(0.5)
    assert sorted(alone.lost) == [0], "one machine counts all that run on its host"


def test_the_head_believes_that_ranks_elsewhere_live_until_their_machine_says_otherwise(run):
    says(run, 0, os.getpid())
    says(run, 1, GONE)  # a file of another node's rank, which told nothing yet
    head = Watch(run, 2.0, own=frozenset({0}))
    head.look(0.5)
    assert (sorted(head.statuses), head.lost) == ([0], {})
    head.elsewhere = elsewhere(1) | elsewhere(2)
    head.look(0.5)
    assert (sorted(head.statuses), head.lost) == ([0, 1, 2], {})
    head.gone = frozenset({2})
    head.look(0.5)
    assert sorted(head.lost) == [2]
    assert head.is_own(0)
    assert not head.is_own(2)


def test_ranks_elsewhere_count_in_a_hang_and_when_they_fail(run):
    says(run, 0, os.getpid())
    head = Watch(run, 2.0, own=frozenset({0}), elsewhere=elsewhere(1, step=2))
    for _ in range(70):
        head.look(5.0)
    assert head.hang().behind == [1]
    head.elsewhere = elsewhere(1, phase="ended", code=1)
    head.look(0.5)
    assert head.failed == [1]


OPENED = """
import os, socket, sys
from pathlib import Path
from launcher.execute.nodes import Nodes, Said
from launcher.execute.supervise import Watch
from launcher.machine.job_member import JobMember
from launcher.files.rank_status import process_started, read_statuses, status_file
from launcher.files.safe_files import write_json

run_dir, touched = Path(sys.argv[1]), []
def note(event, found):
    if event in ("open", "os.listdir", "os.scandir") and str(found[0]).startswith(str(run_dir)):
        touched.append(str(found[0]))
def member(number):
    return JobMember("job", number, 64, 64, number, 1, 0, "node0", 29400)
def watching(number):
    return Watch(run_dir, 2.0, own=frozenset(member(number).ranks(8)))
def look(nodes, watch):
    watch.gone, watch.elsewhere = nodes.lost, nodes.statuses
    watch.look(0.5)

for rank in range(512):
    write_json(status_file(run_dir, rank), {
        "rank": rank, "host": socket.gethostname(), "pid": os.getpid(),
        "started": process_started(os.getpid()), "phase": "train", "step": 3, "since": 0.0,
        "median": 0.1, "code": None})
head = Nodes(member(0), run_dir, "asked")
head.__enter__()
others = [Nodes(member(number), run_dir, "asked") for number in range(1, 64)]
for nodes in others:
    nodes.follow_run(head._own["run"])
    watch = watching(nodes.place.member)
    look(nodes, watch)
    nodes.tell(Said(ranks=watch.statuses))
first, last = watching(0), watching(63)
others[-1]._looked = head._looked = 0.0
sys.addaudithook(note)
look(head, first)
print(len(touched), len(set(touched)), sorted(first.statuses) == list(range(512)))
touched.clear()
look(others[-1], last)
print(len(touched), sorted(last.statuses) == list(range(504, 512)))
"""


def test_a_look_opens_the_files_of_own_ranks_and_one_of_each_other_node(run):
    """512 ranks on 64 nodes: 8 and 63 files on node rank 0, 8 and one on the others; no folder is listed."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", OPENED, str(run)]
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=patience(240), check=False)
    assert (done.stdout, done.stderr) == ("71 71 True\n9 True\n", "")


def test_the_steps_of_ranks_are_told_once_a_second_and_a_new_phase_at_once(run, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("launcher.execute.nodes.time.monotonic", lambda: now[0])
    nodes = Nodes(JobMember("job", 1, 2, 2, 1, 1, 0, "hosta", 29400), run, "asked")
    (run / ".nodes").mkdir()
    told = []
    for step, phase in ((1, "train"), (2, "train"), (3, "save"), (4, "save"), (5, "save"), (6, "save")):
        now[0] += 0.5
        nodes.tell(Said(ranks=elsewhere(1, step=step, phase=phase)))
        told.append(json.loads((run / ".nodes" / "1.json").read_text())["part"]["ranks"][0]["step"])
    assert told == [1, 1, 3, 3, 5, 5]


RANK_0 = """
import json, os, sys, time
from launcher.files.rank_status import process_started
status = json.loads(sys.argv[1]) | {"pid": os.getpid(), "started": process_started(os.getpid())}
with open("new", "w") as file:
    json.dump(status, file)
os.rename("new", "logs/status-rank-0.json")
time.sleep(60)
"""


class Neighbour(Mock):
    """One other node. It reports at the same moment that it lost its rank, and that it has ended."""

    stop, trouble, vanished, running = None, "", "", False

    def wants_stacks(self) -> bool:
        return False

    @property
    def end(self) -> str:
        return "hostb ended" if (self.run / "logs" / "status-rank-0.json").exists() else ""

    @property
    def lost(self) -> frozenset[int]:
        return frozenset({1} if self.end else ())

    statuses: ClassVar = elsewhere(1)


def test_ranks_that_end_because_another_node_ended_are_not_lost(run, monkeypatch):
    says(run, 0, 0)
    status = (run / "logs" / "status-rank-0.json").read_text()
    (run / "logs" / "status-rank-0.json").unlink()
    monkeypatch.chdir(run)
    argv = [sys.executable, "-c", RANK_0, status]
    watch = Watch(run, 0.0, own=frozenset({0}))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    log = run / "logs" / "launcher.log"
    start = Start(argv, env, log, print, stop_s=1, orphaned_s=1, watch=watch, peers=Neighbour(run=run))
    over = follow(start)
    assert over.killed == "hostb ended"
    assert over.code == -9
    assert sorted(watch.lost) == [1]


def ended(run: Path, **parts: Part) -> Ended:
    says(run, 0, os.getpid())
    watch = Watch(run, 2.0, own=frozenset({0}), elsewhere=elsewhere(1))
    watch.gone = frozenset().union(*(part.lost for part in parts.values()))
    watch.look(0.5)
    return Ended(0, watch=watch, elsewhere=parts)


def test_a_launcher_that_was_killed_elsewhere_is_told_with_its_machine(run):
    part = Part(trouble="the launcher ended with exit code -9", first=True, code=-9, log="launcher-1.log")
    failure = supervised_failure(run, ended(run, hostb=part), NEVER, ())
    assert failure.problems[0].message == "the launcher on hostb was killed by SIGKILL"
    assert failure.problems[0].file == str(run / "logs" / "launcher-1.log")
    assert isinstance(failure, RunFailed)
    assert may_pass(failure)


def test_what_could_not_be_started_elsewhere_says_why(run):
    part = Part(trouble="it could not be started: KEY is not set", first=True, code=1, log="launcher-1.log")
    failure = supervised_failure(run, ended(run, hostb=part), NEVER, ())
    assert failure.problems[0].message == (
        "the run ended because on hostb it could not be started: KEY is not set"
    )


def test_memory_that_ran_out_on_the_machine_of_a_lost_rank_is_the_cause(run):
    (run / "logs" / "launcher-1.log").write_text(f"exitcode  : -9 (pid: {GONE})\n")
    part = Part(trouble="rank 1 was lost", first=True, lost=frozenset({1}), code=1, log="launcher-1.log")
    for oom, expected in ((True, "sigkill-oom"), (False, "rank-lost")):
        failure = supervised_failure(run, ended(run, hostb=replace(part, oom=oom)), NEVER, ())
        (problem,) = failure.problems
        assert problem.code == expected
        assert f"rank 1 (pid {GONE} on hostb) was killed by SIGKILL" in problem.message


def test_a_lost_machine_is_no_reason_for_a_restart():
    from launcher.errors import Problem
    from launcher.machine.node_facts import HOST_LOST

    assert not may_pass(RunFailed(Problem(HOST_LOST, "the machine hostb was lost")))
