"""Start a command, follow it and its descendants to their end, stop them when asked, and leave no process."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

from launcher.execute.nodes import Part, Peers, Said
from launcher.execute.output import LogFile, Output, Report, errors_in, unwritable_by
from launcher.execute.processes import (
    KILL_S,
    RUN,
    command_of,
    guarded,
    kill_all,
    marks,
    processes_of,
    send,
    tree_of,
)
from launcher.execute.signals import Stops
from launcher.execute.supervise import CallStack, Hang, Watch, read_stacks
from launcher.files.rank_status import RankStatus, is_alive, read_stage
from launcher.files.redaction import line_hider, secret_values
from launcher.files.safe_files import is_dir
from launcher.machine.node_facts import HOST_LOST

Look = Callable[[Mapping[int, RankStatus]], None]
"""Receives the latest statuses of the ranks twice a second; a process that is no rank reports as rank 0."""


def blind(statuses: Mapping[int, RankStatus]) -> None:
    """Shows nothing."""


POLL_S = 0.5
_ENDED_POLL_S = 0.1
"""The same when the launcher has ended."""
_LEAVE_S = 5.0
"""After a process without ranks has ended: what it started may finish."""
_LONG_STEP_S = 10.0
"""A stop that takes longer is explained to the user."""
_HELD_S = 1.0
"""Delay of a traceback on the screen: it may only tell that a rank is lost, which is noticed within that
time."""
_STACKS_S = 10.0
"""Time for a rank to write its stack; seconds on a busy machine."""
VANISHED_S = 25.0
"""After a node was lost: time for the other ranks to save, then they are killed."""
_LAST_LINES_S = 2.0
"""After everything ended: a pipe that is still open then is held by somebody else."""


class _NoPeers:
    """The other nodes of a run that has one node."""

    stop = None
    trouble = vanished = end = ""
    lost: frozenset[int] = frozenset()
    statuses: Mapping[int, RankStatus] = MappingProxyType({})
    running = False

    def tell(self, said: Said) -> None:
        """Nobody is there."""

    def ask_stacks(self) -> None:
        """Nobody is there."""

    def wants_stacks(self) -> bool:
        """Nobody is there."""
        return False


NO_PEERS: Peers = _NoPeers()


@dataclass(frozen=True, slots=True)
class Start:
    """What is started, and how it is supervised."""

    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path
    """Gets all output."""
    echo: Callable[[str], None]
    stop_s: float
    """How long it may take to stop, once asked, before it is killed."""
    orphaned_s: float
    """How long it may live on when this process is killed."""
    master_port: int = 0
    lock: int | None = None
    """Descriptor of the run directory's lock."""
    watch: Watch | None = None
    """None for a process without ranks."""
    judge_step: Callable[[float], str] = lambda step_s: ""
    """A note on the duration of a step for the user; called once, when the ranks know it."""
    peers: Peers = NO_PEERS
    """The other nodes of the run."""
    passes_on: Collection[signal.Signals] = ()
    """Signals that ranks get as they came; others become SIGTERM."""
    stage: str = ""
    """Of a process without ranks: the name under which it reports its progress."""
    look: Look = blind


@dataclass(slots=True)
class Ended:
    """How it went."""

    code: int = 0
    """Of the launcher; negative: a signal."""
    stopped_by: signal.Signals | None = None
    killed: str = ""
    """Why this process killed what was left; empty where it did not."""
    watch: Watch | None = None
    hang: Hang | None = None
    stopped_elsewhere: bool = False
    """Whether only other nodes of the run were asked to stop."""
    left: Sequence[str] = ()
    """Processes that were ended, or asked to, after the launcher had ended: their command lines."""
    asked: bool = False
    """Whether this process asked ranks to stop whose launcher had ended."""
    elsewhere: Mapping[str, Part] = field(default_factory=dict)
    """Hosts of the other nodes -> how their part of the run went."""
    stacks: Mapping[int, CallStack] = field(default_factory=dict)
    """Where each rank stood when the run hung."""
    reports: Sequence[Report] = ()
    """Errors that processes reported in their output: of the agent of this node, and of those that could
    write no file."""

    @property
    def lost_node(self) -> str:
        """Which node was lost, as the agent of this one noticed; empty where none was."""
        problems = [problem for report in self.reports for problem in report.problems]
        return next((problem.message for problem in problems if problem.code == HOST_LOST), "")


