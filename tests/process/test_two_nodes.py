"""Two nodes on one machine: stops, losses, failures and restarts are of both."""

from __future__ import annotations

import json
import random
import signal
import socket
import time

import pytest
from cases import cases
from patience import patience, wait_until
from supervised import ranks
from two_nodes import Pair

from launcher.execute.signals import ECHO_S
from launcher.machine.probe import is_free

HOST = socket.gethostname()
SLOW = "time.sleep(0.2)"
DEAF = """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
signal.set_wakeup_fd(-1)
"""
"""A rank that hears no signal."""


@pytest.fixture
def port() -> int:
    """A free one, below those that the kernel gives to others."""
    return next(port for port in random.sample(range(20_000, 32_000), 100) if is_free(port))


def stopped(pair: Pair) -> dict:
    return json.loads((pair.run_dir / "stopped.json").read_text())


def test_both_run_their_ranks_and_leave_with_0(tmp_path, port):
    pair = Pair(tmp_path, ranks(), port)
    said = pair.ended(0, 0)
    assert f"the first node is {HOST}" in said[1]
    logs = {path.name for path in (pair.run_dir / "logs").glob("launcher*.log")}
    assert logs == {"launcher.log", "launcher-1.log"}
    assert [pair.status(rank)["code"] for rank in (0, 1)] == [0, 0]


@pytest.mark.parametrize("member", cases((0, 1), 1))
def test_a_signal_to_one_stops_both_with_one_checkpoint(tmp_path, port, member):
    pair = Pair(tmp_path, ranks(SLOW, steps=1000, saves=1000), port).training().send(member, signal.SIGTERM)
    said = pair.ended(130, 130)
    at = stopped(pair)["checkpoint"]
    assert f"with {at}" in said[0]
    assert f"with {at}" in said[1], "the member tells what the head tells"
    assert "SIGTERM on another node: stopping" in said[1 - member]


@pytest.mark.parametrize("member", cases((0, 1)))
def test_a_signal_before_the_first_step_ends_both(tmp_path, port, member):
    pair = Pair(tmp_path, ranks(early="time.sleep(600)"), port)
    wait_until(lambda: all(pair.status(rank).get("phase") == "load" for rank in (0, 1)))
    said = pair.send(member, signal.SIGUSR1).ended(130, 130)
    assert "before its first checkpoint" in said[0]


def test_a_signal_while_the_head_prepares_ends_both(tmp_path, port):
    pair = Pair(tmp_path, ranks(), port, prepare="import time; time.sleep(600)")
    told = (pair.run_dir / ".nodes" / "1.json", pair.run_dir / "logs" / "prepare.log")
    wait_until(lambda: all(path.is_file() for path in told))
    pair.send(1, signal.SIGTERM)
    said = pair.ended(130, 130)
    assert f"stopped by a signal to {HOST}" in said[0]


def test_a_killed_rank_of_the_member_is_named_with_its_host_and_signal(tmp_path, port):
    each = "if rank == 1 and step == 3: os.kill(os.getpid(), 9)"
    said = Pair(tmp_path, ranks(each, steps=1000), port).ended(5, 5)
    for words in said:
        assert "rank-lost" in words
        assert f"on {HOST}) was killed by SIGKILL, last step 3, phase train" in words


@pytest.mark.slow
def test_a_rank_of_the_head_that_fails_ends_the_members(tmp_path, port):
    each = "if rank == 0 and step == 3: fail('a bug of ours')"
    said = Pair(tmp_path, ranks(each, steps=1000), port).ended(5, 5)
    assert all("rank 0 failed first: RuntimeError: a bug of ours" in words for words in said)


def test_a_restart_is_the_heads_and_both_go_on(tmp_path, port):
    each = "if rank == 1 and step == 4 and try_number < 1: os.kill(os.getpid(), 9)"
    pair = Pair(tmp_path, ranks(each), port, restarts=1)
    pair.ended(0, 0)
    assert pair.tries(0) == pair.tries(1) == ["start", "checkpoint-3"]
    (row,) = [json.loads(line) for line in (pair.run_dir / "restarts.jsonl").read_text().splitlines()]
    assert (row["step"], row["resumed_from"]) == (4, 3)


@pytest.mark.slow
def test_a_launcher_that_fails_elsewhere_is_told_with_its_machine_and_log(tmp_path, port):
    broken = "import sys\nif sys.argv[2] == '1': print('no such option'); sys.exit(3)\n"
    pair = Pair(tmp_path, broken + ranks(early="time.sleep(600)"), port, limits={"all_gone": 3.0})
    said = pair.ended(5, 5)
    assert f"because on {HOST} (node 1) the launcher ended with exit code 3" in said[0]
    assert "launcher-1.log" in said[0]


