"""What each node of a run tells the others before any rank starts, and what is wrong where they differ."""

from __future__ import annotations

import hashlib
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher import __version__
from launcher.errors import Problem
from launcher.machine import probe
from launcher.machine.gpus import SAME_SIZE, Gpu
from launcher.machine.hardware import Hardware
from launcher.machine.job_member import JobMember
from launcher.machine.software import installed_versions

HOST_LOST, HOST_MISSING = "host-lost", "host-missing"
"""Codes of the problems of a node that was lost, and of one that did not come."""
FIRST = "the first node"
"""Beginning of the message on node rank 0 when it is lost: without it no other can continue."""
COMPARED = ("effilaunch", "python", "torch", "transformers", "accelerate", "deepspeed", "peft",
            "bitsandbytes", "datasets", "trl")  # fmt: skip
"""Packages that must be the same everywhere: they decide what ranks send each other, and what they save."""
JOB = "EFFILAUNCH_NODE"
"""Environment variable of the agent of a node: its place in the job, as JSON."""

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node; with one task per device, one task."""

    member: int
    node_rank: int
    local_task: int
    host: str
    address: str
    """Its own address on the route to node rank 0; empty for node rank 0 itself."""
    job: str
    asked: str
    """A digest of the recipe and the options of the command."""
    plan: str
    """SHA-256 of plan.json as this node sees it; empty where it sees none."""
    devices: tuple[str, ...]
    """Ids of the GPUs that it may use."""
    versions: Mapping[str, str]
    """Of COMPARED, what is installed; of Python without the last number."""
    boot_id: str = ""
    """Of its machine, whatever that is called."""
    uuids: tuple[str, ...] = ()
    """Of `devices`."""
    sizes: tuple[int, ...] = ()
    """Their memory, bytes; 0 where it is not reported."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> NodeFacts:
        lists = {name: tuple(values[name]) for name in ("devices", "uuids", "sizes")}
        return NodeFacts(**{**values, **lists})


def own_facts(place: JobMember, asked: str, run_dir: Path, address: str, gpus: Sequence[Gpu]) -> NodeFacts:
    """This node's; gpus: those that the run may use here, none for a run on the CPU."""
    installed = installed_versions() | {"effilaunch": __version__}
    installed["python"] = ".".join(platform.python_version_tuple()[:2])
    return NodeFacts(
        place.member, place.node_rank, place.local_task, socket.gethostname(), address, place.job, asked,
        digest_of(run_dir / "plan.json"), tuple(gpu.index for gpu in gpus),
        {name: installed[name] for name in COMPARED if name in installed},
        probe.boot_id(), tuple(gpu.uuid for gpu in gpus), tuple(gpu.total or 0 for gpu in gpus),
    )  # fmt: skip


