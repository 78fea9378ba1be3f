"""Judge the ranks of a run from their status files: lost, failed, hanging, or well; and read their stacks.

Pure but for `look`, which reads the files and asks whether the processes live. Time is counted by the
supervisor's own steps and not by the clock: neither a machine that was suspended nor one whose clock was set
makes a run hang.
"""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from launcher.execute.processes import send
from launcher.files.rank_status import RankStatus, is_alive, process_state, read_statuses

MINUTE = 60.0
HOUR = 60 * MINUTE
DAY = 24 * HOUR
_STEPPING = ("train", "evaluate", "save")
_SHOWS_BARS = ("prepare", "load", "save")
LONGEST_LOOK_S = 5.0
"""Longest time counted between two looks: more means that this process itself was stopped."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a rank may show no progress, in seconds, by its phase; and what follows the loss of one."""

    step: float = 5 * MINUTE
    """Least for a step, whatever its median: a batch may wait for rows from a slow disk or network."""
    first_steps: float = HOUR
    """Before there is a median: kernels are built, and a resumed stream skips the rows that it gave."""
    start: float = HOUR
    """Imports and the rendezvous: many ranks read the same packages from a slow network disk."""
    load: float = 4 * HOUR
    """Weights may have to be downloaded: 140 GB take 4 hours at 10 MB/s."""
    skip: float = DAY
    """The rows of a stream, up to where the run resumes, are read and encoded again."""
    evaluate: float = 2 * HOUR
    """One batch, or the user's own metrics after the last one."""
    save: float = HOUR
    """Least for a checkpoint; 10 times what the plan expects, where that is more."""
    finish: float = 4 * HOUR
    """The best weights are loaded, the last ones gathered, written and perhaps uploaded. Also for a process
    that has reported its end: it may still upload."""
    launcher_ends: float = 20.0
    """After a rank was lost: time for its launcher to end the others, then they are killed."""
    all_gone: float = 40.0
    """After a rank was lost: then everything is killed, a launcher that did not end included."""
    come: float = 10 * MINUTE
    """Nodes have so long to come: somebody may start them manually, one after the other."""
    leave: float = 5.0
    """After the launcher has ended: what it started may finish an upload."""


@dataclass(frozen=True, slots=True)
class Hang:
    """A run without progress."""

    seconds: float
    """Since the last progress of any rank."""
    limit: float
    statuses: Mapping[int, RankStatus]

    @property
    def behind(self) -> list[int]:
        """The ranks with the fewest steps, where not all have the same; else none."""
        steps = {rank: status.step for rank, status in self.statuses.items()}
        least = min(steps.values(), default=0)
        return [rank for rank, step in sorted(steps.items()) if step == least < max(steps.values())]


