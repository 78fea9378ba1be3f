"""The other side of `group.py`: a process that plans nothing and supervises its own machine's ranks.

It connects to the head, says who it is, and does what it is told: it starts its part of each try, stops it,
and leaves with the head's exit code. When the head is lost it ends its ranks and leaves with 5.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import (
    DoesNotFit,
    EffilaunchError,
    Interrupted,
    MachineError,
    Problem,
    RecipeError,
    RunFailed,
)
from launcher.execute.binding import Order, bind_order
from launcher.execute.following import Ended, Start, follow
from launcher.execute.leftovers import remove_shared_buffers, remove_stale_locks, reserved_folder
from launcher.execute.nodes.group import HOST_LOST
from launcher.execute.nodes.hello import look, own_hello
from launcher.execute.nodes.peers import Said
from launcher.execute.nodes.wire import Channel, Closed, Message, Rhythm, Unproven, introduce
from launcher.execute.processes import WORKERS_LEAVE_S, send
from launcher.execute.signals import Stops
from launcher.execute.supervise import Watch
from launcher.facts.job_member import PORTS, JobMember
from launcher.facts.probe import has_killed, read_oom_kills
from launcher.facts.rank_status import is_alive

COME_S = 600.0
"""So long the head is looked for: somebody starts the machines by hand, one after the other."""
SSH_COME_S = 20.0
"""A head that has started this member listens already."""
_CONNECT_S = 5.0
_RETRY_S = 1.0
_SILENT_S = 3.0
"""A user who waits longer than this is told for what."""
_NAME_S = 60.0
"""A name that nobody knows may be that of a pod which is only starting; more often it is a slip."""
_ANSWER_S = 20.0
_GO_ON = "continue it with --resume auto"
_UNPROVEN = "something else listens there, or another version of effilaunch; name another port: HOST:PORT"
_LEAVE_S = 60.0
"""A member that is asked to stop before its first start waits so long for the head's answer. Later it leaves
only with the head: of ranks that stop, rank 0 may be the last by far, and who leaves then is lost to it."""


class MemberPeers:
    """The head, as the loop that follows this machine's ranks sees it; see peers.py."""

    def __init__(self, channel: Channel, head: str) -> None:
        self._channel, self._head = channel, head
        self.orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        """start, look, goodbye: for when nothing of this member runs."""
        self.stop: signal.Signals | None = None
        self.trouble = self.vanished = self.end = ""
        self.gone = ""
        """How the head was lost."""
        self.lost: frozenset[int] = frozenset()
        self.running = False
        self.watch: Watch | None = None
        self._told = Said()

    def begin(self, watch: Watch) -> None:
        """This member's part of a try begins."""
        self.watch, self._told = watch, Said()

    def hear(self, message: Message) -> None:
        """For the channel's thread."""
        match message["kind"]:
            case "start":  # what was said of the last try is over; what comes behind this is of the new one
                self.stop, self.trouble, self.end, self.vanished = None, "", "", self.gone
                self.orders.put(message)
            case "stop":
                self.stop = signal.Signals(message["signal"])
            case "trouble":
                self.trouble = str(message["why"])
            case "vanished":
                self.vanished = str(message["why"])
            case "end":
                self.end = str(message["why"])
            case "stacks":
                self._write_stacks()
            case _:
                self.orders.put(message)

    def lose(self, why: str) -> None:
        """For the channel's thread: the head is lost."""
        if not self.gone:
            self.gone = self.vanished = f"the first machine, {self._head}, was lost: {why}"

    def _write_stacks(self) -> None:
        watch = self.watch
        if watch is not None:
            own = [s.pid for rank, s in watch.living.items() if watch.is_own(rank) and is_alive(s)]
            send(own, signal.SIGUSR2)

    def tell(self, said: Said) -> None:
        before, self._told = self._told, said
        if said.stop is not None and before.stop is None:
            self.say({"kind": "stop", "signal": int(said.stop)})
        part = {"trouble": said.trouble, "lost": list(said.lost), "killed": said.killed}
        if (said.trouble, said.lost, said.killed) != (before.trouble, before.lost, before.killed):
            self.say({"kind": "part", **part})

    def say(self, message: Message) -> None:
        """A head that cannot be told is lost."""
        try:
            self._channel.send(message)
        except Closed as error:
            self.lose(str(error))

    def ask_stacks(self) -> None:
        """The head judges; a member never asks."""


