"""Who takes part in a job: the head listens, greets the members that come, and knows them from then on."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from launcher.errors import MachineError, Problem
from launcher.execute.channel import Channel, Closed, Message, Rhythm, listening, plain_address
from launcher.execute.greeting import Unproven, ask_for_proof
from launcher.execute.hello import (
    Hello,
    different_versions,
    missing_devices,
    one_machine_twice,
    own_hello,
    smaller_devices,
)
from launcher.execute.peers import Part
from launcher.facts.hardware import Hardware
from launcher.facts.place import PORTS, Place

HOST_MISSING = "host-missing"
"""Code of the problem of members that did not come."""
HELLO_S = 10.0
"""So long a connection has to say who it is."""
_TOLD_S = 30.0
"""Who waits for members is told so often."""
_LEAVE_S = 3.0
"""So long members have to leave that were told to."""
POLL_S = 0.2


@dataclass(slots=True)
class Member:
    """Another member that has come."""

    hello: Hello
    channel: Channel
    gone: str = ""
    """How it was lost; empty while it is there."""
    answers: list[Message] = field(default_factory=list)
    part: Part = field(default_factory=Part)


class Members:
    """The members but this one, the head. What they say goes to `hear`, in the threads that read it."""

    def __init__(
        self, place: Place, asked: str, hear: Callable[[Member, Message], None], rhythm: Rhythm | None
    ) -> None:
        """Listens from now on. MachineError (4) where no port is free."""
        self.place, self.own, self._asked = place, own_hello(place, asked), asked
        self.changed = threading.Condition()
        """Notified whenever something was heard or somebody was lost; guards what the threads change."""
        self._hear, self._rhythm = hear, rhythm
        self._known: dict[int, Member] = {}
        self._last_word: Message | None = None
        """What a member is told that comes when the job has ended."""
        self._listener, self._listens = _listening(place), True
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="members", daemon=True).start()

    def _accept(self) -> None:
        while self._listens:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed; or one that left already, or too many open files just now
                time.sleep(POLL_S)
                continue
            threading.Thread(target=self._greet, args=(sock,), name="hello", daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        channel = None
        try:
            channel = Channel(sock, self._rhythm)
            said = channel.receive(HELLO_S)
            hello = Hello.from_json(said)
            if refused := self._other(hello):
                _refuse(channel, refused)
                return
            try:
                ask_for_proof(channel, said, self._asked, HELLO_S)
            except Unproven as error:
                _refuse(channel, Problem("unproven", f"{self.own.host} refuses a member: {error}"))
                return
            with self.changed:  # one step: two may come with one number
                if refused := self._taken(hello):
                    _refuse(channel, refused)
                    return
                channel.send({"kind": "welcome", "host": self.own.host})
                member = self._known[hello.member] = Member(hello, channel)
                channel.start(lambda message: self._hear(member, message), lambda why: self.lose(member, why))
                self.changed.notify_all()
                last_word = self._last_word
            if last_word is not None:
                self.send_to(member, last_word)
        except (Closed, KeyError, TypeError, ValueError, OSError):  # a port scanner, or a member that left
            (sock if channel is None else channel).close()

    def _other(self, hello: Hello) -> Problem | None:
        """Why this is a member of another run; None for one of ours."""
        if hello.job != self.own.job:
            message = f"this port belongs to another job ({self.own.job!r}, and not {hello.job!r})"
            return Problem("another-job", message)
        if hello.asked != self.own.asked:
            message = (
                f"{hello.host} was started with another recipe, --set, --on or --resume than "
                f"{self.own.host}, the first machine: start the same command on all"
            )
            return Problem("command-differs", message)
        return None

    def _taken(self, hello: Hello) -> Problem | None:
        """Why it cannot have its number; None where it can. With `changed` held."""
        there = self._known.get(hello.member)
        if there is not None or not 0 < hello.member < self.place.members:
            who = "the first machine" if there is None else there.hello.host
            count = self.place.members
            message = (
                f"--node-rank {hello.member} is taken by {who}; of {count} members each has its own number"
            )
            return Problem("rank-taken", message)
        return None

    def await_all(
        self,
        limit_s: float,
        say: Callable[[str], None],
        check: Callable[[], None],
    ) -> None:
        """Return when all members have come; MachineError (4) naming those that have not.

        check: called while it waits; what it raises ends the waiting.
        """
        deadline, told = time.monotonic() + limit_s, time.monotonic()
        while missing := self.missing():
            check()
            now = time.monotonic()
            if now >= deadline:
                raise MachineError(self._did_not_come(missing, limit_s))
            if now - told >= _TOLD_S:
                told = now
                say(f"waiting for {listed('member', missing)} of {self.place.members} on port {self.port}")
            with self.changed:
                self.changed.wait(POLL_S)

    def missing(self) -> list[int]:
        """Members that have not come yet."""
        with self.changed:
            return [number for number in range(1, self.place.members) if number not in self._known]

    def _did_not_come(self, missing: list[int], limit_s: float) -> Problem:
        return Problem(
            HOST_MISSING,
            f"{listed('member', missing)} of {self.place.members} did not come within {limit_s:.0f} s "
            f"(this machine, {self.own.host}, listens on port {self.port})",
            hint="start the same command on every machine; a firewall must let them reach this port and the "
            "ports of the training (any above 1024)",
        )

    def names(self) -> dict[int, str]:
        """Member -> what to call it in a message: its host, with its number where several share one."""
        hellos = self.hellos()
        hosts = [hello.host for hello in hellos]
        return {
            h.member: h.host if hosts.count(h.host) == 1 else f"{h.host} (member {h.member})" for h in hellos
        }

    def hellos(self) -> list[Hello]:
        """Of all members that are known, this one first."""
        with self.changed:
            others = sorted(self._known.items())
        return [self.own, *(member.hello for _, member in others)]

    def check(self, hardware: Hardware) -> None:
        """MachineError (4) where versions differ, a machine has too few devices or too small ones, or two are
        one.
        """
        hellos, names = self.hellos(), self.names()
        problems = [
            *different_versions(hellos, names),
            *missing_devices(hellos, hardware, names),
            *smaller_devices(hellos, hardware, names),
            *one_machine_twice(hellos, hardware, names),
        ]
        if problems:
            raise MachineError(problems)

    def numbers(self) -> list[int]:
        """Of the members that have come."""
        return [member.hello.member for member in self.all()]

    def all(self) -> list[Member]:
        with self.changed:
            return [member for _, member in sorted(self._known.items())]

    def present(self) -> list[Member]:
        """Those that were not lost."""
        return [member for member in self.all() if not member.gone]

    def lose(self, member: Member, why: str) -> None:
        """Take a member for lost."""
        with self.changed:
            member.gone = member.gone or why
            self.changed.notify_all()

    def send(self, message: Message, but: Member | None = None) -> None:
        """Tell all that are there; one that cannot be told is lost."""
        for member in self.present():
            if member is not but:
                self.send_to(member, message)

    def send_to(self, member: Member, message: Message) -> None:
        try:
            member.channel.send(message)
        except Closed as error:
            self.lose(member, str(error))

    def end(self, message: Message, linger_s: float) -> None:
        """Let all leave with their last word, those too that come within so long, and listen no more."""
        with self.changed:
            self._last_word = message
            there = self.present()
        for member in there:
            self.send_to(member, message)
        deadline = time.monotonic() + linger_s
        while self.missing() and time.monotonic() < deadline:
            with self.changed:
                self.changed.wait(POLL_S)
        self.close()

    def address_for(self, member: Member | None = None) -> str:
        """The head's address as a member reaches it; None: as the head calls itself.

        A member on the head's own machine may have come over loopback: where others are elsewhere, it takes
        the address that they use.
        """
        addresses = [plain_address(m.channel.own_address) for m in self.all()]
        outside = [address for address in addresses if not _is_loopback(address)]
        own = None if member is None else plain_address(member.channel.own_address)
        if own is None or (_is_loopback(own) and outside):
            return (outside or addresses or ["127.0.0.1"])[0]
        return own

    def close(self) -> None:
        """Listen no more, and end all connections, after the members have taken what they were told.

        They close first: an end that closes with words unread throws away what it has sent.
        """
        self._listens = False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        deadline = time.monotonic() + _LEAVE_S
        with self.changed:
            while any(not member.gone for member in self._known.values()) and time.monotonic() < deadline:
                self.changed.wait(POLL_S)
        for member in self.all():
            member.channel.close()


def _listening(place: Place) -> socket.socket:
    try:
        return listening(place.port, PORTS)
    except OSError as error:
        last = min(place.port + PORTS - 1, 65535)
        message = f"none of the ports {place.port} to {last} can be listened on: {error.strerror or error}"
        hint = "end what uses them, or name another one: --master-addr HOST:PORT, the same on all machines"
        raise MachineError(Problem("port-taken", message, hint=hint)) from None


def _refuse(channel: Channel, why: Problem) -> None:
    channel.send({"kind": "refused", "code": why.code, "message": why.message})
    channel.close()


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def listed(what: str, numbers: Iterable[int]) -> str:
    found = list(numbers)
    return f"{what}{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"