@dataclass(slots=True)
class Watch:
    """A run's ranks over time."""

    run_dir: Path
    factor: float
    """Times the median that a step may take; 0: never a hang."""
    save_s: float = 0.0
    """Longest step and save that the plan expects, seconds; 0 where it is unknown."""
    step_s: float = 0.0
    """Longest step that the plan expects, seconds; 0 where it is unknown."""
    limits: Limits = field(default_factory=Limits)
    own: frozenset[int] | None = None
    """The ranks of this node, whose processes are looked at; None: all that run on this host."""
    unreported: Callable[[], Mapping[int, RankStatus]] = dict
    """Living ranks that write no status, as those of a user's own command."""
    elsewhere: Mapping[int, RankStatus] = field(default_factory=dict)
    """Statuses of the ranks of other nodes, as these told: judged, too, and as alive until in `gone`."""
    gone: frozenset[int] = frozenset()
    """Ranks on other nodes that vanished, as their node reports."""
    statuses: dict[int, RankStatus] = field(default_factory=dict)
    lost: dict[int, RankStatus] = field(default_factory=dict)
    """Ranks that vanished without an error: those of the first look that showed any."""
    lost_alone: bool = False
    """Whether no rank had failed by then."""
    failed: list[int] = field(default_factory=list)
    """Ranks that ended with a code other than 0."""
    _waited: dict[int, float] = field(default_factory=dict)
    _staying: frozenset[int] = frozenset()
    """Ranks that reported their end and whose process still lives."""
    _empty_s: float = 0.0
    """Seconds without a status of any rank."""

    def look(self, elapsed: float) -> None:
        """Read the statuses of this node's ranks anew. elapsed: seconds since the last look."""
        statuses = read_statuses(self.run_dir, self.own)
        if self.own is None:
            here = socket.gethostname()
            statuses = {rank: status for rank, status in statuses.items() if status.host == here}
        alive = {rank for rank, status in statuses.items() if is_alive(status)}
        # Read after that: of a rank that is no longer alive, this is the last status.
        statuses |= read_statuses(self.run_dir, statuses.keys() - alive)
        others = {rank: status for rank, status in self.unreported().items() if rank not in statuses}
        alive |= others.keys() | (self.elsewhere.keys() - self.gone)
        self.see({**others, **statuses, **self.elsewhere}, alive, elapsed)

    def is_own(self, rank: int) -> bool:
        """Whether this node has started this rank. By its number: two nodes may have one host name."""
        return self.own is None or rank in self.own

    def see(self, statuses: Mapping[int, RankStatus], alive: Collection[int], elapsed: float) -> None:
        """Compare with the statuses before. alive: the ranks whose process lived before these were read."""
        before, self.statuses = self.statuses, dict(statuses)
        for rank, status in statuses.items():
            known = before.get(rank)
            same = known is not None and _moment(known) == _moment(status)
            counted = min(elapsed, LONGEST_LOOK_S)
            self._waited[rank] = self._waited.get(rank, 0.0) + counted if same else 0.0
        failed = [rank for rank, status in sorted(statuses.items()) if status.code not in (None, 0)]
        gone = {r: s for r, s in sorted(statuses.items()) if s.phase != "ended" and r not in alive}
        if not self.lost:  # those that vanish later were ended because of these
            self.lost, self.lost_alone = gone, bool(gone) and not (failed or self.failed)
        self.failed = failed
        self._staying = frozenset(r for r, s in statuses.items() if s.phase == "ended" and r in alive)
        self._empty_s = 0.0 if statuses else self._empty_s + min(elapsed, LONGEST_LOOK_S)

    def forgive(self) -> None:
        """Restart the counts: the ranks could not write their statuses."""
        self._waited, self._empty_s = {}, 0.0

    @property
    def in_trouble(self) -> bool:
        """Whether a rank is lost or failed, so that the others wait in vain."""
        return bool(self.lost or self.failed)

    @property
    def living(self) -> dict[int, RankStatus]:
        """The ranks that have not reported their end."""
        return {rank: status for rank, status in self.statuses.items() if status.phase != "ended"}

    def hang(self) -> Hang | None:
        """A run none of whose ranks made progress within what its phase allows.

        One rank within its limit is enough: the others may be waiting for it. If all have reported their
        end, those whose process stays count; if none has a status yet, the launcher.
        """
        if self.factor <= 0 or self.in_trouble:
            return None
        if not self.statuses and self._empty_s > self.limits.start:
            return Hang(self._empty_s, self.limits.start, {})
        living = self.living or {rank: self.statuses[rank] for rank in self._staying}
        if not living:
            return None
        if any(self._waited.get(rank, 0.0) <= self.limit(status) for rank, status in living.items()):
            return None
        waited = min(self._waited[rank] for rank in living)
        return Hang(waited, max(map(self.limit, living.values())), living)

    def limit(self, status: RankStatus) -> float:
        """Seconds that a rank in this state may go without progress."""
        limits = self.limits
        if status.phase == "train":
            if status.median is None:
                return max(limits.first_steps, limits.step, self.factor * self.step_s)
            return max(limits.step, self.factor * status.median)
        if status.phase == "save":
            return max(limits.save, 10 * self.save_s)
        by_phase = {
            # Rows may take days to encode, and only ranks of this node wait for them.
            "prepare": float("inf"),
            "start": limits.start, "load": limits.load, "skip": limits.skip, "evaluate": limits.evaluate
        }  # fmt: skip
        return by_phase.get(status.phase, limits.finish)

    @property
    def median(self) -> float | None:
        """Seconds of a step, of the slowest rank; None before any knows."""
        return max((s.median for s in self.living.values() if s.median is not None), default=None)

    @property
    def stop_s(self) -> float:
        """Seconds that a stop may take: twice the present step, and twice a save."""
        return 2 * (self.pace + self.save_s) + 5.0

    @property
    def pace(self) -> float:
        """Seconds of a step: the median or, if longer, what the present step or batch of an evaluation has
        taken so far, up to 5 minutes: more may be a hang."""
        waited = max((self._waited.get(rank, 0.0) for rank in self.living), default=0.0)
        return max(self.median or 0.0, min(waited, 5 * MINUTE))


def _moment(status: RankStatus) -> tuple[object, ...]:
    """What changes with every progress. A moving bar counts only in phases that show nothing else."""
    bar = (status.title, status.done) if status.phase in _SHOWS_BARS else ()
    return status.pid, status.phase, status.step, status.since, *bar