@pytest.mark.slow
def test_a_killed_member_ends_the_head_with_a_checkpoint_and_its_name(tmp_path, port):
    pair = (
        Pair(tmp_path, ranks(SLOW, steps=1000, saves=1000), port, silent_s=patience(3.0))
        .training()
        .send(1, signal.SIGKILL)
    )
    said = pair.ended(5, -signal.SIGKILL)
    assert f"host-lost: the node {HOST} was lost: its effilaunch process" in said[0]
    assert f"with {stopped(pair)['checkpoint']}" in said[0]


@pytest.mark.slow
def test_a_killed_head_ends_the_members(tmp_path, port):
    pair = (
        Pair(tmp_path, ranks(SLOW, steps=1000, saves=1000), port, silent_s=patience(3.0))
        .training()
        .send(0, signal.SIGKILL)
    )
    said = pair.ended(-signal.SIGKILL, 5)
    assert f"host-lost: the first node {HOST} was lost: its effilaunch process" in said[1]
    assert list(pair.run_dir.glob("checkpoints/*/manifest.json")), "its rank saved before it left"


@pytest.mark.slow
def test_ranks_that_cannot_stop_are_killed_when_the_head_is_lost(tmp_path, port):
    early = "if rank == 1:\n" + "".join(f"    {line}\n" for line in DEAF.strip().splitlines())
    each = "if rank == 1 and step == 2: time.sleep(600)"
    pair = Pair(tmp_path, ranks(each, early=early), port, vanished_s=2.0, silent_s=patience(3.0))
    wait_until(lambda: pair.status(1).get("step") == 2)
    pair.send(0, signal.SIGKILL).ended(-signal.SIGKILL, 5)


@pytest.mark.slow
def test_the_head_still_listens_when_its_own_ranks_have_ended(tmp_path, port):
    stays = "\nif sys.argv[2] == '1': time.sleep(600)\n"
    pair = Pair(tmp_path, ranks() + stays, port, limits={"leave": 3600.0})  # still waiting at the signal
    wait_until(lambda: (pair.run_dir / "COMPLETED").is_file() and pair.status(0).get("code") == 0)
    time.sleep(2)
    pair.send(0, signal.SIGTERM).ended(0, 0)


@pytest.mark.slow
def test_a_member_that_says_nothing_more_is_lost_and_its_ranks_are_killed(tmp_path, port):
    """As one whose cable was pulled: it lives on, alone, until it notices that itself."""
    silent_s = patience(3.0)
    pair = Pair(
        tmp_path, ranks(SLOW, early=DEAF, steps=10**6), port, silent_s=silent_s,
        vanished_s=2.0,
    ).training()  # fmt: skip
    pair.send(1, signal.SIGSTOP)
    out, _ = pair.nodes[0].communicate(timeout=patience(120))
    assert pair.nodes[0].returncode == 5
    assert f"the node {HOST} was lost: its effilaunch process has been silent for {silent_s:.0f} s" in out
    pair.send(1, signal.SIGCONT)
    out, _ = pair.nodes[1].communicate(timeout=patience(120))
    assert pair.nodes[1].returncode == 5
    assert "host-lost" in out


def test_a_hang_is_judged_over_all_ranks_and_each_writes_where_it_stands(tmp_path, port):
    each = "if rank == 1 and step == 3: time.sleep(600)"
    limits = dict.fromkeys(("step", "first_steps"), patience(3.0))
    said = Pair(tmp_path, ranks(each, steps=1000), port, limits=limits).ended(5, 5)
    for words in said:
        assert "hang: " in words
        assert "no progress for" in words
    assert "rank 1 is in" in said[0] or "rank 1 is behind" in said[0]
    assert "it wrote no calls" not in said[0]
    assert "rank 0 is in" in said[0] or "rank 0 is behind" in said[0]


@pytest.mark.slow
def test_ctrl_c_twice_at_a_member_kills_everything_at_once(tmp_path, port):
    pair = Pair(tmp_path, ranks(SLOW, early=DEAF, steps=1000), port).training()
    pair.send(1, signal.SIGINT)
    told = [pair.run_dir / ".nodes" / f"{node}.json" for node in (0, 1)]
    wait_until(lambda: all(json.loads(path.read_text())["stop"] == signal.SIGINT for path in told))
    time.sleep(ECHO_S)  # since both know of the first: what comes within it is its echo
    said = pair.send(1, signal.SIGINT).ended(130, 130)
    assert all("a second signal asked to stop at once" in words for words in said)
