"""Who takes part in a job: the head listens, greets the members that come, and knows them from then on."""

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
from launcher.execute.nodes.hello import (
    Hello,
    different_versions,
    missing_devices,
    one_machine_twice,
    own_hello,
    smaller_devices,
)
from launcher.execute.nodes.peers import Part, Said
from launcher.execute.nodes.wire import (
    Channel,
    Closed,
    Message,
    Rhythm,
    Unproven,
    ask_for_proof,
    listening,
    plain_address,
)
from launcher.facts.hardware import Hardware
from launcher.facts.job_member import PORTS, JobMember

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
        self, place: JobMember, asked: str, hear: Callable[[Member, Message], None], rhythm: Rhythm | None
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


def _listening(place: JobMember) -> socket.socket:
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


HOST_LOST = "host-lost"
"""Code of the problem of a machine that was lost."""
LOOK_S = 60.0
"""So long a member has to look for a file; a slow network disk may need some of it."""
LEAVE_S = 60.0
"""So long the others have to end their part of a try when the head's has ended."""


class Group:
    """The members of a job but this one, the head. Entered once for a command, it serves all its tries."""

    def __init__(self, place: JobMember, asked: str, rhythm: Rhythm | None = None) -> None:
        """asked: what all members must know, see greeting.py; a digest of what the command was given."""
        self.place = place
        self.linger_s = 0.0
        """So long members that come late get the goodbye; those that nobody starts look for this one."""
        self.say: Callable[[str], None] = lambda line: None
        self._ended = False
        self._stop: tuple[signal.Signals, int] | None = None
        self._in_try = False
        self._told: Said = Said()
        self.members = Members(place, asked, self._hear, rhythm)

    def await_all(
        self,
        limit_s: float,
        say: Callable[[str], None],
        failed: Callable[[], Sequence[Problem]] = lambda: (),
    ) -> None:
        """Return when all members have come; MachineError (4) naming those that have not.

        failed: asked while it waits; what it names ends the waiting. RunFailed and Interrupted as
        `raise_if_over`.
        """

        def check() -> None:
            if problems := failed():
                raise MachineError(list(problems))
            self.raise_if_over()

        self.members.await_all(limit_s, say, check)

    # --- what they say ---

    def _hear(self, member: Member, message: Message) -> None:
        with self.members.changed:
            kind = message["kind"]
            if kind == "stop" and self._stop is None:
                self._stop = signal.Signals(message["signal"]), member.hello.member
            elif kind == "part":
                self._update(member.part, message)
            elif kind == "seen":
                member.answers.append(message)
            self.members.changed.notify_all()
        if kind == "stop":
            self.members.send({"kind": "stop", "signal": message["signal"]}, but=member)

    def _update(self, part: Part, message: Message) -> None:
        if message.get("trouble") and not part.trouble:
            part.first = not (self._told.trouble or self.trouble or self.vanished)
            part.trouble = message["trouble"]
        part.killed = part.killed or message.get("killed", "")
        part.lost |= frozenset(message.get("lost", ()))
        part.code = message.get("code", part.code)
        part.oom = message.get("oom", part.oom)
        part.log = message.get("log", part.log)

    def raise_if_over(self) -> None:
        """Interrupted where a member was asked to stop; RunFailed where one is lost. Between tries.

        Who was asked to stop may leave: that is no loss.
        """
        if self._stop is not None:
            number, member = self._stop
            message = f"{number.name}: stopped by a signal to {self.members.names()[member]}"
            raise Interrupted(Problem("interrupted", message, hint="continue it with --resume auto"))
        if self.vanished:
            raise RunFailed(self.lost_problem())

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
        for member in self.members.present():
            member.answers.clear()
        self.members.send({"kind": "look", "files": dict(files)})
        deadline = time.monotonic() + limit_s
        while waiting := [m for m in self.members.present() if not m.answers]:
            self.raise_if_over()
            if time.monotonic() > deadline:
                name = self.members.names()[waiting[0].hello.member]
                message = f"{name} did not say within {limit_s:.0f} s whether it sees {next(iter(files))}"
                hint = "is the shared disk slow, or does it hang there?"
                raise MachineError(Problem("not-shared", message, hint=hint))
            with self.members.changed:
                self.members.changed.wait(POLL_S)
        self.raise_if_over()
        names = self.members.names()
        problems = [
            Problem(told["code"], told["message"].replace("{host}", names[m.hello.member]), hint=told["hint"])
            for m in self.members.present()
            for told in m.answers[-1]["problems"]
        ]
        if problems:
            raise MachineError(problems)

    def begin(self, order: Order) -> None:
        """Let all members start their part of a try."""
        self.raise_if_over()
        with self.members.changed:
            self._told, self._in_try = Said(), True
            for member in self.members.all():
                member.part = Part()
        for member in self.members.present():
            told = replace(order, master_addr=self.members.address_for(member))
            self.members.send_to(member, {"kind": "start", "order": told.to_json()})

    def await_ended(self, limit_s: float = LEAVE_S) -> None:
        """Return when the others have ended their part of the try; who takes too long is lost."""
        deadline = time.monotonic() + limit_s
        while waiting := self._running():
            if time.monotonic() > deadline:
                for member in waiting:
                    self.members.lose(member, f"it did not end its ranks within {limit_s:.0f} s")
                break
            with self.members.changed:
                self.members.changed.wait(POLL_S)
        self._in_try = False

    def described(self, interface: str) -> str:
        """For the user: where the ranks run, and over what they meet."""
        names = list(self.members.names().values())
        over = f" over {interface}" if interface else ""
        return f"{len(names)} members ({', '.join(names)}) meet at {self.members.address_for()}{over}"

    def recorded(self) -> list[dict[str, Any]]:
        """The members, for environment.json."""
        return [
            {"member": h.member, "node_rank": h.node_rank, "host": h.host, "devices": list(h.devices),
             "versions": dict(h.versions)}
            for h in self.members.hellos()
        ]  # fmt: skip

    def parts(self) -> dict[str, Part]:
        """Name of a member -> how its part of the last try went."""
        names = self.members.names()
        return {names[m.hello.member]: m.part for m in self.members.all()}

    def rank_codes(self, devices_per_node: int, own: int) -> dict[int, int]:
        """Rank -> exit code, where each member starts one rank. own: this member's code."""
        if not self.place.is_one_rank:
            return {}
        found = {self.place.ranks(devices_per_node)[0]: own}
        for member in self.members.all():
            hello = member.hello
            place = replace(self.place, node_rank=hello.node_rank, local_task=hello.local_task)
            if member.part.code is not None:
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
        names = self.members.names()
        for member in self.members.all():
            if member.gone:
                return f"the machine {names[member.hello.member]} was lost: {member.gone}"
        return ""

    @property
    def end(self) -> str:
        return next((f"{name}: {part.killed}" for name, part in self.parts().items() if part.killed), "")

    @property
    def lost(self) -> frozenset[int]:
        return frozenset().union(*(member.part.lost for member in self.members.all()))

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
            self.members.send({"kind": "stop", "signal": int(now.stop)})
        if now.trouble and not before.trouble:
            kind = "vanished" if self.vanished else "trouble"
            self.members.send({"kind": kind, "why": now.trouble})
        if now.killed and not before.killed:
            self.members.send({"kind": "end", "why": now.killed})

    def ask_stacks(self) -> None:
        self.members.send({"kind": "stacks"})

    # --- the end ---

    def goodbye(self, error: EffilaunchError | None) -> None:
        """Let all members leave as the head does, and listen no more. What is said first counts.

        Where some have not come yet they are listened for: not behind a signal, which was meant for all, nor
        when they were waited for in vain.
        """
        if self._ended:
            return
        self._ended = True
        problems = [] if error is None else [problem.to_json() for problem in error.problems]
        code = 0 if error is None else error.exit_code
        in_vain = isinstance(error, Interrupted) or any(p["code"] == HOST_MISSING for p in problems)
        goodbye = {"kind": "goodbye", "code": code, "problems": problems}
        linger_s = 0.0 if in_vain else self.linger_s
        if linger_s and (missing := self.members.missing()):
            why = problems[0]["code"] if problems else "nothing is left to do"
            who = listed("member", missing)
            self.say(f"the run is over ({why}): up to {linger_s:.0f} s for {who}, not here yet, to be told")
        self.members.end(goodbye, linger_s)

    def _running(self) -> list[Member]:
        return [m for m in self.members.present() if self._in_try and m.part.code is None]
