"""The ranks of a user's own command, which report nothing: found by RANK in their environment, and judged by
output, by the work of their GPUs and, without GPUs, by their CPU time."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.execute.processes import environment_of, processes_of, tree_of
from launcher.files.rank_status import RankStatus, process_started, process_stat
from launcher.machine.gpus import utilisation

RUN_DIR = "EFFILAUNCH_RUN_DIR"
"""Environment variable of all processes of such a run: its directory."""
LOOK_S = 2.0
"""Between two looks at the processes of this machine."""
QUIET_S, DEVICES_S = 60.0, 30.0
"""After this time without output GPUs or processes are asked, and so often."""
_BUSY = 0.05
"""Share of a core from which a process computes: less is waiting, with a look at the clock."""
_PARENT, _USER, _SYSTEM = 1, 11, 12
"""Fields of /proc/PID/stat after the name."""


@dataclass(slots=True)
class Activity:
    """Who the ranks are, and when something was last seen of them."""

    run_dir: Path
    uuids: Sequence[str] = ()
    """GPUs of the run; none on a CPU."""
    busiest: Callable[[Sequence[str]], int | None] = utilisation
    clock: Callable[[], float] = time.time
    seen: dict[int, RankStatus] = field(default_factory=dict)
    """Every rank that was found, also of those that have ended."""
    world_size: int = 0
    """Of the ranks, once they are known."""
    _ranks: Mapping[int, RankStatus] = field(default_factory=dict)
    _looked: float = float("-inf")
    _asked: float = float("-inf")
    _since: float = 0.0
    _used: Mapping[int, float] = field(default_factory=dict)
    """pid -> CPU seconds at the last look at devices."""

    def ranks(self) -> Mapping[int, RankStatus]:
        """The ranks of this machine, in phase start `since` something was last seen of them."""
        now = self.clock()
        if now - self._looked >= LOOK_S:
            self._looked, pids = now, self._find_ranks()
            self._since = max(self._since or now, self._last_output())
            if now - self._since > QUIET_S and now - self._asked >= DEVICES_S:
                if self._computes(list(pids.values()), now):
                    self._since = now
                self._asked = now
            self._ranks = {rank: self._status(rank, pid) for rank, pid in sorted(pids.items())}
            self.seen |= self._ranks
        return self._ranks

    def _status(self, rank: int, pid: int) -> RankStatus:
        started = process_started(pid) or 0
        return RankStatus(rank, socket.gethostname(), pid, started, "start", 0, self._since, None, None)

    def _find_ranks(self) -> dict[int, int]:
        """Rank -> pid; of several processes the parent of the others.

        Without RANK the busiest process is rank 0.
        """
        pids = processes_of(str(self.run_dir), RUN_DIR)
        found: dict[int, list[int]] = {}
        for pid in pids:
            variables = environment_of(pid)
            if variables.get("RANK", "").isdigit() and variables.get("WORLD_SIZE", "").isdigit():
                found.setdefault(int(variables["RANK"]), []).append(pid)
                self.world_size = int(variables["WORLD_SIZE"])
        if not found:  # one process; what has left its parents is none of the command's
            pids &= tree_of([os.getpid()])
            return {0: max(pids, key=_cpu_seconds)} if pids else {}
        return {rank: min(own, key=lambda pid: (_parent(pid) in own, pid)) for rank, own in found.items()}

    def _last_output(self) -> float:
        logs = self.run_dir / "logs"
        times = [log.stat().st_mtime for log in logs.glob("*.log") if log.is_file()]
        return max(times, default=0.0)

    def _computes(self, pids: Sequence[int], now: float) -> bool:
        """Whether a GPU of the run works; where that is unknown, or on a CPU, whether a rank does."""
        percent = self.busiest(self.uuids) if self.uuids else None
        if percent is not None:
            return percent > 0
        used = {pid: _cpu_seconds(pid) for pid in pids}
        before, self._used = self._used, used
        elapsed = max(now - self._asked, 1e-9)
        return any(seconds - before.get(pid, seconds) > _BUSY * elapsed for pid, seconds in used.items())


def _parent(pid: int) -> int:
    stat = process_stat(pid)
    return int(stat[_PARENT]) if len(stat) > _PARENT else 0


def _cpu_seconds(pid: int) -> float:
    stat = process_stat(pid)
    if len(stat) <= _SYSTEM:
        return 0.0
    return (int(stat[_USER]) + int(stat[_SYSTEM])) / os.sysconf("SC_CLK_TCK")
