"""torchrun on one node of several: `python -m launcher.train.agent RUN_DIR --nnodes N …`.

Before torchrun forms the job with its c10d rendezvous, the nodes call the roll through the rendezvous' store:
who has not come within the time limit is named, and so is what differs (recipe, versions, devices, a run
directory that one does not see). While torchrun runs, a heartbeat (heartbeat.py) notices lost nodes.
torchrun numbers nodes in any order; here ranks have the order of the node ranks (launcher/train/job.py).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from launcher.errors import EffilaunchError, MachineError, Problem, RunFailed
from launcher.files.safe_files import parse_json, write_json
from launcher.machine.gpus import visible_gpus
from launcher.machine.hardware import Hardware
from launcher.machine.interfaces import INTERFACES, interface_of, own_address_towards
from launcher.machine.job_member import JobMember
from launcher.machine.node_facts import (
    HOST_LOST,
    HOST_MISSING,
    JOB,
    NodeFacts,
    differences,
    names_of,
    own_facts,
)
from launcher.train.heartbeat import Heartbeat, beat_key
from launcher.train.job import RANKS
from launcher.train.outcome import report_error

COME_S = 600.0
"""Nodes have so long to come: somebody may start them manually, one after the other."""
NODES = "nodes.json"
"""In logs/: the nodes of the attempt, written by node rank 0."""
_TOLD_S = 30.0
"""Who waits for nodes is told so often."""
_GRACE_S = 30.0
"""How much longer the others wait for the answer of node rank 0."""
_POLL_S = 0.2
_FACTS, _ANSWER = "effilaunch/facts/{}", "effilaunch/answer"


@dataclass(frozen=True, slots=True)
class Agent:
    """What this process is asked to do."""

    run_dir: Path
    place: JobMember
    asked: str
    ranks: int
    """Ranks that this node starts."""
    devices_per_node: int
    module: str
    """What each rank runs."""
    limit_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run this node's ranks to their end; the exit status."""
    agent = read_agent(sys.argv[1:] if argv is None else argv, os.environ)
    try:
        store = connect(agent, is_host=agent.place.is_head)
        nodes = call_roll(store, agent)
    except EffilaunchError as error:
        report_error(_who(agent), error)
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    names = names_of(nodes)

    def lose(what: str) -> NoReturn:
        report_error(_who(agent), RunFailed(_lost(what)))
        os._exit(RunFailed.exit_code)  # the launcher of this node ends its ranks

    heartbeat = Heartbeat(lambda: connect(agent, is_host=False), agent.place.member, names, lose)
    heartbeat.start()
    bind_interfaces(agent, nodes)
    code = run_elastic(elastic_arguments(agent, nodes))
    if lost := heartbeat.leave(failed=code != 0):
        report_error(_who(agent), RunFailed(_lost(lost)))
        return RunFailed.exit_code
    return code


def read_agent(argv: Sequence[str], environ: Mapping[str, str]) -> Agent:
    """The command line, and the place that effilaunch has put into the environment."""
    parser = argparse.ArgumentParser(prog="python -m launcher.train.agent")
    parser.add_argument("run_dir", type=Path)
    for name, kind in (("nnodes", int), ("nproc-per-node", int), ("node-rank", int), ("master-addr", str),
                       ("master-port", int), ("module", str)):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, required=True)
    given = parser.parse_args(argv)
    nodes, rank = given.nnodes, given.node_rank
    place = JobMember("manual", rank, nodes, nodes, rank, 1, 0, given.master_addr, given.master_port)
    said: dict[str, Any] = parse_json(environ[JOB]) if environ.get(JOB) else {}
    if said:
        place = JobMember(**{**said["place"], "hosts": tuple(said["place"]["hosts"])})
    devices = given.nproc_per_node
    return Agent(
        given.run_dir.absolute(), place, said.get("asked", ""), 1 if place.is_one_rank else devices,
        devices, given.module, float(said.get("limit_s", COME_S)),
    )  # fmt: skip


def _who(agent: Agent) -> str:
    return f"node-{agent.place.member}"


