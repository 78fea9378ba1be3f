"""The agent of a node with torch's store and torchrun: roll call, heartbeat, the numbers of the ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from factories import plan
from forked import Forks
from patience import patience, wait_until
from supervised import ROOT

from launcher.errors import EffilaunchError, MachineError
from launcher.files.rank_status import REPORT
from launcher.machine.job_member import JobMember
from launcher.machine.node_facts import HOST_LOST, HOST_MISSING, JOB
from launcher.machine.probe import free_port
from launcher.render.bundle import render
from launcher.render.command import render_agent

pytest.importorskip("torch")

from launcher.train import heartbeat
from launcher.train.agent import Agent, call_roll, connect
from launcher.train.heartbeat import Heartbeat, beat_key

NAMES = {0: "hosta", 1: "hostb", 2: "hostc"}


@pytest.fixture
def first(tmp_path) -> Agent:
    """Node rank 0 of two."""
    (tmp_path / "plan.json").write_text(render(plan(tmp_path, "2x1xcpu")).files["plan.json"])
    place = JobMember("ours", 0, 2, 2, 0, 1, 0, "127.0.0.1", free_port(), hosts=("hosta", "hostb"))
    return Agent(tmp_path, place, "asked", 1, 1, "worker", 20.0)


def other(first: Agent, **changes) -> Agent:
    place = replace(first.place, member=1, node_rank=1, hosts=())
    return replace(first, **{"place": place, **changes})


class Answers:
    """What the roll call of several agents gives, each in a thread; node rank 0 first."""

    def __init__(self, *agents: Agent) -> None:
        self.found: dict[int, object] = {}
        self._stores: list[object] = []
        threads = [threading.Thread(target=self._call, args=pair) for pair in enumerate(agents)]
        for thread in threads:
            thread.start()
            time.sleep(0.2)  # the store is there
        for thread in threads:
            thread.join(patience(120))

    def _call(self, number: int, agent: Agent) -> None:
        try:
            self._stores.append(store := connect(agent, is_host=agent.place.is_head))
            self.found[number] = call_roll(store, agent)
        except EffilaunchError as error:
            self.found[number] = error

    @property
    def codes(self) -> list[str]:
        errors = [self.found[number] for number in sorted(self.found)]
        return [e.problems[0].code if isinstance(e, MachineError) else "" for e in errors]


def test_all_get_the_same_roll(first):
    answers = Answers(first, other(first))
    assert answers.codes == ["", ""]
    assert answers.found[0] == answers.found[1]
    assert [(n.member, n.address) for n in answers.found[1]] == [(0, ""), (1, "127.0.0.1")]


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"asked": "other"}, "command-differs"), ({"run_dir": Path("/none")}, "not-shared")],
)
def test_what_differs_is_told_to_all(first, changes, code):
    assert Answers(first, other(first, **changes)).codes == [code, code]


def test_gpus_that_cannot_be_asked_keep_no_node_from_a_plan_for_cpus(first, monkeypatch):
    """Slurm sets the variable on nodes whose GPUs no run of this job uses."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("PATH", "/nowhere")
    assert Answers(first, other(first)).codes == ["", ""]
    assert Answers(replace(first, run_dir=Path("/none"))).codes == ["nvidia-smi-missing"]


def test_a_node_that_does_not_come_is_named_after_the_limit(first):
    answers = Answers(replace(first, limit_s=1.0))
    assert answers.codes == [HOST_MISSING]
    assert "node 1 (hostb) of 2 did not come within 1 s" in str(answers.found[0])


def test_two_with_one_number_are_told_apart(first):
    second = other(first)
    twice = replace(second, asked="other")  # its facts differ
    codes = Answers(first, second, twice).codes
    assert codes == ["", "", "rank-taken"]


def test_a_port_that_is_taken_and_a_first_node_that_is_not_there(first):
    import socket

    with socket.create_server(("127.0.0.1", first.place.port)), pytest.raises(MachineError) as taken:
        connect(first, is_host=True)
    assert taken.value.problems[0].code == "port-taken"
    with pytest.raises(MachineError) as absent:
        connect(replace(first, limit_s=1.0), is_host=False)
    assert absent.value.problems[0].code == "head-unreachable"


class Beating:
    """Heartbeats of nodes in one process, with a store of their own."""

    def __init__(self, count: int) -> None:
        from torch.distributed import TCPStore

        self.server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.lost: dict[int, str] = {}
        names = {number: NAMES[number] for number in range(count)}
        for number in names:
            self.server.set(beat_key(number), "0")
        self.nodes = [
            Heartbeat(self.connect, number, names, lambda what, n=number: self.lost.setdefault(n, what))
            for number in names
        ]

    def connect(self):
        from torch.distributed import TCPStore

        return TCPStore("127.0.0.1", self.server.port, is_master=False, wait_for_workers=False)


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.1)
    monkeypatch.setattr(heartbeat, "SILENT_S", 1.5)
    monkeypatch.setattr(heartbeat, "_LOOK_S", 0.2)


def test_a_silent_node_is_named_by_all_others(fast):
    beating = Beating(3)
    for node in beating.nodes[:2]:
        node.start()
    wait_until(lambda: len(beating.lost) == 2, 15)
    assert set(beating.lost.values()) == {"the node hostc was lost: no word for 2 s"}


