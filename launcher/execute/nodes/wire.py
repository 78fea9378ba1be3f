"""One connection between two members of a job: JSON objects, a line each, with a heartbeat.

Each end sends a word at least every few seconds, whatever its main thread does: an end that hears nothing for
longer takes the other one for lost. A connection that closes is lost at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.facts.safe_files import parse_json

Message = dict[str, Any]
"""A JSON object; `kind` says what it is."""

LONGEST_LINE = 1 << 24
"""Bytes; more is no message of ours."""
_BEAT: Message = {"kind": "beat"}
_CLOSED = "it closed the connection"
_FOREIGN = "it sent no message of this protocol"
_SEND_S = 10.0
"""So long a message may wait for room in the connection."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """When an end speaks, and when it takes the other one for lost; seconds."""

    beat_s: float = 4.0
    silent_s: float = 20.0


class Closed(Exception):
    """The connection cannot be used any more; its text says why."""


class Channel:
    """A connected socket. `receive` for the first words; then `start` hands every message to a function."""

    def __init__(self, sock: socket.socket, rhythm: Rhythm | None = None) -> None:
        sock.settimeout(_SEND_S)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._rhythm = sock, rhythm or Rhythm()
        self._sending = threading.Lock()
        self._rest = b""
        self._sent = self._heard = time.monotonic()
        self._thread: threading.Thread | None = None
        self._closing = False
        self.own_address: str = sock.getsockname()[0]
        """This end's, as the other one reaches it."""
        self.address: str = sock.getpeername()[0]
        """The other end's."""

    def send(self, message: Message) -> None:
        """Say something; Closed where nobody can be told."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._sending:
            try:
                self._socket.sendall(line)
            except OSError as error:
                raise Closed(_failure(error)) from None
            self._sent = time.monotonic()

    def receive(self, limit_s: float) -> Message:
        """The next message but heartbeats; Closed when it does not come in time. Not after `start`."""
        deadline = time.monotonic() + limit_s
        while True:
            for message in self._lines(max(0.0, deadline - time.monotonic()), one=True):
                if message != _BEAT:
                    return message
            if time.monotonic() >= deadline:
                raise Closed(f"no answer within {limit_s:.0f} s")

    def start(self, hear: Callable[[Message], None], lose: Callable[[str], None]) -> None:
        """From now on a thread calls `hear` with each message, and `lose` once with why it is lost.

        Neither `close` nor what follows it is a loss; a message that `hear` raises at is one.
        """
        self._heard = time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(hear, lose), name="channel", daemon=True)
        self._thread.start()

    def _run(self, hear: Callable[[Message], None], lose: Callable[[str], None]) -> None:
        wait_s = min(1.0, self._rhythm.beat_s / 2)
        try:
            while not self._closing:
                for message in self._lines(wait_s):
                    if message != _BEAT:
                        hear(message)
                now = time.monotonic()
                if now - self._sent >= self._rhythm.beat_s:
                    self.send(_BEAT)
                # Judged behind the reading: what came while this process itself was stopped lies ready.
                if now - self._heard > self._rhythm.silent_s:
                    raise Closed(f"no word from it for {self._rhythm.silent_s:.0f} s")
        except Closed as error:
            if not self._closing:
                lose(str(error))
        except Exception as error:  # of `hear`: a word that this end does not know, or an incomplete message
            lose(f"{_FOREIGN}: {type(error).__name__}: {error}")

    def _lines(self, wait_s: float, *, one: bool = False) -> list[Message]:
        """The messages that have come, after `wait_s` seconds at most. one: no more than the first."""
        if b"\n" not in self._rest:
            try:
                if not select.select([self._socket], [], [], wait_s)[0]:
                    return []
                chunk = self._socket.recv(1 << 16)
            except (OSError, ValueError) as error:  # ValueError: closed by `close` meanwhile
                raise Closed(_failure(error)) from None
            if not chunk:
                raise Closed(_CLOSED)
            self._heard = time.monotonic()
            self._rest += chunk
            if len(self._rest) > LONGEST_LINE:
                raise Closed(_FOREIGN)
        *lines, self._rest = self._rest.split(b"\n", 1) if one else self._rest.split(b"\n")
        return [_parsed(line) for line in lines]

    def close(self) -> None:
        """End the connection; what was sent before still arrives."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)
        self._socket.close()


def _failure(error: OSError | ValueError) -> str:
    """Why nothing can be said or heard any more, in words."""
    # A process that is killed resets the connection where it had not yet read all, and closes it else.
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return _CLOSED
    return f"the connection failed: {getattr(error, 'strerror', None) or error}"


def _parsed(line: bytes) -> Message:
    try:
        message = parse_json(line)
    except ValueError:  # nested too deeply: anybody can send it before the greeting
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise Closed(_FOREIGN)
    return message


def listening(port: int, count: int) -> socket.socket:
    """A socket that listens on the first free port of `count` from `port` on; OSError where none is free."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    last: OSError = OSError("no port was named")
    for candidate in range(port, min(port + count, 65536)):
        try:
            return socket.create_server(
                ("", candidate), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=128
            )
        except OSError as error:
            last = error
    raise last


def plain_address(address: str) -> str:
    """An IPv4 address that came over a socket for both kinds, in its own form."""
    return address.removeprefix("::ffff:")


class Unproven(Closed):
    """The other end does not know what this one was asked."""


def fingerprint(asked: str) -> str:
    """The same for the same request. Nothing can be proved with it."""
    return hashlib.sha256(f"effilaunch request {asked}".encode()).hexdigest()


def introduce(channel: Channel, hello: Message, asked: str, limit_s: float) -> Message:
    """A member's part: the head's welcome, or its refusal.

    hello: as the head is told it. Unproven where the head proves nothing; Closed where it says nothing.
    """
    own = secrets.token_hex(16)
    channel.send({**hello, "nonce": own})
    answer = channel.receive(limit_s)
    if answer["kind"] == "refused":
        return answer
    nonces = own, str(answer.get("nonce"))
    if answer["kind"] != "proof" or not _is_right(answer, "head", hello["job"], asked, nonces):
        raise Unproven("it does not prove that it is the first machine of this run")
    channel.send({"kind": "proof", "proof": _proof("member", hello["job"], asked, nonces)})
    answer = channel.receive(limit_s)
    if answer["kind"] not in ("welcome", "refused"):
        raise Closed("it gave no answer to a proof")
    return answer


def ask_for_proof(channel: Channel, hello: Mapping[str, Any], asked: str, limit_s: float) -> None:
    """The head's part: it proves itself to a member, which must do so, too.

    hello: what the member said. Unproven where it does not; KeyError where it said no nonce.
    """
    own = secrets.token_hex(16)
    nonces = str(hello["nonce"]), own
    channel.send({"kind": "proof", "nonce": own, "proof": _proof("head", hello["job"], asked, nonces)})
    if not _is_right(channel.receive(limit_s), "member", hello["job"], asked, nonces):
        raise Unproven("it does not prove that it takes part in this run")


def _proof(who: str, job: str, asked: str, nonces: tuple[str, str]) -> str:
    """who: head or member, so that neither end can be answered with its own words."""
    key = hashlib.sha256(json.dumps([job, asked]).encode()).digest()
    return hmac.new(key, json.dumps([who, *nonces]).encode(), "sha256").hexdigest()


def _is_right(answer: Message, who: str, job: str, asked: str, nonces: tuple[str, str]) -> bool:
    told = str(answer.get("proof")).encode()
    return hmac.compare_digest(told, _proof(who, job, asked, nonces).encode())
