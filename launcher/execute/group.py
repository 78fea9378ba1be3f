"""The head's side of a job over several machines: who has come, what they are told, what they say.

Threads take in what the members say; the head's own loop (`following.py`) asks for it every half second.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.errors import EffilaunchError, Interrupted, MachineError, Problem, RunFailed
from launcher.execute.binding import Order
from launcher.execute.channel import Channel, Closed, Message, Rhythm, listening, plain_address
from launcher.execute.hello import Hello, different_versions, missing_devices, own_hello
from launcher.execute.peers import Part, Said
from launcher.facts.hardware import Hardware
from launcher.facts.place import PORTS, Place

HOST_LOST = "host-lost"
"""Code of the problem of a machine that was lost."""
HELLO_S = 10.0
"""So long a connection has to say who it is."""
LOOK_S = 60.0
"""So long a member has to look for a file; a slow network disk may need some of it."""
LEAVE_S = 60.0
"""So long the others have to end their part of a try when the head's has ended."""
_TOLD_S = 30.0
"""Who waits for members is told so often."""
_POLL_S = 0.2


@dataclass(slots=True)
class Member:
    """Another member that has come."""

    hello: Hello
    channel: Channel
    gone: str = ""
    """How it was lost; empty while it is there."""
    answers: list[Message] = field(default_factory=list)
    part: Part = field(default_factory=Part)