def digest_of(path: Path) -> str:
    """SHA-256 of a file; empty where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def names_of(nodes: Sequence[NodeFacts]) -> dict[int, str]:
    """Member -> what to call it in a message: its host, with its number where several share one."""
    hosts = [node.host for node in nodes]
    return {n.member: n.host if hosts.count(n.host) == 1 else f"{n.host} (node {n.member})" for n in nodes}


def differences(nodes: Sequence[NodeFacts], hardware: Hardware, run_dir: Path) -> list[Problem]:
    """What keeps these nodes from running one job, node rank 0 first."""
    names = names_of(nodes)
    others = another_command(nodes, names)
    return others or [
        *different_versions(nodes, names),
        *not_shared(nodes, names, run_dir / "plan.json"),
        *missing_devices(nodes, hardware, names),
        *smaller_devices(nodes, hardware, names),
        *one_machine_twice(nodes, hardware, names),
    ]


def another_command(nodes: Sequence[NodeFacts], names: Mapping[int, str]) -> list[Problem]:
    """A problem for each node that was started for another job, or with other options."""
    first = nodes[0]
    hint = "start the same command on all nodes, each with its own --node-rank"
    problems = []
    for node in nodes[1:]:
        if node.job != first.job:
            message = (
                f"{names[node.member]} belongs to another job ({node.job!r}, and not {first.job!r}), "
                "which uses the same port"
            )
            problems.append(
                Problem("another-job", message, hint="name another port: --master-addr HOST:PORT")
            )
        elif node.asked != first.asked:
            message = (
                f"{names[node.member]} was started with another recipe, --set, --on or --resume than "
                f"{names[first.member]}, the first node"
            )
            problems.append(Problem("command-differs", message, hint=hint))
    return problems


def not_shared(nodes: Sequence[NodeFacts], names: Mapping[int, str], plan: Path) -> list[Problem]:
    """A problem for each node that does not see the plan of node rank 0."""
    first = nodes[0]
    return [
        unshared(names[node.member], str(plan), "another " if node.plan else "")
        for node in nodes[1:]
        if node.plan != first.plan
    ]


def unshared(name: str, path: str, other: str = "") -> Problem:
    """The problem of a node that does not see what the first one has written."""
    sees = (
        f"sees another {path} than the first node"
        if other
        else f"does not see {path}, which the first node has"
    )
    hint = "all nodes must see it under this path, on a disk that they share (--output-dir, EFFILAUNCH_CACHE)"
    return Problem("not-shared", f"{name} {sees}", hint=hint)


def different_versions(nodes: Sequence[NodeFacts], names: Mapping[int, str]) -> list[Problem]:
    """A problem for each package that is not the same everywhere. names: member -> what to call it."""
    problems = []
    for package in COMPARED:
        there = {names[h.member]: h.versions.get(package, "none") for h in nodes}
        if len(set(there.values())) > 1:
            table = ", ".join(f"{name} {version}" for name, version in there.items())
            problems.append(
                Problem(
                    "versions-differ",
                    f"{package} is not the same on all machines: {table}",
                    hint="install the same versions everywhere, best from one environment that all see",
                )
            )
    return problems


def missing_devices(
    nodes: Sequence[NodeFacts], hardware: Hardware, names: Mapping[int, str]
) -> list[Problem]:
    """A problem for each machine with fewer GPUs than the plan counts on."""
    if hardware.is_cpu:
        return []
    by_node: dict[int, list[NodeFacts]] = {}
    for node in nodes:
        by_node.setdefault(node.node_rank, []).append(node)
    problems = []
    for tasks in by_node.values():
        # Each of several tasks may see its own alone, as number 0.
        found = len({uuid for task in tasks for uuid in task.uuids})
        shown = {len(task.uuids) for task in tasks}
        name, wanted = names[tasks[0].member], hardware.devices_per_node
        if found < wanted:
            message = f"the plan is for {hardware.label}, {name} shows {found} GPUs"
            hint = "--on or `hardware` names other hardware"
        elif len(tasks) > 1 and shown != {1} and min(shown) < wanted:
            message = f"a task of {name} sees {min(shown)} of its {wanted} GPUs"
            hint = "let each task see all of them (--gpu-bind=none), or its own alone"
        else:
            continue
        problems.append(Problem("device-missing", message, hint=hint))
    return problems


def smaller_devices(
    nodes: Sequence[NodeFacts], hardware: Hardware, names: Mapping[int, str]
) -> list[Problem]:
    """A problem for each machine that has a GPU with less memory than the plan counts on."""
    planned = hardware.device_bytes
    if hardware.is_cpu or planned is None:
        return []
    problems: dict[int, Problem] = {}
    for node in nodes:
        known = [size for size in node.sizes[: hardware.devices_per_node] if size]
        least = min(known, default=planned)
        if least < SAME_SIZE * planned:
            message = (
                f"the plan is for {hardware.label}, devices of {planned / _GIB:.0f} GiB, "
                f"{names[node.member]} has one of {least / _GIB:.0f} GiB"
            )
            hint = "plan for the smallest device of all machines: --on or `hardware`"
            problems.setdefault(node.node_rank, Problem("device-smaller", message, hint=hint))
    return list(problems.values())


def one_machine_twice(
    nodes: Sequence[NodeFacts], hardware: Hardware, names: Mapping[int, str]
) -> list[Problem]:
    """A problem where two machines of the plan are one, under two names, whose GPUs would be used twice."""
    if hardware.is_cpu:  # processes of a CPU may share a machine
        return []
    users: dict[tuple[str, str], NodeFacts] = {}
    for node in nodes:
        for uuid in node.uuids[: hardware.devices_per_node]:
            other = users.setdefault((node.boot_id, uuid), node)
            if other.node_rank != node.node_rank:
                message = f"{names[other.member]} and {names[node.member]} are one machine: both take {uuid}"
                hint = "one line a machine in the hostfile, with all its slots; one --node-rank a machine"
                return [Problem("machine-twice", message, hint=hint)]
    return []
