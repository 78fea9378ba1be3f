"""Who may give orders, and take part: both ends of a connection prove that they were asked the same."""

from __future__ import annotations

import socket
import threading

import pytest
from joining import FAST, Other, second

from launcher.errors import MachineError
from launcher.execute.nodes import member, wire
from launcher.execute.nodes.group import Group
from launcher.execute.nodes.hello import own_hello
from launcher.execute.nodes.wire import Channel, Closed, Message, introduce

pytestmark = pytest.mark.usefixtures("no_handlers")


class Listener:
    """Whatever listens on the head's port, and answers each hello with these messages."""

    def __init__(self, port: int, *answers: Message) -> None:
        self.answers, self.heard = answers, []
        self.server = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self.server.accept()
            except OSError:
                return
            channel = Channel(sock, FAST)
            self.heard.append(channel.receive(5.0))
            for answer in self.answers:
                channel.send(answer)
            with pytest.raises(Closed):
                self.heard.append(channel.receive(5.0))
            channel.close()

    def close(self) -> None:
        self.server.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self.server.close()


@pytest.mark.parametrize(
    "answer",
    [
        {"kind": "welcome", "host": "a"},
        {"kind": "proof", "nonce": "0" * 32, "proof": "0" * 64},
        {"kind": "proof", "nonce": None, "proof": "ü"},
        {"kind": "start"},
    ],
)
def test_a_member_takes_no_orders_from_who_proves_nothing(place, monkeypatch, answer):
    monkeypatch.setattr(member, "_take_part", lambda *_: started.append(1))
    started: list[int] = []
    listener = Listener(place.port, answer, {"kind": "start", "order": {"command": ["sh", "-c", "true"]}})
    error = Other(second(place)).ended()
    listener.close()
    assert isinstance(error, MachineError)
    (problem,) = error.problems
    assert problem.code == "head-unproven"
    assert f"127.0.0.1:{place.port} is no head of this job: it does not prove" in problem.message
    assert not started
    assert "asked" not in listener.heard[0].values(), "what was asked is a key, and does not travel"


def test_a_member_finds_its_head_behind_a_listener_that_proves_nothing(place):
    listener = Listener(place.port, {"kind": "welcome", "host": "a"})
    group = Group(place, "asked", FAST)
    assert group.members.port > place.port
    other = Other(second(place))
    group.await_all(10.0, print)
    group.goodbye(None)
    assert other.ended() == 0
    listener.close()


@pytest.mark.parametrize("knows", ["", "another"])
def test_a_stranger_that_knows_the_job_alone_does_not_take_a_members_number(place, group, monkeypatch, knows):
    """It says the hash that it has heard, and answers what it can."""
    right = wire._is_right
    with socket.create_connection(("127.0.0.1", group.members.port)) as sock:
        channel = Channel(sock, FAST)
        # It does not mind who the head is.
        monkeypatch.setattr(
            wire, "_is_right", lambda said, who, *rest: who == "head" or right(said, who, *rest)
        )
        answer = introduce(channel, own_hello(second(place), "asked").to_json(), knows, 5.0)
    assert (answer["kind"], answer["code"]) == ("refused", "unproven")
    assert group.members.numbers() == []
    other = Other(second(place))
    group.await_all(10.0, print)
    group.goodbye(None)
    assert other.ended() == 0


def test_an_empty_request_is_no_pass(place, group):
    error = Other(second(place), asked="").ended()
    assert error.problems[0].code == "command-differs"


def test_a_proof_cannot_be_sent_back(place, group):
    """With the head's own words a stranger proves nothing."""
    with socket.create_connection(("127.0.0.1", group.members.port)) as sock:
        channel = Channel(sock, FAST)
        channel.send({**own_hello(second(place), "asked").to_json(), "nonce": "1"})
        proof = channel.receive(5.0)
        channel.send({"kind": "proof", "proof": proof["proof"]})
        assert channel.receive(5.0)["code"] == "unproven"


def test_a_hello_without_a_nonce_is_let_go(place, group):
    with socket.create_connection(("127.0.0.1", group.members.port)) as sock:
        channel = Channel(sock, FAST)
        channel.send(own_hello(second(place), "asked").to_json())
        with pytest.raises(Closed):
            channel.receive(5.0)
    assert group.members.numbers() == []
