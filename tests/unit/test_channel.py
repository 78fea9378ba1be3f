"""The connection between two members: over loopback, with a fast heartbeat."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from joining import FAST
from supervised import wait_for

from launcher.execute.nodes.wire import Channel, Closed, Rhythm, listening
from launcher.facts.job_member import PORTS


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    server = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(server.getsockname())
    far, _ = server.accept()
    yield near, far
    for one in (near, far, server):
        one.close()


class Ear:
    """What a channel's thread hears."""

    def __init__(self, channel: Channel) -> None:
        self.heard, self.lost = [], []
        channel.start(self.heard.append, self.lost.append)


def test_messages_come_whole_and_in_order_and_heartbeats_are_not_seen(sockets):
    near, far = (Channel(sock, FAST) for sock in sockets)
    ear = Ear(far)
    other = Ear(near)
    long = "x" * 300_000
    for number in range(50):
        near.send({"kind": "part", "number": number, "text": long if number == 25 else "ü\n"})
    wait_for(lambda: len(ear.heard) == 50)
    assert [message["number"] for message in ear.heard] == list(range(50))
    assert ear.heard[25]["text"] == long
    time.sleep(1.0)
    assert ear.lost == other.lost == [], "they beat for each other"
    assert len(ear.heard) == 50
    near.close()
    far.close()


def test_an_end_that_is_silent_is_lost(sockets):
    began = time.monotonic()  # before the channel begins to count its silence
    near, far = Channel(sockets[0], FAST), sockets[1]
    ear = Ear(near)
    wait_for(lambda: ear.lost)
    assert 0.5 < time.monotonic() - began < 5
    assert ear.lost == ["no word from it for 1 s"]
    assert far.recv(100).startswith(b'{"kind":"beat"}\n'), "this end went on speaking"
    near.close()


def test_an_end_that_closes_is_lost_at_once_and_one_that_we_close_is_not(sockets):
    near, far = Channel(sockets[0], Rhythm(5, 60)), Channel(sockets[1], Rhythm(5, 60))
    ear, other = Ear(near), Ear(far)
    near.close()
    wait_for(lambda: other.lost)
    assert other.lost == ["it closed the connection"]
    assert ear.lost == []
    far.close()
    with pytest.raises(Closed):
        near.send({"kind": "part"})


def test_an_end_that_dies_with_words_unread_has_closed_too(sockets):
    near, far = Channel(sockets[0], Rhythm(5, 60)), sockets[1]
    near.send({"kind": "part"})
    wait_for(lambda: far.recv(1, socket.MSG_PEEK))
    ear = Ear(near)
    far.close()  # with something unread: the kernel resets the connection
    wait_for(lambda: ear.lost)
    assert ear.lost == ["it closed the connection"]
    with pytest.raises(Closed, match="it closed the connection"):
        near.send({"kind": "part"})
    near.close()


def test_a_message_that_cannot_be_taken_in_is_a_loss(sockets):
    """As a part without its code: who waits for that member would wait for ever."""
    near, far = Channel(sockets[0], FAST), Channel(sockets[1], FAST)
    lost: list[str] = []
    near.start(lambda message: message["code"], lost.append)
    far.send({"kind": "part"})
    wait_for(lambda: lost)
    assert lost == ["it sent no message of this protocol: KeyError: 'code'"]
    near.close()
    far.close()


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"a": 1}\n', b"\xff\xfe\n", b"[" * 9_999 + b"\n"]
)
def test_what_is_no_message_of_ours_closes_the_connection(sockets, sent):
    near = Channel(sockets[0], FAST)
    sockets[1].sendall(sent)
    with pytest.raises(Closed, match="no message of this protocol"):
        near.receive(2.0)


def test_an_answer_that_does_not_come_is_told(sockets):
    near = Channel(sockets[0], FAST)
    sockets[1].sendall(b'{"kind":"beat"}\n')
    with pytest.raises(Closed, match="no answer within"):
        near.receive(0.2)


def test_the_next_ports_are_tried():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with listening(port, PORTS) as found:
            assert port < found.getsockname()[1] < port + PORTS
        with pytest.raises(OSError, match="in use"):
            listening(port, 1)
