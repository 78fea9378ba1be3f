"""Who comes to a rehearsal, and who falls silent: said in a store of the ranks' own, by number and host.

The store is the one on which the process group will meet, under names of its own: it answers before there is
a group, and when a collective hangs.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from launcher.errors import MachineError, Problem
from launcher.facts.interfaces import addresses, choose_interface, filesystem_of, infiniband, own_address
from launcher.facts.rank_status import read_statuses
from launcher.facts.rehearsal_course import Course
from launcher.facts.software import installed_versions
from launcher.train.job import local_rank, rank, world_size
from launcher.train.loopback import make_store
from launcher.train.outcome import write_error
from launcher.train.status import status

MISSING, SILENT, STUCK = "rehearsal-rank-missing", "rehearsal-rank-silent", "rehearsal-stuck"
"""Codes of the problems."""
_PREFIX = "effilaunch-rehearsal"
_POLL_S = 0.1
_BEAT_S = 1.0
_AFTER_S = 3.0
"""So much longer than a limit a rank waits for an answer of the store: whoever answers, tells more."""


def introduce(backend: str, run_dir: Path) -> dict[str, Any]:
    """What this rank tells of itself before it joins: where it is, on which network, with which versions."""
    meeting = choose_interface(backend, os.environ, addresses(), own_address())
    return {
        "rank": rank(),
        "local_rank": local_rank(),
        "node": _node(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "interface": meeting.interface,
        "address": meeting.address,
        "interface_by": meeting.by,
        "infiniband": list(infiniband()) if backend == "nccl" else [],
        "filesystem": filesystem_of(run_dir / "checkpoints"),
        "versions": installed_versions(),
    }


def _node() -> int:
    """This machine among all: torchrun and deepspeed's launcher say it; else it is counted."""
    for name in ("GROUP_RANK", "CROSS_RANK"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return rank() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def open_store(limit_s: float, *, serve: bool) -> Any:
    """This rank's connection to the store of the process group; the first rank serves it, where no launcher
    does. MachineError when nobody answers within `limit_s` seconds."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = serve and rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    try:
        store = make_store(
            host, port, None, server, timedelta(seconds=limit_s), wait_for_workers=False, multi_tenant=server
        )
    except (dist.DistError, RuntimeError) as error:
        message = (
            f"nobody answers on {host}:{port}, where the ranks meet, within {limit_s:.0f} s: {_short(error)}"
        )
        hint = "rank 0 did not come, or a firewall stands before its port; its log says more"
        raise MachineError(Problem(MISSING, message, hint=hint)) from error
    return dist.PrefixStore(_PREFIX, store)


def _short(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". This may")[0][:200]


def call_roll(store: Any, own: Mapping[str, Any], limit_s: float, run_dir: Path) -> list[dict[str, Any]]:
    """What every rank told of itself, by rank. MachineError names those that did not come in time."""
    ranks = world_size()
    store.set(f"roll/{rank()}", json.dumps(own))
    names = [f"roll/{number}" for number in range(ranks)]
    absent, deadline = set(range(ranks)), time.monotonic() + limit_s
    while absent := {number for number in absent if not store.check([names[number]])}:
        if time.monotonic() > deadline:
            there = [json.loads(store.get(names[n])) for n in sorted(set(range(ranks)) - absent)]
            raise MachineError(missing_problem(sorted(absent), there, limit_s, run_dir))
        time.sleep(_POLL_S)
    return [json.loads(told) for told in store.multi_get(names)]


def missing_problem(absent: list[int], there: list[dict[str, Any]], limit_s: float, run_dir: Path) -> Problem:
    """The ranks that did not come, each with its host as far as anybody knows it."""
    statuses = read_statuses(run_dir)
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or len(there)
    hosts = {facts["rank"] // per_node: facts["host"] for facts in there}
    words = []
    for number in absent:
        told, node = statuses.get(number), number // per_node
        if told is not None:
            words.append(
                f"rank {number} on {told.host} (pid {told.pid}) was started and hangs or was stopped"
            )
        elif node in hosts:
            words.append(f"rank {number} on {hosts[node]} was never started")
        else:
            words.append(f"rank {number} (node {node}) was never started, nor any other rank of its node")
    message = f"{len(absent)} of {len(absent) + len(there)} ranks did not come within {limit_s:.0f} s: "
    hint = "logs/rank-N.log and logs/launcher.log say what such a rank did last"
    return Problem(MISSING, message + "; ".join(words), hint=hint)


class Vigil:
    """Two threads of every rank: one says that it is there and looks after the next rank, the other looks at
    the clock. Whoever finds a rank silent, the store gone, or a part beyond its limit, ends this process with
    a word, whatever its main thread waits for."""

    def __init__(self, course: Course, run_dir: Path) -> None:
        self._course, self._run_dir = course, run_dir
        self._part, self._until = "the roll", time.monotonic() + course.meet_s + _AFTER_S
        self._ranks: list[dict[str, Any]] = []
        self._answered = self._neighbour_at = time.monotonic()
        self._beating = self._over = False
        threading.Thread(target=self._clock, name="rehearsal-clock", daemon=True).start()

    def begin(self, part: str, limit_s: float) -> None:
        """A part of the rehearsal begins, for all ranks alike."""
        status().moved()
        if rank() == 0:
            print(f"rehearsal: {part}", flush=True)
        self._part, self._until = part, time.monotonic() + limit_s

    def look_after(self, ranks: list[dict[str, Any]]) -> None:
        """All have come: from now on each says every second that it is there."""
        self._ranks = ranks
        store = open_store(self._course.silent_s, serve=False)
        self._answered = self._neighbour_at = time.monotonic()
        self._beating = True
        threading.Thread(target=self._beat, args=(store,), name="rehearsal-beat", daemon=True).start()

    def end(self) -> None:
        """Nobody is looked after any more: the ranks leave one by one."""
        self._over = True

    def _beat(self, store: Any) -> None:
        """Each looks after the next one: as many questions a second as there are ranks."""
        neighbour, last, count = (rank() + 1) % world_size(), -1, 0
        while not self._over:
            count += 1
            try:
                store.set(f"beat/{rank()}", str(count))
                said = int(store.get(f"beat/{neighbour}"))
            except Exception as error:  # the store's host is gone: the clock finds it silent
                print(f"rehearsal: the store does not answer: {_short(error)}", file=sys.stderr, flush=True)
                return
            self._answered = time.monotonic()
            if said != last:
                last, self._neighbour_at = said, self._answered
            time.sleep(_BEAT_S)

    def _clock(self) -> None:
        while not self._over:
            time.sleep(_BEAT_S / 2)
            problem = None if self._over else self._trouble(time.monotonic())
            if problem is not None:
                leave_with(problem, self._run_dir)

    def _trouble(self, now: float) -> Problem | None:
        limit = self._course.silent_s
        if self._beating and now - self._answered > limit:
            address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            return silent_problem(self._ranks[0], limit, self._part, f" (nobody answers on {address})")
        if self._beating and now - self._neighbour_at > limit:
            return silent_problem(self._ranks[(rank() + 1) % world_size()], limit, self._part)
        if now > self._until:
            return stuck_problem(self._part, self._ranks)
        return None


def silent_problem(gone: Mapping[str, Any], limit_s: float, part: str, more: str = "") -> Problem:
    """A rank that says nothing any more, by number, host and interface."""
    message = (
        f"rank {gone['rank']} on {gone['host']} ({gone['interface']}, pid {gone['pid']}) has said nothing "
        f"for {limit_s:.0f} s during {part}{more}"
    )
    hint = "its machine hangs, its network is gone, or somebody stopped the process; look at that machine"
    return Problem(SILENT, message, hint=hint)


def stuck_problem(part: str, ranks: list[dict[str, Any]]) -> Problem:
    """All are there and one part does not end."""
    where = ", ".join(dict.fromkeys(f"{facts['host']} ({facts['interface']})" for facts in ranks))
    message = f"all ranks are there, and {part} comes to no end" + (
        f"; they meet on {where}" if where else ""
    )
    hint = (
        "a firewall between the machines, or another network than the one that connects them: set "
        "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME; NCCL_DEBUG=INFO tells what NCCL chose"
    )
    return Problem(STUCK, message, hint=hint)


def leave_with(problem: Problem, run_dir: Path, end: Callable[[int], Any] = os._exit) -> None:
    """End this process from any thread, with its error where the supervisor looks for it."""
    error = MachineError(problem)
    print(f"error: {error}", file=sys.stderr, flush=True)
    write_error(run_dir, rank(), error)
    status().end(error.exit_code)
    end(error.exit_code)
