"""The head's side of a job over several machines: what the members are told, and what they say.

Threads take in what they say; the head's own loop (`following.py`) asks for it every half second.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from launcher.errors import EffilaunchError, Interrupted, MachineError, Problem, RunFailed
from launcher.execute.binding import Order
from launcher.execute.channel import Message, Rhythm
from launcher.execute.members import HOST_MISSING, POLL_S, Member, Members, listed
from launcher.execute.peers import Part, Said
from launcher.facts.place import Place

HOST_LOST = "host-lost"
"""Code of the problem of a machine that was lost."""
LOOK_S = 60.0
"""So long a member has to look for a file; a slow network disk may need some of it."""
LEAVE_S = 60.0
"""So long the others have to end their part of a try when the head's has ended."""


class Group:
    """The members of a job but this one, the head. Entered once for a command, it serves all its tries."""

    def __init__(self, place: Place, asked: str, rhythm: Rhythm | None = None) -> None:
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
