"""What the nodes of a run tell each other besides the training: orders, stops, failures, the end.

Each node's `effilaunch` has a file in RUN_DIR/.nodes, which the others read: node rank 0 those of all, the
others that of node rank 0, which passes on what it reads. The statuses of its ranks are in it, so that node
rank 0 reads one file per node, and not one per rank of the job. The ranks meet through torchrun
(launcher/train/agent.py), which also notices nodes that are lost. A file that does not change for SILENT_S
seconds is that of an `effilaunch` that was killed or stopped.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

from launcher.errors import EffilaunchError, Interrupted, Problem, RunFailed
from launcher.execute.binding import Order
from launcher.execute.run_dir import NODES
from launcher.files.rank_status import RankStatus, as_status
from launcher.files.safe_files import parse_json, write_text
from launcher.machine.job_member import JobMember
from launcher.machine.node_facts import HOST_LOST

BEAT_S, SILENT_S = 3.0, 30.0
LEAVE_S = 60.0
"""After the end of node rank 0's part of an attempt the others must end theirs within this time."""
RANKS_S = 1.0
"""Between two writes of a node's file for the steps of its ranks."""
_LOOK_S = 0.4
_SLOWEST = 8
"""With a task for each rank each task has a file: the tasks of a node, up to so many, write and read as often
as one task that starts all its ranks. A look has to come several times within SILENT_S."""
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Said:
    """What a node tells the others of its part of an attempt; each value is set once and stays."""

    stop: signal.Signals | None = None
    """Somebody asked it to stop."""
    trouble: str = ""
    """Why the ranks elsewhere wait in vain."""
    lost: tuple[int, ...] = ()
    """Its ranks that vanished without an error."""
    killed: str = ""
    """Why it killed its ranks."""
    ranks: Mapping[int, RankStatus] = field(default_factory=dict)
    """Statuses of its ranks; these change."""


@dataclass(slots=True)
class Part:
    """A node's part of an attempt, as far as it has told."""

    trouble: str = ""
    first: bool = False
    """Whether all was well everywhere else when its trouble was told."""
    lost: frozenset[int] = frozenset()
    killed: str = ""
    code: int | None = None
    """Of its launcher; None while it runs."""
    oom: bool | None = None
    """Whether the kernel killed processes there for their memory; None where nobody can tell."""
    log: str = ""
    cut_off: bool = False
    """Whether it no longer reaches node rank 0."""


class Peers(Protocol):
    """The other nodes, asked every half second while a start is followed."""

    @property
    def stop(self) -> signal.Signals | None:
        """What another one was asked to stop with."""

    @property
    def trouble(self) -> str:
        """Why the ranks here wait in vain; empty where all is well elsewhere."""

    @property
    def vanished(self) -> str:
        """Which node is lost, and how; empty while all are there."""

    @property
    def end(self) -> str:
        """Why everything that runs here is to be killed now; empty while it is not."""

    @property
    def lost(self) -> frozenset[int]:
        """Ranks elsewhere that vanished without an error."""

    @property
    def statuses(self) -> Mapping[int, RankStatus]:
        """The last statuses of the ranks elsewhere, on node rank 0."""

    @property
    def running(self) -> bool:
        """Whether ranks elsewhere have to be waited for."""

    def tell(self, said: Said) -> None:
        """Tell the others what happened here."""

    def ask_stacks(self) -> None:
        """Let the ranks elsewhere write where they stand, into their logs."""

    def wants_stacks(self) -> bool:
        """Whether the ranks here are to do so; true once for each time that it was asked."""


@dataclass(slots=True)
class _Seen:
    """The file of another node."""

    values: dict[str, Any] = field(default_factory=dict)
    changed_at: float = 0.0

    @property
    def host(self) -> str:
        return str(self.values.get("host", "?"))

    @property
    def is_silent(self) -> bool:
        return time.monotonic() - self.changed_at > SILENT_S