def test_nodes_that_leave_are_not_lost(fast):
    beating = Beating(2)
    for node in beating.nodes:
        node.start()
    time.sleep(1.0)
    ended: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda n=n, node=node: ended.update({n: node.leave(failed=True)}))
        for n, node in enumerate(beating.nodes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(60))
    assert ended == {0: "", 1: ""}
    assert beating.lost == {}


def test_who_failed_learns_which_node_was_lost(fast):
    """Its ranks fail first, since the connections of the killed ones are closed."""
    beating = Beating(2)
    beating.nodes[0].start()
    time.sleep(0.5)
    assert beating.nodes[0].leave(failed=True) == "the node hostb was lost: no word for 2 s"


def test_a_store_that_cannot_be_reached_is_the_loss_of_the_first_node(fast):
    beating = Beating(2)
    alone = beating.nodes[1]
    answers = alone._connect
    broken = False

    def connect():
        if broken:
            raise RuntimeError("it cannot be reached")
        return answers()

    class Cut:
        """A connection that fails when the cable is pulled."""

        def __init__(self) -> None:
            self.store = connect()

        def __getattr__(self, name: str):
            return connect if broken else getattr(self.store, name)

    alone._connect = Cut
    alone.start()
    beating.nodes[0].start()
    time.sleep(1.0)
    assert beating.lost == {}
    broken = True
    wait_until(lambda: 1 in beating.lost, 15)
    assert beating.lost[1] == "the first node, hosta, was lost: no word from it for 2 s"


def test_the_first_node_leaves_when_the_store_knows_it(monkeypatch):
    """Gone before that, it would be a lost one for a node that waits for its word."""
    node = Heartbeat(lambda: None, 0, {0: NAMES[0], 1: NAMES[1]}, lambda what: None)
    node._hear([heartbeat._LEFT.encode()])
    told: list[bool] = []
    sleeps = time.sleep

    def sleep(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            sleeps(seconds)  # heartbeats of other tests
            return
        told.append(node._told)
        node._told = len(told) >= 3

    monkeypatch.setattr(heartbeat.time, "sleep", sleep)
    assert node.leave(failed=False) == ""
    assert told == [False, False, False, True]


RANK = """
import json, os, pathlib, sys
import torch, torch.distributed as dist
from launcher.train.job import take_rank
take_rank()
dist.init_process_group("gloo")
if os.environ["NODE"] == os.environ.get("FAILS"):
    os._exit(3)  # without tearing down gloo, whose threads may abort the process
total = torch.tensor([10 ** dist.get_rank()])
dist.all_reduce(total)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
(pathlib.Path(sys.argv[1]) / f"node-{os.environ['NODE']}-{os.environ['LOCAL_RANK']}.json").write_text(
    json.dumps({name: os.environ[name] for name in names} | {"sum": total.item()}))
dist.destroy_process_group()  # else gloo's threads may abort the process as it ends
"""


class Pair:
    """Two agents with two ranks each, which are forks; the second node is the first that comes.

    No agents as forks: torchrun looks for the callers of its functions in all modules that are imported.
    """

    def __init__(self, first: Agent, forks: Forks, **env: str) -> None:
        folder, self.run_dir = first.run_dir / "modules", first.run_dir
        folder.mkdir()
        (folder / "rank_of_test.py").write_text(RANK)
        (self.run_dir / "logs").mkdir()
        path = f"{folder}:{ROOT}"
        self.agents = []
        for number in (1, 0):
            place = replace(first.place, member=number, node_rank=number)
            said = json.dumps({"place": asdict(place), "asked": "", "limit_s": 300})
            argv = [word.replace("{run_dir}", str(self.run_dir)).replace("{node_rank}", str(number))
                    .replace("{master_addr}", "127.0.0.1").replace("{master_port}", str(place.port))
                    for word in render_agent(sys.executable, 2, 2, "rank_of_test")]  # fmt: skip
            self.agents.append(subprocess.Popen(
                argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                env={**os.environ, JOB: said, "PYTHONPATH": path, "NODE": str(number), **env,
                     "PYTHON_EXEC": str(forks.python)},
            ))  # fmt: skip
            time.sleep(0.5)

    def ended(self) -> tuple[list[int], list[str]]:
        """Exit statuses and output, node rank 0 first."""
        said = [agent.communicate(timeout=patience(240))[0] for agent in self.agents]
        return [agent.returncode for agent in reversed(self.agents)], said[::-1]


@pytest.mark.slow(share=2)
def test_ranks_are_numbered_by_the_node_ranks_and_meet_at_the_rendezvous(forks, first):
    codes, said = Pair(first, forks).ended()
    assert codes == [0, 0], "\n".join(said)
    assert "2 nodes (" in said[0]
    for node in (0, 1):
        for local in (0, 1):
            told = json.loads((first.run_dir / f"node-{node}-{local}.json").read_text())
            assert (told["RANK"], told["WORLD_SIZE"], told["sum"]) == (str(2 * node + local), "4", 1111)
            assert (told["MASTER_PORT"], told["GLOO_SOCKET_IFNAME"]) == (str(first.place.port), "lo")


def test_a_failed_rank_ends_its_job_with_torchruns_table_and_is_no_lost_node(forks, first):
    codes, said = Pair(first, forks, FAILS="1").ended()
    assert codes[1] == 1
    assert "exitcode  : 3 (pid: " in said[1]
    assert HOST_LOST not in "".join(said)
    assert REPORT not in "".join(said)
