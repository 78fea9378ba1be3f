"""Members that are asked to stop, and leave."""

from __future__ import annotations

import json
import signal
import socket
import time
from functools import partial
from unittest.mock import Mock

import pytest
from factories import plan
from joining import FAST, Other, second
from supervised import wait_for

from launcher.errors import Interrupted, Problem, RunFailed
from launcher.execute import start as starting
from launcher.execute.following import Ended, Start
from launcher.execute.nodes import member
from launcher.execute.nodes.group import Group
from launcher.execute.nodes.hello import own_hello
from launcher.execute.nodes.wire import Channel, introduce
from launcher.execute.supervise import Limits
from launcher.render.bundle import render

pytestmark = pytest.mark.usefixtures("no_handlers")


def test_a_member_that_is_stopped_and_leaves_is_not_lost(place, group):
    with socket.create_connection(("127.0.0.1", group.members.port)) as sock:
        channel = Channel(sock, FAST)
        introduce(channel, own_hello(second(place), "asked").to_json(), "asked", 5.0)
        group.await_all(10.0, print)
        channel.send({"kind": "stop", "signal": 10})
        channel.close()
    wait_for(lambda: group.vanished)
    with pytest.raises(Interrupted, match="SIGUSR1: stopped by a signal to"):
        group.raise_if_over()


@pytest.mark.parametrize("stopped_by", [signal.SIGUSR1, None])
def test_a_stop_with_its_checkpoint_is_no_lost_machine(tmp_path, monkeypatch, stopped_by):
    """Exit code 130, behind which a job is put into the queue again, and not 5."""

    def follow(start, when_hanging):
        saved = {"signal": "SIGUSR1", "step": 4, "checkpoint": "checkpoint-4"}
        (tmp_path / "stopped.json").write_text(json.dumps(saved))
        return Ended(stopped_by=stopped_by)

    group = Mock(vanished="the machine b was lost: it closed the connection")
    group.lost_problem = partial(Group.lost_problem, group)
    monkeypatch.setattr(starting, "follow", follow)
    start = Start([], {}, tmp_path / "logs" / "launcher.log", print, stop_s=1, orphaned_s=1, peers=group)
    with pytest.raises(RunFailed if stopped_by is None else Interrupted) as caught:
        starting._outcome(tmp_path, start, group)
    for words in ("the machine b was lost: it closed the connection", "after step 4, with checkpoint-4"):
        assert words in str(caught.value)


class Asked:
    """Takes the place of `Stops`: a scheduler has asked to stop."""

    first, at_once = signal.SIGUSR1, False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_a_member_that_was_asked_to_stop_leaves_by_itself_before_its_first_start(place, group, monkeypatch):
    monkeypatch.setattr(member, "_LEAVE_S", 0.3)
    monkeypatch.setattr(member, "Stops", Asked)
    error = Other(second(place)).ended()
    assert (type(error), error.problems[0].message) == (Interrupted, "SIGUSR1: left the job")


@pytest.mark.parametrize("head_leaves", [False, True])
def test_behind_its_first_start_it_leaves_with_the_head(place, group, monkeypatch, tmp_path, head_leaves):
    """Rank 0 may be the last one that stops, by more than a minute."""
    monkeypatch.setattr(member, "_LEAVE_S", 0.3)
    monkeypatch.setattr(member, "Stops", Asked)
    monkeypatch.setattr(member, "_take_part", lambda place, *_: took_part.append(place.member))
    took_part: list[int] = []
    other = Other(second(place))
    group.await_all(10.0, print)
    order = starting._order(render(plan(tmp_path, "2x1xcpu")), tmp_path, 4711, None, Limits(), None)
    group.members.send({"kind": "start", "order": order.to_json()})
    wait_for(lambda: took_part == [1])
    time.sleep(1.2)
    assert other.thread.is_alive()
    if head_leaves:
        group.members.close()
    else:
        group.goodbye(Interrupted(Problem("interrupted", "SIGUSR1: with checkpoint-4")))
    error = other.ended()
    assert isinstance(error, Interrupted)
    expected = "SIGUSR1: left the job; the first machine" if head_leaves else "SIGUSR1: with checkpoint-4"
    assert error.problems[0].message.startswith(expected)