def _lost(what: str) -> Problem:
    hint = "look at that node; --resume auto continues from the last complete checkpoint"
    return Problem(HOST_LOST, what, hint=hint)


def connect(agent: Agent, *, is_host: bool) -> Any:
    """A connection to the store of the rendezvous, which node rank 0 has. MachineError (4)."""
    from torch.distributed import TCPStore

    place = agent.place
    try:
        # Several stores of one process share a listener: torchrun's own is the same as this one.
        return TCPStore(
            place.head, place.port, is_master=is_host, wait_for_workers=False, multi_tenant=True,
            timeout=timedelta(seconds=agent.limit_s),
        )  # fmt: skip
    except Exception as error:  # torch's DistError
        first = str(error).partition("\n")[0]
        if is_host:
            message = f"the port {place.port} cannot be listened on: {first}"
            hint = "end what uses it, or name another one: --master-addr HOST:PORT, the same on all nodes"
            raise MachineError(Problem("port-taken", message, hint=hint)) from error
        message = f"node rank 0 cannot be reached at {place.head}:{place.port}: {first}"
        hint = "a firewall must let the nodes reach each other on ports above 1024"
        raise MachineError(Problem("head-unreachable", message, hint=hint)) from error


def call_roll(store: Any, agent: Agent) -> list[NodeFacts]:
    """All nodes of the job. MachineError (4) for one that did not come in time or does not fit the others.

    Node rank 0 compares; all get its answer.
    """
    place = agent.place
    address = "" if place.is_head else own_address_towards(place.head)
    gpus = [] if _is_on_cpu(agent.run_dir) else visible_gpus()
    facts = own_facts(place, agent.asked, agent.run_dir, address, gpus)
    text = json.dumps(facts.to_json())
    store.set(beat_key(place.member), "0")
    known = store.compare_set(_FACTS.format(place.member), "", text).decode()
    if known != text:
        other = NodeFacts.from_json(parse_json(known)).host
        message = (
            f"--node-rank {place.member} is taken by {other}: each of the {place.members} nodes has its own"
        )
        raise MachineError(Problem("rank-taken", message))
    if place.is_head:
        answer = _collect(store, agent)
        store.set(_ANSWER, json.dumps(answer))
    else:
        answer = _awaited(store, agent)
    if answer["problems"]:
        _await_read(store, place)
        raise MachineError([Problem(**problem) for problem in answer["problems"]])
    return [NodeFacts.from_json(values) for values in answer["nodes"]]


def _awaited(store: Any, agent: Agent) -> Any:
    """The answer of node rank 0."""
    try:
        store.wait([_ANSWER], timedelta(seconds=agent.limit_s + _GRACE_S))
        return parse_json(store.get(_ANSWER))
    except Exception as error:
        message = f"node rank 0 at {agent.place.head}:{agent.place.port} did not answer: {error}"
        raise MachineError(Problem("head-unreachable", message.partition("\n")[0])) from error


def _collect(store: Any, agent: Agent) -> dict[str, Any]:
    """The answer to all: the nodes, and what is wrong."""
    place, began, told = agent.place, time.monotonic(), time.monotonic()
    missing = list(range(place.members))
    while missing := [number for number in missing if not store.check([_FACTS.format(number)])]:
        now = time.monotonic()
        if now - began > agent.limit_s:
            return {"problems": [_did_not_come(place, missing, agent.limit_s).to_json()]}
        if now - told > _TOLD_S:
            told = now
            print(f"waiting for {_named(place, missing)} at port {place.port}", flush=True)
        time.sleep(_POLL_S)
    values = [parse_json(store.get(_FACTS.format(number))) for number in range(place.members)]
    nodes = [NodeFacts.from_json(value) for value in values]
    problems = differences(nodes, planned_hardware(agent.run_dir), agent.run_dir)
    return {"nodes": values, "problems": [problem.to_json() for problem in problems]}


def _named(place: JobMember, numbers: Sequence[int]) -> str:
    named = [f"{n} ({place.hosts[n]})" if n < len(place.hosts) else str(n) for n in numbers]
    return f"node{'s' if len(named) > 1 else ''} {', '.join(named)} of {place.members}"


