"""What the ranks of a run are doing, judged from their status files: lost, failed, hanging, or well.

Pure but for `look`, which reads the files and asks whether the processes live. Time is counted by the
supervisor's own steps and not by the clock: neither a machine that was suspended nor one whose clock was set
makes a run hang.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.facts.status import RankStatus, is_alive, read_statuses

MINUTE = 60.0
HOUR = 60 * MINUTE
_STEPPING = ("train", "evaluate", "save")
LONGEST_LOOK_S = 5.0
"""So much time at most counts between two looks: more means that this process itself was stopped."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a rank may show no progress, in seconds, by its phase; and what follows the loss of one."""

    step: float = 5 * MINUTE
    """Least for a step, whatever its median: a batch may wait for rows that are far away."""
    first_steps: float = HOUR
    """Before there is a median: kernels are built, and a resumed stream skips the rows that it gave."""
    start: float = HOUR
    """Imports and the rendezvous: many ranks read the same packages from a slow network disk."""
    load: float = 4 * HOUR
    """Weights may have to be downloaded: 140 GB take 4 hours at 10 MB/s."""
    evaluate: float = 2 * HOUR
    """A batch, since an evaluation tells of each; metrics of the user's own come after the last one."""
    save: float = HOUR
    """Least for a checkpoint; 10 times what the plan expects, where that is more."""
    finish: float = 4 * HOUR
    """The last weights are gathered, written, and perhaps uploaded."""
    launcher_ends: float = 20.0
    """After a rank was lost its launcher ends the others; so long it has, then they are killed."""
    all_gone: float = 40.0
    """After a rank was lost: then everything is killed, a launcher included that does not leave."""
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
        least = min(steps.values())
        return [rank for rank, step in sorted(steps.items()) if step == least < max(steps.values())]


@dataclass(slots=True)
class Watch:
    """A run's ranks over time."""

    run_dir: Path
    factor: float
    """Times the median that a step may take; 0: never a hang."""
    save_s: float = 0.0
    """What the plan expects a step and a save to take at most, seconds; 0 where it does not say."""
    limits: Limits = field(default_factory=Limits)
    statuses: dict[int, RankStatus] = field(default_factory=dict)
    lost: dict[int, RankStatus] = field(default_factory=dict)
    """Ranks that vanished without a word: those of the first look that showed any."""
    lost_alone: bool = False
    """Whether no rank had said by then that it failed."""
    failed: list[int] = field(default_factory=list)
    """Ranks that ended with a code other than 0."""
    _waited: dict[int, float] = field(default_factory=dict)

    def look(self, elapsed: float) -> None:
        """Read the statuses anew. elapsed: seconds since the last look."""
        first = {rank: s for rank, s in read_statuses(self.run_dir).items() if s.host == socket.gethostname()}
        alive = {rank for rank, status in first.items() if is_alive(status)}
        # Read behind that: of a rank that no longer lives, this is the last word.
        statuses = read_statuses(self.run_dir)
        self.see({rank: statuses[rank] for rank in first if rank in statuses}, alive, elapsed)

    def see(self, statuses: Mapping[int, RankStatus], alive: Collection[int], elapsed: float) -> None:
        """Take in what the ranks last said, and which of them lived before they were asked."""
        before, self.statuses = self.statuses, dict(statuses)
        for rank, status in statuses.items():
            known = before.get(rank)
            same = known is not None and _moment(known) == _moment(status)
            counted = min(elapsed, LONGEST_LOOK_S)
            self._waited[rank] = self._waited.get(rank, 0.0) + counted if same else 0.0
        failed = [rank for rank, status in sorted(statuses.items()) if status.code not in (None, 0)]
        gone = {r: s for r, s in sorted(statuses.items()) if s.phase != "ended" and r not in alive}
        if not self.lost:  # those that go down later were ended because of these
            self.lost, self.lost_alone = gone, bool(gone) and not (failed or self.failed)
        self.failed = failed

    @property
    def in_trouble(self) -> bool:
        """Whether a rank is lost or failed, so that the others wait for it in vain."""
        return bool(self.lost or self.failed)

    @property
    def living(self) -> dict[int, RankStatus]:
        """The ranks that have not said that they ended."""
        return {rank: status for rank, status in self.statuses.items() if status.phase != "ended"}

    def hang(self) -> Hang | None:
        """A run none of whose ranks made progress within what its phase allows.

        One rank within its limit is enough: the others may be waiting for it.
        """
        living = self.living
        if self.factor <= 0 or not living or self.in_trouble:
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
                return max(limits.first_steps, limits.step)
            return max(limits.step, self.factor * status.median)
        if status.phase == "save":
            return max(limits.save, 10 * self.save_s)
        by_phase = {"start": limits.start, "load": limits.load, "evaluate": limits.evaluate}
        return by_phase.get(status.phase, limits.finish)


def _moment(status: RankStatus) -> tuple[object, ...]:
    """What changes with every progress."""
    return status.pid, status.phase, status.step, status.since


def describe_lost(lost: Mapping[int, RankStatus], how: str, logged: int) -> str:
    """One sentence: which rank, its last step and phase.

    how: `was killed by SIGKILL`. logged: the last step that the run has logged: a rank writes its status
    twice a second at most, which may be many steps.
    """
    step = {r: max(s.step, logged) if s.phase in _STEPPING else s.step for r, s in lost.items()}
    parts = [f"rank {r} (pid {s.pid}, last step {step[r]}, phase {s.phase})" for r, s in lost.items()]
    if len(parts) == 1:
        rank, status = next(iter(lost.items()))
        return f"rank {rank} (pid {status.pid}) {how}, last step {step[rank]}, phase {status.phase}"
    return f"{_and(parts)} {how.replace('was ', 'were ', 1)}"


def _and(parts: Sequence[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}"
