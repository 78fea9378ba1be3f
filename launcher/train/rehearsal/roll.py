"""Which ranks come to a rehearsal, and which fall silent, by number and host.

They meet in a store of their own, under a prefix on the store of the process group: it answers before
there is a group, and when a collective hangs.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from launcher.errors import MachineError, Problem
from launcher.files.rank_status import read_statuses
from launcher.machine.interfaces import addresses, choose_interface, filesystem_of, infiniband, own_address
from launcher.machine.software import installed_versions
from launcher.plan.rehearsal import Rehearsal
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
"""A rank waits so much longer than a limit for an answer of the store, whose error says more."""


def introduce(backend: str, run_dir: Path) -> dict[str, Any]:
    """This rank before it joins: its node, network and versions."""
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
    """The number of this node, as torchrun or DeepSpeed's launcher set it, else counted."""
    for name in ("GROUP_RANK", "CROSS_RANK"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return rank() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def open_store(limit_s: float, *, serve: bool) -> Any:
    """This rank's connection to the store of the process group; rank 0 serves it, if no launcher does.

    MachineError if nobody answers within `limit_s` seconds.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = serve and rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    try:
        store = make_store(
            host, port, None, server, timedelta(seconds=limit_s), wait_for_workers=False, multi_tenant=server
        )
    except (dist.DistError, RuntimeError) as error:
        message = f"no answer from the ranks' store on {host}:{port} within {limit_s:.0f} s: {_short(error)}"
        hint = "rank 0 did not start (see its log), or a firewall blocks its port"
        raise MachineError(Problem(MISSING, message, hint=hint)) from error
    return dist.PrefixStore(_PREFIX, store)


def _short(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". This may")[0][:200]


def call_roll(store: Any, own: Mapping[str, Any], limit_s: float, run_dir: Path) -> list[dict[str, Any]]:
    """What `introduce` returned on every rank, by rank. MachineError names the missing ones."""
    ranks = world_size()
    store.set(f"roll/{rank()}", json.dumps(own))
    names = [f"roll/{number}" for number in range(ranks)]
    absent, deadline = set(range(ranks)), time.monotonic() + limit_s
    while absent := {number for number in absent if not store.check([names[number]])}:
        if time.monotonic() > deadline:
            there = [json.loads(store.get(names[n])) for n in sorted(set(range(ranks)) - absent)]
            raise MachineError(missing_problem(sorted(absent), there, limit_s, run_dir))
        time.sleep(_POLL_S)
    return [json.loads(text) for text in store.multi_get(names)]


def missing_problem(absent: list[int], there: list[dict[str, Any]], limit_s: float, run_dir: Path) -> Problem:
    """The ranks that did not come, each with its host if that is known."""
    statuses = read_statuses(run_dir)
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or len(there)
    hosts = {facts["rank"] // per_node: facts["host"] for facts in there}
    reasons = []
    for number in absent:
        last, node = statuses.get(number), number // per_node
        if last is not None:
            reason = f"rank {number} on {last.host} (pid {last.pid}) was started and hangs or was stopped"
        elif node in hosts:
            reason = f"rank {number} on {hosts[node]} was never started"
        else:
            reason = f"rank {number} (node {node}) was never started, nor any other rank of its node"
        reasons.append(reason)
    message = f"{len(absent)} of {len(absent) + len(there)} ranks did not come within {limit_s:.0f} s: "
    hint = "logs/rank-N.log and logs/launcher.log show what such a rank did last"
    return Problem(MISSING, message + "; ".join(reasons), hint=hint)


class Watchdog:
    """Two threads of every rank: one sends heartbeats and watches the next rank, one watches the clock.

    A rank that finds another one silent, the store gone, or a part over its limit, ends this process with an
    error, whatever its main thread waits for.
    """

    def __init__(self, planned: Rehearsal, run_dir: Path) -> None:
        self._silent_s, self._run_dir = planned.silent_s, run_dir
        self._part, self._until = "the roll", time.monotonic() + planned.meet_s + _AFTER_S
        self._ranks: list[dict[str, Any]] = []
        self._answered = self._neighbour_at = time.monotonic()
        self._beating = self._over = False
        threading.Thread(target=self._clock, name="rehearsal-clock", daemon=True).start()

    def begin(self, part: str, limit_s: float) -> None:
        """A part of the rehearsal begins on all ranks."""
        status().moved()
        if rank() == 0:
            print(f"rehearsal: {part}", flush=True)
        self._part, self._until = part, time.monotonic() + limit_s

    def watch(self, ranks: list[dict[str, Any]]) -> None:
        """All ranks have come: start the heartbeats, one per second."""
        self._ranks = ranks
        store = open_store(self._silent_s, serve=False)
        self._answered = self._neighbour_at = time.monotonic()
        self._beating = True
        threading.Thread(target=self._beat, args=(store,), name="rehearsal-beat", daemon=True).start()

    def end(self) -> None:
        """Stop watching: the ranks leave one by one."""
        self._over = True

    def _beat(self, store: Any) -> None:
        """Each rank watches the next one: as many requests per second as there are ranks."""
        neighbour, last, count = (rank() + 1) % world_size(), -1, 0
        while not self._over:
            count += 1
            try:
                store.set(f"beat/{rank()}", str(count))
                beat = int(store.get(f"beat/{neighbour}"))
            except Exception as error:  # the store's host is gone: the clock finds it silent
                print(f"rehearsal: the store does not answer: {_short(error)}", file=sys.stderr, flush=True)
                return
            self._answered = time.monotonic()
            if beat != last:
                last, self._neighbour_at = beat, self._answered
            time.sleep(_BEAT_S)

    def _clock(self) -> None:
        while not self._over:
            time.sleep(_BEAT_S / 2)
            problem = None if self._over else self._trouble(time.monotonic())
            if problem is not None:
                leave_with(problem, self._run_dir)

    def _trouble(self, now: float) -> Problem | None:
        if self._beating and now - self._answered > self._silent_s:
            address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            return self._silent(0, f" (no answer on {address})")
        if self._beating and now - self._neighbour_at > self._silent_s:
            return self._silent((rank() + 1) % world_size())
        if now > self._until:
            where = ", ".join(
                dict.fromkeys(f"{facts['host']} ({facts['interface']})" for facts in self._ranks)
            )
            message = f"{self._part} does not end" + (f"; all ranks have come, from {where}" if where else "")
            hint = (
                "a firewall between the nodes, or a network that does not connect them: set "
                "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME; NCCL_DEBUG=INFO shows what NCCL chose"
            )
            return Problem(STUCK, message, hint=hint)
        return None

    def _silent(self, number: int, more: str = "") -> Problem:
        gone = self._ranks[number]
        message = (
            f"rank {number} on {gone['host']} ({gone['interface']}, pid {gone['pid']}) has sent no heartbeat "
            f"for {self._silent_s:.0f} s during {self._part}{more}"
        )
        hint = "its node hangs, its network is down, or the process was stopped; look at that node"
        return Problem(SILENT, message, hint=hint)


def leave_with(problem: Problem, run_dir: Path) -> None:
    """End this process from any thread, and write its error where the supervisor looks for it."""
    error = MachineError(problem)
    print(f"error: {error}", file=sys.stderr, flush=True)
    write_error(run_dir, rank(), error)
    status().end(error.exit_code)
    os._exit(error.exit_code)