def main(said: Mapping[str, Any]) -> int:
    """What the head starts over ssh: take part in its job; the exit code.

    What is wrong before the head was reached goes to standard output, which the head reads.
    """
    with contextlib.suppress(OSError):  # a folder that is not shared
        os.chdir(said["cwd"])
    joined = False

    def note(line: str) -> None:  # when it has joined, the head hears of everything over the connection
        nonlocal joined
        joined = True

    try:
        return serve(JobMember(**said["place"]), said["token"], note, come_s=SSH_COME_S)
    except EffilaunchError as error:
        if not joined:
            sys.stdout.write("".join(f"{p.code}: {p.message}\n" for p in error.problems))
        return error.exit_code


def serve(
    place: JobMember,
    asked: str,
    say: Callable[[str], None],
    *,
    come_s: float = COME_S,
    rhythm: Rhythm | None = None,
    waits: Callable[[str], None] | None = None,
) -> int:
    """Take part in a job until the head says goodbye: 0, or its error is raised here as well.

    asked: what head and member must both know, see greeting.py. waits: told once where the head is not there.
    MachineError (4) where the head is not found, or refuses this member; RunFailed (5) where it is lost;
    Interrupted (130) after a signal.
    """
    with Stops() as stops:
        channel, head, own = _joined(place, asked, stops, come_s, rhythm, waits)
        peers = MemberPeers(channel, head)
        say(f"member {place.member} of {place.members}: the first machine is {head}")
        channel.start(peers.hear, peers.lose)
        try:
            return _obey(place, peers, stops, channel, own.devices, say)
        finally:
            channel.close()


def _joined(
    place: JobMember,
    asked: str,
    stops: Stops,
    come_s: float,
    rhythm: Rhythm | None,
    waits: Callable[[str], None] | None,
) -> tuple[Channel, str, Any]:
    """The connection to the head of this job, the head's host, and what was said to it."""
    hello = own_hello(place, asked)
    began = time.monotonic()
    while True:
        found = _look_for_head(place, hello.to_json(), asked, rhythm)
        if not isinstance(found, _Missed):
            return *found, hello
        _pause_or_leave(stops, _RETRY_S)
        waited = time.monotonic() - began
        limit = min(come_s, _NAME_S) if found.unknown else come_s
        if waits is not None and waited > _SILENT_S:
            waits(f"waiting for {place.head}:{place.port}, up to {limit:.0f} s ({found.why})")
            waits = None
        if waited > limit:
            raise MachineError(_missing(place, found, limit))


@dataclass(frozen=True, slots=True)
class _Missed:
    """The head of this job was not met this time."""

    why: str
    unknown: bool = False
    """No machine is known by its name."""


def _look_for_head(
    place: JobMember, hello: dict[str, Any], asked: str, rhythm: Rhythm | None
) -> tuple[Channel, str] | _Missed:
    """The connection to the head, and its host. RecipeError (2), MachineError (4) where it refuses."""
    why = ""
    refused: EffilaunchError | None = None
    for port in range(place.port, place.port + PORTS):
        try:
            channel = Channel(socket.create_connection((place.head, port), _CONNECT_S), rhythm)
        except (OSError, UnicodeError) as error:  # the second: what could be no name
            said = getattr(error, "strerror", None) or str(error)
            why = why or f"{place.head}:{port}: {said}"
            if isinstance(error, UnicodeError) or getattr(error, "errno", None) == socket.EAI_NONAME:
                return _Missed(why, unknown=True)
            if isinstance(error, TimeoutError | socket.gaierror):
                break  # the other ports would not answer either
            continue
        try:
            answer = introduce(channel, hello, asked, _ANSWER_S)
        except Closed as error:
            why = f"{place.head}:{port} is no head of this job: {error}"
            if isinstance(error, Unproven):
                refused = refused or MachineError(Problem("head-unproven", why, hint=_UNPROVEN))
            channel.close()
            continue
        if answer["kind"] == "welcome":
            return channel, str(answer.get("host"))
        channel.close()
        if answer.get("code") != "another-job":  # or another run on these machines: ours is behind it
            refused = refused or RecipeError(Problem(str(answer.get("code")), str(answer.get("message"))))
        why = f"{place.head}:{port}: {answer.get('message')}"
    if refused is not None:
        raise refused
    return _Missed(why)