def follow(start: Start, when_hanging: Callable[[], None] | None = None) -> Ended:
    """Start a command in a session of its own and return when it and all its descendants have ended.

    when_hanging: called when a hang was found, before anything is killed. Whatever ends this call, an
    exception included, no process of the start outlives it.
    """
    own = marks()
    with (
        LogFile(start.log, start.echo) as log,
        guarded(own[RUN], start.log.parent.parent, start.orphaned_s, start.master_port, start.lock),
        Stops() as stops,
    ):
        process = _started(start, own)
        assert process.stdout is not None, "stdout is a pipe"
        hide = line_hider(secret_values(start.env))
        # Of several nodes, node rank 0 prints one error: here the errors of own ranks are not hidden.
        told = partial(errors_in, start.log.parent) if start.peers is NO_PEERS else tuple
        output = Output(process.stdout, log, start.echo, hide, told)
        following = _Following(start, process, output, stops, own[RUN], when_hanging)
        try:
            following.until_it_ends()
        finally:
            kill_all(own[RUN])
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
                process.wait(KILL_S)
            output.close()
            process.stdout.close()
    return following.ended


def _started(start: Start, own: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with _ignored(signal.SIGUSR1):
        return subprocess.Popen(
            list(start.argv),
            env={**start.env, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@contextlib.contextmanager
def _ignored(number: signal.Signals) -> Iterator[None]:
    """Processes started meanwhile ignore this signal: schedulers send it to all, and it kills launchers."""
    handler = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, handler)


@dataclass(slots=True)
class _Following:
    """The loop, and what it knows."""

    start: Start
    process: subprocess.Popen[bytes]
    output: Output
    stops: Stops
    token: str
    when_hanging: Callable[[], None] | None
    ended: Ended = field(default_factory=Ended)
    _looked: float = field(default_factory=time.monotonic)
    _trouble_at: float | None = None
    _kill_at: float = float("inf")
    """When everything that is left is killed."""
    _why: str = ""
    _workers_killed: bool = False
    _over: bool = False
    _killed_for: str = ""
    _noted: set[str] = field(default_factory=set)
    """What is done or printed once only."""

    def until_it_ends(self) -> None:
        """Return when the launcher and all that it started have ended, or had to be killed."""
        self.ended.watch, self.ended.reports = self.start.watch, self.output.reports
        while self.process.poll() is None and not self._over:
            self._turn()
        self._look()
        self._answer_peers()
        if not self._over:
            self._wait_for_the_rest()
        self._answer_peers()
        while self.start.peers.running and not self._over:  # ranks on other nodes
            self._turn()
        # A launcher that prints how a rank ended does so last.
        until = time.monotonic() + _LAST_LINES_S
        while not self.output.ended and time.monotonic() < until:
            self.output.copy(0.1)
        self.output.release(0.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.ended.code = self.process.wait(KILL_S)

    def _turn(self) -> None:
        """Half a second of the loop."""
        if not self.output.copy(POLL_S) and self.output.ended:
            time.sleep(POLL_S if self.process.poll() is None else _ENDED_POLL_S)
        self._answer_signals()
        self._answer_peers()
        if time.monotonic() - self._looked >= POLL_S:
            self._look()
            self._answer_trouble()
            self._answer_hang()
        if time.monotonic() > self._kill_at:
            self._kill(self._why)

    def _wait_for_the_rest(self) -> None:
        """The launcher has ended: by itself, or because somebody killed it."""
        watch = self.start.watch
        leave = _LEAVE_S if watch is None else watch.limits.leave
        if workers := self._living_workers():
            self.ended.left = [command_of(pid) for pid in workers]
            self._set_limit(self._stop_s(), "it did not end when its launcher had")
            if self.stops.first is None:
                self.ended.asked = True
                self._stop_workers()
        while processes_of(self.token) and not self._over:
            if not self._living_workers():
                self._set_limit(leave, "")
            self._turn()

    def _is_first(self, what: str) -> bool:
        """Whether this is asked for the first time."""
        is_first = what not in self._noted
        self._noted.add(what)
        return is_first

    def _look(self) -> None:
        now, watch, logs = time.monotonic(), self.start.watch, self.start.log.parent
        if watch is not None:
            watch.gone, watch.elsewhere = self.start.peers.lost, self.start.peers.statuses
            watch.look(now - self._looked)
            if watch.lost and self.ended.stopped_by is None:
                self.output.silence("a rank was lost")
            if watch.median is not None and self._is_first("step"):
                text = self.start.judge_step(watch.median)
                if text:
                    self.start.echo(text)
        self.output.release(_HELD_S)
        self._show()
        if not is_dir(logs) and self._is_first("run directory"):
            self.start.echo(f"WARNING: the run directory {logs.parent} is gone: the next save ends the run")
        self._looked = now

    def _show(self) -> None:
        """Show the progress; an error in it does not end the run."""
        if "no display" in self._noted:
            return
        try:
            if self.start.watch is not None:
                self.start.look(self.start.watch.statuses)
            elif self.start.stage:
                status = read_stage(self.start.log.parent.parent, self.start.stage)
                self.start.look({} if status is None else {0: status})
        except Exception as error:
            self._noted.add("no display")
            self.start.echo(f"the progress is no longer shown: {type(error).__name__}: {error}")

    def _set_limit(self, seconds: float, why: str) -> None:
        at = time.monotonic() + seconds
        if at < self._kill_at:
            self._kill_at, self._why = at, why

    def _answer_signals(self) -> None:
        number = self.stops.first or self.start.peers.stop
        if number is None:
            return
        if self.ended.stopped_by is None:
            self.ended.stopped_by = number
            self._look()
            where = " on another node" if self.stops.first is None else ""
            self.start.echo(
                f"{number.name}{where}: {self._stop_workers(number)}; press Ctrl-C again to stop at once"
            )
            self._set_limit(self._stop_s(), f"it took more than {self._stop_s():.0f} s to stop")
        self.ended.stopped_elsewhere = self.stops.first is None
        if self.stops.at_once:
            self._kill("a second signal asked to stop at once")

    def _answer_peers(self) -> None:
        """Report to the other nodes what happened here, and follow what they report."""
        peers = self.start.peers
        self._report()
        if peers.vanished and self._is_first("vanished"):
            self.start.echo(f"{peers.vanished}: ending the ranks of this node")
            self._stop_workers()
            self._set_limit(VANISHED_S, peers.vanished)
        if peers.wants_stacks():
            send(self._living_workers(), signal.SIGUSR2)
        if (lost := self.ended.lost_node) and not self._over:
            self.start.echo(f"{lost}: ending the ranks of this node")
            self._kill(lost)
        if peers.end and not self._over:
            self._look()  # before this node's own ranks are gone too
            self._kill(peers.end)

    def _report(self) -> None:
        """Tell the other nodes. One that has lost another may be alone; the others notice it themselves."""
        if self.process.poll() is not None:  # what its agent wrote last
            until = time.monotonic() + _LAST_LINES_S
            while self.output.copy(0.0) and time.monotonic() < until:
                pass
        if self.ended.lost_node:
            return
        watch = self.start.watch
        lost = () if watch is None else tuple(rank for rank in watch.lost if watch.is_own(rank))
        ranks = {} if watch is None else {r: s for r, s in watch.statuses.items() if watch.is_own(r)}
        stop = None if self.ended.stopped_elsewhere else self.ended.stopped_by
        self.start.peers.tell(Said(stop, self._own_trouble(), lost, self._killed_for, ranks))

    def _own_trouble(self) -> str:
        """Why the ranks of the other nodes wait in vain for those of this one."""
        watch, code = self.start.watch, self.process.poll()
        if watch is not None and watch.lost:
            return f"rank {min(watch.lost)} was lost"
        if watch is not None and watch.failed:
            return f"rank {watch.failed[0]} failed"
        if self.ended.hang is not None:
            return "the run made no progress"
        return f"the launcher ended with exit code {code}" if code and self.ended.stopped_by is None else ""

    def _stop_workers(self, asked: signal.Signals = signal.SIGTERM) -> str:
        """Ask all ranks to stop; what they will do. Their launcher, asked, would kill them after 30 s."""
        workers = self._living_workers()
        number = asked if asked in self.start.passes_on else signal.SIGTERM
        send(workers or processes_of(self.token), number)
        watch = self.start.watch
        if not workers or watch is None or not any(s.step > 0 for s in watch.living.values()):
            return "stopping"
        long = f" (a step takes {watch.pace:.0f} s)" if watch.pace >= _LONG_STEP_S else ""
        return f"stopping after a step with a checkpoint{long}"

    def _stop_s(self) -> float:
        """How long a stop may take: by the measured steps, where they are longer than was planned."""
        watch = self.start.watch
        return self.start.stop_s if watch is None else max(self.start.stop_s, watch.stop_s)

    def _living_workers(self) -> list[int]:
        watch = self.start.watch
        if watch is None:
            return []
        return [s.pid for rank, s in watch.living.items() if watch.is_own(rank) and is_alive(s)]

    def _answer_trouble(self) -> None:
        """A rank is gone: its launcher ends the others, or they are killed, in the end the launcher too."""
        watch, elsewhere = self.start.watch, bool(self.start.peers.trouble)
        if watch is None or not (watch.in_trouble or elsewhere):
            return
        only_lost = not (watch.failed or elsewhere)
        if only_lost and self._disk_is_full(watch, "its launcher knows whether a rank is lost"):
            return  # a rank that ended well could not write that
        if self._trouble_at is None:
            self._trouble_at = time.monotonic()
            self._set_limit(watch.limits.all_gone, "a rank was gone, and its launcher did not end")
        elif not self._workers_killed and time.monotonic() - self._trouble_at > watch.limits.launcher_ends:
            self._workers_killed = True
            send(tree_of(self._living_workers()), signal.SIGKILL)

    def _answer_hang(self) -> None:
        watch = self.start.watch
        hang = None if watch is None or self.ended.hang is not None else watch.hang()
        if watch is None or hang is None:
            return
        if self._disk_is_full(watch, "not a hang"):
            watch.forgive()
            return
        self.ended.hang = hang
        self.start.echo(f"no progress for {hang.seconds:.0f} s: asking each rank for its calls")
        self.ended.stacks = read_stacks(
            watch.run_dir, hang.statuses, _STACKS_S, watch.is_own, self.start.peers.ask_stacks
        )
        if self.when_hanging is not None:
            self.when_hanging()
        self._kill("it made no progress")

    def _disk_is_full(self, watch: Watch, consequence: str) -> bool:
        """Whether the ranks cannot write their statuses; printed once, with what follows from it."""
        full = unwritable_by(watch.run_dir / "logs")
        if full is not None and self._is_first("full disk"):
            self.start.echo(f"nothing can be written ({full}), not even the ranks' statuses: {consequence}")
        return full is not None

    def _kill(self, why: str) -> None:
        self._over, self._killed_for = True, why or "nothing was left to wait for"
        self._report()
        if self.process.poll() is not None:
            self.ended.left = [*map(command_of, sorted(processes_of(self.token)))] or self.ended.left
        if self._living_workers() or self.process.poll() is None:  # else only what they had started was left
            self.ended.killed = why
        left = kill_all(self.token)
        if left:
            self.start.echo(f"processes {sorted(left)} cannot be killed: they hang in the kernel")