def _did_not_come(place: JobMember, missing: Sequence[int], limit_s: float) -> Problem:
    message = f"{_named(place, missing)} did not come within {limit_s:.0f} s (port {place.port})"
    hint = (
        "start the same command on every node; a firewall must let them reach this port and the ports of the "
        "training (any above 1024)"
    )
    return Problem(HOST_MISSING, message, hint=hint)


def _await_read(store: Any, place: JobMember) -> None:
    """Node rank 0 keeps its store until the others have read why nothing starts."""
    store.set(f"effilaunch/read/{place.member}", "1")
    if not place.is_head:
        return
    there = [n for n in range(1, place.members) if store.check([_FACTS.format(n)])]
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        if all(store.check([f"effilaunch/read/{number}"]) for number in there):
            return
        time.sleep(_POLL_S)


def planned_hardware(run_dir: Path) -> Hardware:
    """The hardware of plan.json."""
    found = parse_json((run_dir / "plan.json").read_text("utf-8"))["hardware"]
    return Hardware(
        found["num_nodes"], found["devices_per_node"], found["device"], found["device_bytes"], None
    )


def _is_on_cpu(run_dir: Path) -> bool:
    """Whether the plan is for a CPU, whatever GPUs are here; False where this node does not see the plan."""
    try:
        return planned_hardware(run_dir).is_cpu
    except (OSError, ValueError):  # which node rank 0 reports
        return False


def bind_interfaces(agent: Agent, nodes: Sequence[NodeFacts]) -> None:
    """Let gloo and NCCL use the interface that leads to the other nodes; node rank 0 records the nodes.

    Without it they take the address of the node's own name, which on Debian is 127.0.1.1.
    """
    interface = interface_of(_address(agent, nodes)) or ""
    for name, form in INTERFACES.items():
        if interface and not os.environ.get(name):
            os.environ[name] = form.format(interface)
    if not agent.place.is_head:
        return
    names, over = names_of(nodes).values(), f" over {interface}" if interface else ""
    print(f"{len(nodes)} nodes ({', '.join(names)}) meet at {_address(agent, nodes)}{over}", flush=True)
    write_json(
        agent.run_dir / "logs" / NODES,
        {
            "interface": interface,
            "master_addr": _address(agent, nodes),
            "nodes": [n.to_json() for n in nodes],
        },
    )


def _address(agent: Agent, nodes: Sequence[NodeFacts]) -> str:
    """This node's address, as the others reach it."""
    own = next(node for node in nodes if node.member == agent.place.member)
    return own.address or own_address_towards(nodes[1].address)


def elastic_arguments(agent: Agent, nodes: Sequence[NodeFacts]) -> list[str]:
    """torchrun's command line, without `torchrun`.

    A failed rank ends the job: whether it is started again, and from which checkpoint, is decided by
    effilaunch on node rank 0, as on one node.
    """
    place = agent.place
    local = [place.local_task, place.tasks_per_node] if place.is_one_rank else None
    first = place.ranks(agent.devices_per_node)[0]
    os.environ[RANKS] = json.dumps({"first": first, "local": local, "addr": place.head, "port": place.port})
    return [
        f"--nnodes={place.members}", f"--nproc-per-node={agent.ranks}", "--rdzv-backend=c10d",
        f"--rdzv-endpoint={place.head}:{place.port}", f"--rdzv-id={place.job}",
        f"--rdzv-conf=is_host={int(place.is_head)},join_timeout={agent.limit_s:.0f}",
        f"--local-addr={_address(agent, nodes)}", "--max-restarts=0",
        # Its folders for output that nobody redirects would stay in TMPDIR, one for each start.
        "--log-dir=/dev/null", "--module", agent.module, str(agent.run_dir),
    ]  # fmt: skip


def run_elastic(arguments: Sequence[str]) -> int:
    """torchrun; its exit status."""
    from torch.distributed.run import main as torchrun

    try:
        torchrun(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:  # with the table of the ranks that failed, which the launcher's log must have
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        status
    )  # the end of the interpreter aborts the process while the heartbeat is in the store's C++
