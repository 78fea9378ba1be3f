"""Runs on this machine, and runs whose nodes are started manually, with --node-rank and --master-addr."""

from __future__ import annotations

import re

from launcher.errors import Problem, RecipeError
from launcher.machine.job_member import RENDEZVOUS_PORT, JobMember
from launcher.schedulers.hostfile import is_host
from launcher.schedulers.scheduler import Gathering, Scheduler, StartRequest

_LAST_PORT = 65535
_ADDRESS = re.compile(r"(?:\[([^]]+)\]|([^:]+))(?::([0-9]{1,5}))?")


class Local(Scheduler):
    """Starts nothing on other machines; the last one that `run` asks."""

    def starts(self, request: StartRequest) -> bool:
        return True

    def gathering(self, request: StartRequest) -> Gathering | None:
        if not request.is_manual:
            return None
        if request.alone:
            message = f"{request.alone} runs on one node: without --node-rank and --master-addr"
            raise RecipeError(Problem("usage", message))
        found = Gathering(rendezvous(request))
        if request.loaded.recipe.launch.hostfile is not None:
            request.say("launch.hostfile is ignored: with --node-rank, each node is started manually")
        return found


SCHEDULER = Local()


def rendezvous(request: StartRequest) -> JobMember:
    """The place that --node-rank and --master-addr name. RecipeError (2)."""
    rank, address = request.node_rank, request.master_addr
    if rank is None or address is None:
        missing = "--node-rank" if rank is None else "--master-addr"
        message = f"{missing} is missing: the nodes of a run find each other by both options"
        hint = (
            "--node-rank 0 --master-addr HOST[:PORT] on HOST, --node-rank 1 with the same address on the next"
        )
        raise RecipeError(Problem("usage", message, hint=hint))
    nodes = request.hardware().num_nodes
    if nodes == 1:
        message = "--node-rank is for runs on several nodes, and the hardware is one node"
        raise RecipeError(Problem("usage", message, hint="set --on, e.g. 2x8xA100-80GB, or `hardware`"))
    if not 0 <= rank < nodes:
        message = f"--node-rank {rank}: the {nodes} nodes are 0 to {nodes - 1}"
        raise RecipeError(Problem("usage", message))
    host, port = split_address(address)
    # Without the host, which each node may write in another way.
    return JobMember(f"port {port}", rank, nodes, nodes, rank, 1, 0, host, port)


def split_address(address: str) -> tuple[str, int]:
    """`HOST`, `HOST:PORT` or `[IPV6]:PORT`. RecipeError (2) for anything else."""
    found = _ADDRESS.fullmatch(address)
    host = address if found is None else found[1] or found[2]  # an IPv6 address has more colons
    port = int(found[3]) if found is not None and found[3] else RENDEZVOUS_PORT
    if not is_host(host) or not 0 < port <= _LAST_PORT:
        shown = repr(address if len(address) <= 80 else f"{address[:80]}…")
        message = f"--master-addr {shown}: expected HOST or HOST:PORT, PORT from 1 to {_LAST_PORT}"
        hint = f"e.g. --master-addr node1:{RENDEZVOUS_PORT}, 10.0.0.1 or [fd00::1]:{RENDEZVOUS_PORT}"
        raise RecipeError(Problem("usage", message, hint=hint))
    return host, port