class Group:
    """The members of a job but this one, the head. Entered once for a command, it serves all its tries."""

    def __init__(self, place: Place, asked: str, rhythm: Rhythm | None = None) -> None:
        """asked: a digest of what the command was given, which must be the same on all machines."""
        self.place, self.own = place, own_hello(place, asked)
        self._rhythm = rhythm
        self._members: dict[int, Member] = {}
        self._changed = threading.Condition()
        self._stop: tuple[signal.Signals, int] | None = None
        self._in_try = False
        self._told: Said = Said()
        self._listener = _listening(place)
        self.port: int = self._listener.getsockname()[1]
        """Of the control channel."""
        threading.Thread(target=self._accept, name="group", daemon=True).start()

    # --- who comes ---

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._greet, args=(sock,), name="hello", daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        channel = None
        try:
            channel = Channel(sock, self._rhythm)
            hello = Hello.from_json(channel.receive(HELLO_S))
            refused = self._refused(hello)
            if refused is not None:
                channel.send({"kind": "refused", "code": refused.code, "message": refused.message})
                channel.close()
                return
            with self._changed:
                member = self._members[hello.member] = Member(hello, channel)
                channel.send({"kind": "welcome", "host": self.own.host})
                channel.start(
                    lambda message: self._hear(member, message), lambda why: self._lose(member, why)
                )
                self._changed.notify_all()
        except (Closed, KeyError, TypeError, ValueError, OSError):  # a port scanner, or a member that left
            (sock if channel is None else channel).close()

    def _refused(self, hello: Hello) -> Problem | None:
        """Why this is no member of ours; None for one that is."""
        if hello.job != self.own.job:
            return Problem("another-job", "this port belongs to another job")
        if hello.asked and hello.asked != self.own.asked:
            message = (
                f"{hello.host} was started with another recipe, --set, --on, --tiny or --resume than "
                f"{self.own.host}, the first machine: start the same command on all"
            )
            return Problem("command-differs", message)
        with self._changed:
            there = self._members.get(hello.member)
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
        failed: Callable[[], Sequence[Problem]] = lambda: (),
    ) -> None:
        """Return when all members have come; MachineError (4) naming those that have not.

        failed: asked while it waits; what it names ends the waiting.
        """
        deadline, told = time.monotonic() + limit_s, time.monotonic()
        while missing := self._missing():
            if problems := failed():
                raise MachineError(list(problems))
            self.raise_if_over()
            now = time.monotonic()
            if now >= deadline:
                raise MachineError(self._did_not_come(missing, limit_s))
            if now - told >= _TOLD_S:
                told = now
                say(f"waiting for {_listed('member', missing)} of {self.place.members} on port {self.port}")
            with self._changed:
                self._changed.wait(_POLL_S)

    def _missing(self) -> list[int]:
        with self._changed:
            return [number for number in range(1, self.place.members) if number not in self._members]

    def _did_not_come(self, missing: list[int], limit_s: float) -> Problem:
        return Problem(
            "host-missing",
            f"{_listed('member', missing)} of {self.place.members} did not come within {limit_s:.0f} s "
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
        with self._changed:
            others = sorted(self._members.items())
        return [self.own, *(member.hello for _, member in others)]

    def check(self, hardware: Hardware) -> None:
        """MachineError (4) where versions differ, or where a machine has too few devices."""
        hellos, names = self.hellos(), self.names()
        problems = [*different_versions(hellos, names), *missing_devices(hellos, hardware, names)]
        if problems:
            raise MachineError(problems)

    # --- what they say ---

    def _hear(self, member: Member, message: Message) -> None:
        with self._changed:
            kind = message["kind"]
            if kind == "stop" and self._stop is None:
                self._stop = signal.Signals(message["signal"]), member.hello.member
            elif kind == "part":
                self._update(member.part, message)
            elif kind == "seen":
                member.answers.append(message)
            self._changed.notify_all()
        if kind == "stop":
            self._send_others({"kind": "stop", "signal": message["signal"]}, but=member)

    def _update(self, part: Part, message: Message) -> None:
        part.trouble = part.trouble or message.get("trouble", "")
        part.killed = part.killed or message.get("killed", "")
        part.lost |= frozenset(message.get("lost", ()))
        part.code = message.get("code", part.code)
        part.oom = message.get("oom", part.oom)
        part.log = message.get("log", part.log)

    def _lose(self, member: Member, why: str) -> None:
        with self._changed:
            member.gone = why
            self._changed.notify_all()

    def raise_if_over(self) -> None:
        """RunFailed where a member is lost; Interrupted where one was asked to stop. Between tries."""
        if self.vanished:
            raise RunFailed(self.lost_problem())
        if self._stop is not None:
            number, member = self._stop
            message = f"{number.name}: stopped by a signal to {self.names()[member]}"
            raise Interrupted(Problem("interrupted", message, hint="continue it with --resume auto"))

    def lost_problem(self, saved: str = "") -> Problem:
        """The error of a machine that was lost. saved: what there is to go on from, in words."""
        return Problem(
            HOST_LOST,
            "; ".join(part for part in (self.vanished, saved) if part),
            hint="the run was ended on all machines; look at that machine, then go on with --resume auto",
        )

    # --- a try ---

    def look(self, files: Mapping[str, str | None], limit_s: float = LOOK_S) -> None:
        """MachineError (4) where a member does not see what the head sees.

        files: path -> digest of its content, None where it only has to be there.
        """
        for member in self._present():
            member.answers.clear()
        self._send_others({"kind": "look", "files": dict(files)})
        deadline = time.monotonic() + limit_s
        while waiting := [m for m in self._present() if not m.answers]:
            self.raise_if_over()
            if time.monotonic() > deadline:
                name = self.names()[waiting[0].hello.member]
                message = f"{name} did not say within {limit_s:.0f} s whether it sees {next(iter(files))}"
                raise MachineError(
                    Problem("not-shared", message, hint="is the shared disk slow or hanging there?")
                )
            with self._changed:
                self._changed.wait(_POLL_S)
        self.raise_if_over()
        names = self.names()
        problems = [
            Problem(told["code"], told["message"].replace("{host}", names[m.hello.member]), hint=told["hint"])
            for m in self._present()
            for told in m.answers[-1]["problems"]
        ]
        if problems:
            raise MachineError(problems)

    def begin(self, order: Order) -> None:
        """Let all members start their part of a try."""
        self.raise_if_over()
        with self._changed:
            self._told, self._in_try = Said(), True
            for member in self._members.values():
                member.part = Part()
        for member in self._present():
            told = replace(order, master_addr=self.address_for(member))
            self._send(member, {"kind": "start", "order": told.to_json()})

    def address_for(self, member: Member | None = None) -> str:
        """The head's address as a member reaches it; None: as the head calls itself.

        A member on the head's own machine may have come over loopback: where others are elsewhere, it takes
        the address that they use.
        """
        with self._changed:
            addresses = [plain_address(m.channel.own_address) for _, m in sorted(self._members.items())]
        outside = [address for address in addresses if not _is_loopback(address)]
        own = None if member is None else plain_address(member.channel.own_address)
        if own is None or (_is_loopback(own) and outside):
            return (outside or addresses or ["127.0.0.1"])[0]
        return own

    def await_ended(self, limit_s: float = LEAVE_S) -> None:
        """Return when the others have ended their part of the try; who takes too long is lost."""
        deadline = time.monotonic() + limit_s
        while waiting := self._running():
            if time.monotonic() > deadline:
                for member in waiting:
                    self._lose(member, f"it did not end its ranks within {limit_s:.0f} s")
                break
            with self._changed:
                self._changed.wait(_POLL_S)
        self._in_try = False

    def described(self, interface: str) -> str:
        """For the user: where the ranks run, and over what they meet."""
        names = list(self.names().values())
        over = f" over {interface}" if interface else ""
        return f"{len(names)} members ({', '.join(names)}) meet at {self.address_for()}{over}"

    def recorded(self) -> list[dict[str, Any]]:
        """The members, for environment.json."""
        return [
            {"member": h.member, "node_rank": h.node_rank, "host": h.host, "devices": list(h.devices),
             "versions": dict(h.versions)}
            for h in self.hellos()
        ]  # fmt: skip

    def parts(self) -> dict[str, Part]:
        """Name of a member -> how its part of the last try went."""
        names = self.names()
        return {names[m.hello.member]: m.part for m in self._all()}

    def rank_codes(self, devices_per_node: int) -> dict[int, int]:
        """Rank -> exit code, of members that start one rank each."""
        found = {}
        for member in self._all():
            hello = member.hello
            place = replace(self.place, node_rank=hello.node_rank, local_task=hello.local_task)
            if place.is_one_rank and member.part.code is not None:
                found[place.ranks(devices_per_node)[0]] = member.part.code
        return found

    # --- the head's peers, see peers.py ---

    @property
    def stop(self) -> signal.Signals | None:
        return None if self._stop is None else self._stop[0]

    @property
    def trouble(self) -> str:
        return next((f"{name}: {part.trouble}" for name, part in self.parts().items() if part.trouble), "")

    @property
    def vanished(self) -> str:
        names = self.names()
        for member in self._all():
            if member.gone:
                return f"the machine {names[member.hello.member]} was lost: {member.gone}"
        return ""

    @property
    def end(self) -> str:
        return next((f"{name}: {part.killed}" for name, part in self.parts().items() if part.killed), "")

    @property
    def lost(self) -> frozenset[int]:
        return frozenset().union(*(member.part.lost for member in self._all()))

    @property
    def running(self) -> bool:
        return bool(self._running())

    def tell(self, said: Said) -> None:
        """Hand on what happened here or at a member, so that the others do not wait in vain."""
        now = Said(said.stop, said.trouble or self.trouble, (), said.killed or self.end)
        if self.vanished and not now.trouble:
            now = replace(now, trouble=self.vanished)
        before, self._told = self._told, now
        if now.stop is not None and before.stop is None:
            self._send_others({"kind": "stop", "signal": int(now.stop)})
        if now.trouble and not before.trouble:
            kind = "vanished" if self.vanished else "trouble"
            self._send_others({"kind": kind, "why": now.trouble})
        if now.killed and not before.killed:
            self._send_others({"kind": "end", "why": now.killed})

    def ask_stacks(self) -> None:
        self._send_others({"kind": "stacks"})

    # --- the end ---

    def goodbye(self, error: EffilaunchError | None) -> None:
        """Let all members leave as the head does, and listen no more."""
        problems = [] if error is None else [problem.to_json() for problem in error.problems]
        code = 0 if error is None else error.exit_code
        self._send_others({"kind": "goodbye", "code": code, "problems": problems})
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for member in self._all():
            member.channel.close()

    def _all(self) -> list[Member]:
        with self._changed:
            return [member for _, member in sorted(self._members.items())]

    def _present(self) -> list[Member]:
        return [member for member in self._all() if not member.gone]

    def _running(self) -> list[Member]:
        return [m for m in self._present() if self._in_try and m.part.code is None]

    def _send_others(self, message: Message, but: Member | None = None) -> None:
        for member in self._present():
            if member is not but:
                self._send(member, message)

    def _send(self, member: Member, message: Message) -> None:
        try:
            member.channel.send(message)
        except Closed as error:
            self._lose(member, str(error))


def _listening(place: Place) -> socket.socket:
    try:
        return listening(place.port, PORTS)
    except OSError as error:
        last = min(place.port + PORTS - 1, 65535)
        message = f"none of the ports {place.port} to {last} can be listened on: {error.strerror or error}"
        hint = "end what uses them, or name another one: --master-addr HOST:PORT, the same on all machines"
        raise MachineError(Problem("port-taken", message, hint=hint)) from None


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _listed(what: str, numbers: Iterable[int]) -> str:
    found = list(numbers)
    return f"{what}{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"
