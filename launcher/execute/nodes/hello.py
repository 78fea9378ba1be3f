"""A member's first word: who it is, and what all members must have in common; and what is wrong where not."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher import __version__
from launcher.errors import Problem
from launcher.execute.nodes.wire import fingerprint
from launcher.facts import probe
from launcher.facts.hardware import Hardware
from launcher.facts.job_member import JobMember
from launcher.facts.safe_files import read_record
from launcher.facts.software import installed_versions

COMPARED = ("effilaunch", "python", "torch", "transformers", "accelerate", "deepspeed", "peft",
            "bitsandbytes", "datasets", "trl")  # fmt: skip
"""Packages that must be the same everywhere: they decide what ranks say to each other, and what they save."""

_GIB = 2**30
_SAME_SIZE = 0.9
"""Devices of one name differ by some percent: part of the memory may be kept for error correction."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Who a member is."""

    job: str
    asked: str
    """A hash of what it was asked, see greeting.py; the same on all machines."""
    member: int
    node_rank: int
    local_task: int
    host: str
    pid: int
    devices: tuple[str, ...]
    """Ids of the GPUs that it may use."""
    versions: Mapping[str, str]
    """Of COMPARED, what is installed; of Python without the last number."""
    boot_id: str = ""
    """Of its machine, whatever that is called."""
    uuids: tuple[str, ...] = ()
    """Of `devices`."""
    sizes: tuple[int, ...] = ()
    """Their memory, bytes."""

    def to_json(self) -> dict[str, Any]:
        return {"kind": "hello", **asdict(self)}

    @staticmethod
    def from_json(message: Mapping[str, Any]) -> Hello:
        """KeyError or TypeError where it is none."""
        values = {name: message[name] for name in Hello.__dataclass_fields__}
        lists = {name: tuple(values[name]) for name in ("devices", "uuids", "sizes")}
        return Hello(**{**values, **lists})


def own_hello(place: JobMember, asked: str) -> Hello:
    """This process's."""
    installed = installed_versions() | {"effilaunch": __version__}
    installed["python"] = ".".join(platform.python_version_tuple()[:2])
    gpus = probe.visible_gpus()
    return Hello(
        place.job, fingerprint(asked), place.member, place.node_rank, place.local_task, socket.gethostname(),
        os.getpid(), tuple(gpu.index for gpu in gpus),
        {name: installed[name] for name in COMPARED if name in installed},
        probe.boot_id(), tuple(gpu.uuid for gpu in gpus), tuple(gpu.total for gpu in gpus),
    )  # fmt: skip


def different_versions(hellos: Sequence[Hello], names: Mapping[int, str]) -> list[Problem]:
    """A problem for each package that is not the same everywhere. names: member -> what to call it."""
    problems = []
    for package in COMPARED:
        there = {names[h.member]: h.versions.get(package, "none") for h in hellos}
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


def missing_devices(hellos: Sequence[Hello], hardware: Hardware, names: Mapping[int, str]) -> list[Problem]:
    """A problem for each machine with fewer GPUs than the plan counts on."""
    if hardware.is_cpu:
        return []
    by_node: dict[int, list[Hello]] = {}
    for hello in hellos:
        by_node.setdefault(hello.node_rank, []).append(hello)
    problems = []
    for node in by_node.values():
        found = len({device for hello in node for device in hello.devices})
        alone = len(node) > 1 and all(len(hello.devices) == 1 for hello in node)  # each sees its own as 0
        if not alone and found < hardware.devices_per_node:
            name = names[node[0].member]
            problems.append(
                Problem(
                    "device-missing",
                    f"the plan is for {hardware.label}, {name} shows {found} GPUs",
                    hint="--on or `hardware` names other hardware",
                )
            )
    return problems


def smaller_devices(hellos: Sequence[Hello], hardware: Hardware, names: Mapping[int, str]) -> list[Problem]:
    """A problem for each machine that has a GPU with less memory than the plan counts on."""
    planned = hardware.device_bytes
    if hardware.is_cpu or planned is None:
        return []
    problems: dict[int, Problem] = {}
    for hello in hellos:
        least = min(hello.sizes[: hardware.devices_per_node], default=planned)
        if least < _SAME_SIZE * planned:
            message = (
                f"the plan is for {hardware.label}, devices of {planned / _GIB:.0f} GiB, "
                f"{names[hello.member]} has one of {least / _GIB:.0f} GiB"
            )
            hint = "plan for the smallest device of all machines: --on or `hardware`"
            problems.setdefault(hello.node_rank, Problem("device-smaller", message, hint=hint))
    return list(problems.values())


def one_machine_twice(hellos: Sequence[Hello], hardware: Hardware, names: Mapping[int, str]) -> list[Problem]:
    """A problem where two machines of the plan are one, under two names, whose GPUs would be used twice."""
    if hardware.is_cpu:  # processes of a CPU may share a machine
        return []
    users: dict[tuple[str, str], Hello] = {}
    for hello in hellos:
        for uuid in hello.uuids[: hardware.devices_per_node]:
            other = users.setdefault((hello.boot_id, uuid), hello)
            if other.node_rank != hello.node_rank:
                message = f"{names[other.member]} and {names[hello.member]} are one machine: both take {uuid}"
                hint = "one line a machine in the hostfile, with all its slots; one --node-rank a machine"
                return [Problem("machine-twice", message, hint=hint)]
    return []


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def prepared_data(run_dir: Path) -> dict[str, str | None]:
    """The folder of prepared samples that the ranks read, as `look` takes it; none for ranks without data."""
    if not (run_dir / "data.json").is_file():
        return {}
    folder = read_record(run_dir / "data.json").get("folder")
    return {} if folder is None else {str(folder): None}


def look(files: Mapping[str, str | None]) -> list[dict[str, str]]:
    """What is wrong with files that the head sees; `{host}` in a message stands for this machine."""
    problems = []
    for name, digest in files.items():
        path = Path(name)
        try:
            there = path.exists()
            found = digest_of(path) if there and digest is not None else None
        except OSError as error:
            problems.append(_unseen(f"{{host}} cannot read {name}: {error.strerror}"))
            continue
        if not there:
            problems.append(_unseen(f"{{host}} does not see {name}, which the first machine has"))
        elif found != digest:
            problems.append(_unseen(f"{{host}} sees another {name} than the first machine"))
    return problems


def _unseen(message: str) -> dict[str, str]:
    hint = (
        "all machines must see it under this path, on a disk that they share (--output-dir, EFFILAUNCH_CACHE)"
    )
    return {"code": "not-shared", "message": message, "hint": hint}