def describe_lost(
    lost: Mapping[int, RankStatus], how: str, logged: int, hosts: Mapping[int, str] | None = None
) -> str:
    """One sentence: which rank, its last step and phase.

    how: `was killed by SIGKILL`. hosts: rank -> its host, where the run has several. logged: the last step
    that the run has logged: a rank writes its status twice a second at most, which may be many steps.
    """
    pids, steps = {}, {}
    for rank, status in lost.items():
        pids[rank] = f"pid {status.pid}" + (f" on {hosts[rank]}" if hosts and rank in hosts else "")
        step = max(status.step, logged) if status.phase in _STEPPING else status.step
        steps[rank] = f"last step {step}, phase {status.phase}"
    if len(lost) == 1:
        (rank,) = lost
        return f"rank {rank} ({pids[rank]}) {how}, {steps[rank]}"
    parts = [f"rank {rank} ({pids[rank]}, {steps[rank]})" for rank in lost]
    return f"{', '.join(parts[:-1])} and {parts[-1]} {how.replace('was ', 'were ', 1)}"


_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_OF_A_THREAD = "_bootstrap"
"""The outermost call of every thread but the main one."""
_OUTERMOST = ("<module>", "_run_module_as_main")
"""The outermost call of the main thread: with it the dump is complete."""
_WAITING = re.compile(
    r"/torch/distributed/|/deepspeed/(?:comm|runtime)/|/torch/autograd/graph\.py|/torch/nn/parallel/"
)
"""File of the innermost call of a rank that waits for others: in a collective or DDP's backward pass."""
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3|^<frozen")
_POLL_S = 0.1
_STOPPED = ("T", "t")
STATES = {
    "T": "is stopped by a signal (state T in /proc; SIGCONT continues it)",
    "t": "is stopped by a debugger (state t in /proc)",
    "D": "hangs in the kernel (state D in /proc): a disk, the network or a driver does not answer",
}
"""State of a process that cannot write its calls -> what it means."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One call."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({'/'.join(Path(self.file).parts[-2:])}:{self.line})"


@dataclass(frozen=True, slots=True)
class CallStack:
    """The calls of a rank's main thread, the innermost first."""

    frames: tuple[Frame, ...]
    state: str = ""
    """State of its process in /proc/PID/stat if it wrote no calls; T is stopped."""

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return bool(self.frames) and bool(_WAITING.search(self.frames[0].file))

    @property
    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP, SIGTSTP) or a debugger has stopped it."""
        return self.state in _STOPPED

    def __str__(self) -> str:
        """The innermost call, and the innermost outside libraries."""
        if not self.frames:
            return "somewhere (it wrote no calls)"
        own = next((frame for frame in self.frames if not _LIBRARY.search(frame.file)), None)
        first = self.frames[0]
        return str(first) if own in (None, first) else f"{first}, called from {own}"


def read_stacks(
    run_dir: Path,
    statuses: Mapping[int, RankStatus],
    wait_s: float,
    is_own: Callable[[int], bool] = lambda rank: True,
    ask_others: Callable[[], None] = lambda: None,
) -> dict[int, CallStack]:
    """Ask the ranks for their calls; rank -> what it wrote within `wait_s` seconds.

    is_own: whether a rank runs on this node. ask_others: makes the other nodes ask theirs; called once
    the lengths of all logs are known, since such a rank may answer before this node asks its own.
    """
    logs = {rank: run_dir / "logs" / f"rank-{rank}.log" for rank in statuses}
    sizes = {rank: log.stat().st_size if log.is_file() else 0 for rank, log in logs.items()}
    ask_others()
    send([s.pid for rank, s in statuses.items() if is_own(rank) and is_alive(s)], signal.SIGUSR2)
    deadline = time.monotonic() + wait_s
    found: dict[int, CallStack] = {}
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        found = {rank: parse_stack(_text_after(logs[rank], sizes[rank])) for rank in statuses}
        if all(stack.frames and stack.frames[-1].function in _OUTERMOST for stack in found.values()):
            break
    return {
        rank: stack if stack.frames or not is_own(rank) else CallStack((), process_state(statuses[rank].pid))
        for rank, stack in found.items()
    }


def _text_after(log: Path, size: int) -> str:
    try:
        with log.open("rb") as stream:
            stream.seek(size)
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""


def parse_stack(text: str) -> CallStack:
    """The main thread's calls in a dump of all threads."""
    starts = [found.start() for found in _THREAD.finditer(text)]
    threads = [text[begin:end] for begin, end in pairwise([*starts, len(text)])]
    stacks = [
        tuple(Frame(file, int(line), function) for file, line, function in _FRAME.findall(thread))
        for thread in threads
    ]
    main = [frames for frames in stacks if frames and frames[-1].function != _OF_A_THREAD]
    return CallStack(main[-1] if main else ())