def _missing(place: JobMember, missed: _Missed, waited: float) -> Problem:
    message = f"the first machine was not found within {waited:.0f} s: "
    if missed.unknown:
        message += f"no machine is known here as {place.head}"
        hint = f"`getent hosts {place.head}` asks for it; --master-addr takes an address, too"
    else:
        message += missed.why
        hint = "start the same command there with --node-rank 0; a firewall must let this one reach it"
    return Problem("head-missing", message, hint=hint)


def _pause_or_leave(stops: Stops, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if stops.first is not None:
            raise Interrupted(Problem("interrupted", f"{stops.first.name}: stopped before the run began"))
        time.sleep(0.1)


def _obey(
    place: JobMember,
    peers: MemberPeers,
    stops: Stops,
    channel: Channel,
    devices: tuple[str, ...],
    say: Callable[[str], None],
) -> int:
    asked_at: float | None = None
    leave_s = _LEAVE_S
    while True:
        try:
            message = peers.orders.get(timeout=0.2)
        except queue.Empty:
            if stops.first is not None and asked_at is None:
                asked_at = time.monotonic()
                peers.say({"kind": "stop", "signal": int(stops.first)})
            overdue = asked_at is not None and time.monotonic() - asked_at > leave_s
            if stops.first is not None and (peers.gone or stops.at_once or overdue):
                left = f"{stops.first.name}: left the job" + (f"; {peers.gone}" if peers.gone else "")
                raise Interrupted(Problem("interrupted", left, hint=_GO_ON)) from None
            if peers.gone:
                raise RunFailed(_head_lost(peers)) from None
            continue
        match message["kind"]:
            case "goodbye":
                return _leave(message)
            case "look":
                peers.say({"kind": "seen", "problems": look(message["files"])})
            case "start":
                leave_s = math.inf
                _take_part(place, peers, Order.from_json(message["order"]), devices, say)


def _leave(message: Message) -> int:
    code = int(message["code"])
    problems = [Problem(**problem) for problem in message["problems"]]
    if code == 0:
        return 0
    kinds: dict[int, type[EffilaunchError]] = {
        kind.exit_code: kind for kind in (RecipeError, DoesNotFit, MachineError, RunFailed, Interrupted)
    }
    raise kinds.get(code, EffilaunchError)(problems)


def _head_lost(peers: MemberPeers) -> Problem:
    hint = "what this machine ran of it was ended; look at that machine, then go on with --resume auto"
    return Problem(HOST_LOST, peers.gone, hint=hint)


def _holding_nvme(place: JobMember, order: Order) -> contextlib.AbstractContextManager[object]:
    """This machine's folder of an offload: the head holds its own, and one member a machine does here."""
    if order.nvme is None or place.node_rank == 0 or place.local_task != 0:
        return contextlib.nullcontext()
    return reserved_folder(Path(order.nvme))


def _take_part(
    place: JobMember, peers: MemberPeers, order: Order, devices: tuple[str, ...], say: Callable[[str], None]
) -> None:
    """Start this machine's ranks and follow them to their end; the head is told how they ended."""
    run_dir = Path(order.run_dir)
    own = frozenset(place.ranks(order.devices_per_node))
    watch = Watch(run_dir, 0.0, order.save_s, 0.0, order.limits, own=own)
    peers.begin(watch)
    log = run_dir / "logs" / f"launcher-{place.member}.log"
    before = read_oom_kills()
    try:
        bound = bind_order(order, place, devices)
        for build_lock in remove_stale_locks(bound.env):
            say(f"removed {build_lock}: a killed build left it, and every later build would wait for it")
        start = Start(
            bound.argv, bound.env, log, say, stop_s=order.stop_s, orphaned_s=WORKERS_LEAVE_S,
            master_port=order.master_port, watch=watch, peers=peers,
        )  # fmt: skip
        remove_shared_buffers(order.master_port)
        with _holding_nvme(place, order):
            ended = follow(start)
    except (OSError, EffilaunchError) as error:  # such as a variable that is not set here
        ended = Ended(code=1, killed=f"it could not be started: {error}")
        peers.say({"kind": "part", "trouble": ended.killed})
    finally:
        remove_shared_buffers(order.master_port)
    oom = has_killed(before, read_oom_kills())
    peers.say({"kind": "part", "code": ended.code, "oom": oom, "log": log.name})