class Nodes:
    """The other nodes of a run, as the `effilaunch` of one of them sees them."""

    def __init__(self, place: JobMember, run_dir: Path, asked: str) -> None:
        """asked: a digest of the recipe and options, which all nodes must share."""
        self.place, self.asked, self.run_dir = place, asked, run_dir
        self.seats = tuple(range(place.members))
        """Members that take part in the attempt; the others wait."""
        self.excluded = set[int]()
        """Members that take part in no further attempt: a GPU there is faulty."""
        self.failed: Callable[[], Sequence[Problem]] = lambda: ()
        """Why nodes that this one started cannot take part."""
        self._slower = min(place.tasks_per_node, _SLOWEST)
        self._file = run_dir / NODES / f"{place.member}.json"
        run = uuid.uuid4().hex if place.is_head else ""
        self._own: dict[str, Any] = {
            "run": run,
            "job": place.job,
            "asked": asked,
            "attempt": 0,
            "beat": 0,
            "host": socket.gethostname(),
        }
        self._seen: dict[int, _Seen] = {}
        self._looked = 0.0
        self._stacks = 0
        self._renewed_at = 0.0
        self._first_trouble: int | None = None
        self._in_attempt = self._was_asked = False
        self._writing, self._closed = threading.Lock(), threading.Event()

    def __enter__(self) -> Self:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._put()
        threading.Thread(target=self._beat, name="nodes", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    # --- the files

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            self._put(beat=self._own["beat"] + 1)

    def _put(self, **values: Any) -> None:
        """Write this node's file. Where that fails, on a full disk, the next beat tries again."""
        with self._writing:
            self._own.update(values)
            with contextlib.suppress(OSError):
                write_text(self._file, json.dumps(self._own))

    def _look(self) -> None:
        """Read the files of the others; those of another run are ignored."""
        now = time.monotonic()
        gap = now - self._looked
        if gap < _LOOK_S * self._slower:
            return
        self._looked = now
        others = range(1, self.place.members) if self.place.is_head else (0,)
        for number in others:
            values = read_node(self.run_dir, number)
            if values is None or values.get("run") != self._own["run"]:
                continue
            seen = self._seen.setdefault(number, _Seen())
            if values != seen.values or gap > SILENT_S / 2:  # this process itself may have been stopped
                seen.values, seen.changed_at = values, now

    def _others(self) -> list[_Seen]:
        """Those that take part in the attempt."""
        self._look()
        return [seen for number, seen in sorted(self._seen.items()) if number in self.seats]

    @property
    def seat(self) -> JobMember:
        """This node's position among those that take part in the attempt."""
        return self.place.seated(self.seats)

    def _parts(self) -> Iterator[tuple[_Seen, dict[str, Any]]]:
        """The others' parts of this attempt."""
        for seen in self._others():
            if self._is_in(seen):
                yield seen, seen.values.get("part") or {}

    # --- for the loop that follows a start

    @property
    def stop(self) -> signal.Signals | None:
        found = (seen.values.get("stop") for seen in self._others())
        return next((signal.Signals(number) for number in found if number), None)

    @property
    def trouble(self) -> str:
        return next((_from(seen, part["trouble"]) for seen, part in self._parts() if part.get("trouble")), "")

    @property
    def vanished(self) -> str:
        if not self.place.is_head and (told := self._from_head("vanished")):
            return str(told)
        for seen in self._others():
            if seen.is_silent:
                first = "" if self.place.is_head else "first "
                return (
                    f"the {first}node {seen.host} was lost: its effilaunch process has been silent for "
                    f"{SILENT_S:.0f} s"
                )
        return ""

    @property
    def end(self) -> str:
        if problems := self.not_started():
            return problems[0].message
        return next((_from(seen, part["killed"]) for seen, part in self._parts() if part.get("killed")), "")

    @property
    def lost(self) -> frozenset[int]:
        return frozenset(rank for _, part in self._parts() for rank in part.get("lost", ()))

    @property
    def statuses(self) -> Mapping[int, RankStatus]:
        told = (as_status(values) for _, part in self._parts() for values in part.get("ranks", ()))
        return {status.rank: status for status in told if status is not None}

    @property
    def running(self) -> bool:
        if not (self.place.is_head and self._in_attempt) or self.vanished:
            return False
        return any(part.get("code") is None for _, part in self._parts())

    def tell(self, said: Said) -> None:
        """Tell what happened here; node rank 0 passes on what it reads."""
        self._was_asked = self._was_asked or said.stop is not None
        is_head = self.place.is_head
        stop = said.stop or (self.stop if is_head else None)
        trouble = said.trouble or (self.trouble if is_head else "")
        killed = said.killed or (self.end if is_head else "")
        vanished = self.vanished if is_head else ""
        if is_head and trouble and self._first_trouble is None:
            told = (
                n for n, seen in sorted(self._seen.items()) if (seen.values.get("part") or {}).get("trouble")
            )
            self._first_trouble = 0 if said.trouble or vanished else next(told, 0)
        part = {
            **(self._own.get("part") or {}),
            "trouble": trouble,
            "lost": list(said.lost),
            "killed": killed,
            "ranks": [] if is_head else self._renewed(said.ranks),
        }
        new = {"stop": None if stop is None else int(stop), "part": part, "vanished": vanished}
        if any(self._own.get(name) != value for name, value in new.items()):
            self._put(**new)

    def _renewed(self, ranks: Mapping[int, RankStatus]) -> list[dict[str, Any]]:
        """What node rank 0 reads of the ranks here: a new phase at once, new steps every RANKS_S seconds."""
        old: list[dict[str, Any]] = (self._own.get("part") or {}).get("ranks", [])
        new = [asdict(status) for status in ranks.values()]
        now, kept = time.monotonic(), ("rank", "pid", "phase", "code")
        moved = [[values[name] for name in kept] for values in new]
        pause_s = RANKS_S * self._slower
        if now - self._renewed_at < pause_s and moved == [[values[name] for name in kept] for values in old]:
            return old
        self._renewed_at = now
        return new

    def ask_stacks(self) -> None:
        self._put(stacks=self._own.get("stacks", 0) + 1)

    def wants_stacks(self) -> bool:
        asked = 0 if self.place.is_head else int(self._from_head("stacks") or 0)
        wants, self._stacks = asked > self._stacks, max(asked, self._stacks)
        return wants

    def _from_head(self, name: str) -> Any:
        return next((seen.values.get(name) for seen in self._others()), None)

    # --- node rank 0

    def not_started(self) -> Sequence[Problem]:
        """Why nodes cannot take part that this one has started."""
        all_here = len(self._others()) == len(self.seats) - 1
        return () if all_here or not self.place.is_head else self.failed()

    def begin(self, order: Order) -> None:
        """Let all nodes start their part of an attempt."""
        self.raise_if_over()
        self._first_trouble, self._in_attempt = None, True
        number, order = self._own["attempt"] + 1, replace(order, seats=self.seats)
        # What it passed on of nodes that no longer take part is over.
        self._put(attempt=number, order=order.to_json(), part={}, stop=None, vanished="")

    def await_ended(self, limit_s: float = LEAVE_S) -> None:
        """Return when the others have ended their part of the attempt, or the time is over."""
        deadline = time.monotonic() + limit_s
        while self.running and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._in_attempt = False

    def alive(self, limit_s: float = LEAVE_S) -> list[int]:
        """The members that can take part in another attempt, once they have ended their part of this one."""
        deadline = time.monotonic() + limit_s
        there: dict[int, _Seen] = {}
        while time.monotonic() < deadline:
            time.sleep(_LOOK_S)  # so that the files are read now
            self._look()
            there = {number: seen for number, seen in self._seen.items() if not seen.is_silent}
            parts = [seen.values.get("part") or {} for seen in there.values() if self._is_in(seen)]
            if all(part.get("code") is not None for part in parts):
                break
        gone = {n for n, seen in there.items() if (seen.values.get("part") or {}).get("cut_off")}
        gone |= self.excluded | {number for number, seen in there.items() if seen.values.get("stop")}
        return [self.place.member, *sorted(there.keys() - gone)]

    @property
    def others_leave(self) -> bool:
        """Whether other nodes were asked to stop, and this one was not."""
        return self.stop is not None and not self._was_asked

    def _is_in(self, seen: _Seen) -> bool:
        """Whether that node takes part in the attempt."""
        return bool(seen.values.get("attempt") == self._own["attempt"])

    def raise_if_over(self) -> None:
        """Interrupted where a node was asked to stop; RunFailed where one is lost. Between attempts."""
        if (stop := self.stop) is not None:
            host = next(seen.host for seen in self._others() if seen.values.get("stop"))
            message = f"{stop.name}: stopped by a signal to {host}"
            raise Interrupted(Problem("interrupted", message, hint="continue it with --resume auto"))
        if self.vanished:
            raise RunFailed(host_lost(self.vanished))

    def parts(self) -> dict[str, Part]:
        """Name of a node -> how its part of the last attempt went."""
        found = {}
        for number, seen in sorted(self._seen.items()):
            if not self._is_in(seen):
                continue
            part = seen.values.get("part") or {}
            values = {
                name: part[name] for name in ("trouble", "killed", "code", "oom", "log") if name in part
            }
            name = seen.host if seen.host != self._own["host"] else f"{seen.host} (node {number})"
            found[name] = Part(
                **values, lost=frozenset(part.get("lost", ())), first=number == self._first_trouble
            )
        return found

    def close(self, error: EffilaunchError | None) -> None:
        """Let all nodes leave as this one does. What is told first counts."""
        if "verdict" in self._own:
            return
        problems = [] if error is None else [problem.to_json() for problem in error.problems]
        code = 0 if error is None else error.exit_code
        self._put(verdict={"code": code, "problems": problems, "at": time.time()})

    # --- the other nodes

    def follow_run(self, run: str) -> None:
        """From now on, take part in this run of node rank 0."""
        self._put(run=run)

    def first_host(self) -> str:
        """The host of node rank 0."""
        return str(self._from_head("host"))

    def take_order(self, after: int) -> tuple[int, Order] | None:
        """The attempt that node rank 0 has begun, if it is a later one; `seats` are then those of it."""
        number = int(self._from_head("attempt") or 0)
        if number <= after:
            return None
        order = Order.from_json(self._from_head("order"))
        self._stacks, self.seats = int(self._from_head("stacks") or 0), order.seats
        if self.takes_part:
            self._put(attempt=number, part={})
        return number, order

    @property
    def takes_part(self) -> bool:
        """Whether this node has a part in the attempt."""
        return self.place.member in self.seats

    def end_part(
        self, code: int, log: str, *, oom: bool | None = None, trouble: str = "", cut_off: bool = False
    ) -> None:
        """This node's part of the attempt has ended. cut_off: it no longer reaches node rank 0."""
        before = self._own.get("part") or {}
        more = {"trouble": trouble} if trouble else {}
        self._put(part={**before, **more, "code": code, "oom": oom, "log": log, "cut_off": cut_off})

    @property
    def verdict(self) -> Mapping[str, Any] | None:
        """How the run has ended, as node rank 0 told."""
        found = self._from_head("verdict")
        return found if isinstance(found, dict) else None


def _from(seen: _Seen, what: str) -> str:
    """What a node told; node rank 0 passes on what has a name already."""
    return what if what.partition(":")[0].startswith("on ") else f"on {seen.host}: {what}"


def host_lost(what: str, saved: str = "") -> Problem:
    """The problem of a node that was lost. saved: what there is to continue from."""
    hint = "the run was ended on all nodes; look at that node, then continue with --resume auto"
    return Problem(HOST_LOST, "; ".join(part for part in (what, saved) if part), hint=hint)


def read_node(run_dir: Path, number: int) -> dict[str, Any] | None:
    """The file of a node; None where it cannot be read."""
    try:
        found = parse_json((run_dir / NODES / f"{number}.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
