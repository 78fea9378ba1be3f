"""Machines as data: one on which everything is right, and changes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from launcher.knowledge.doctor.check import Verdict
from launcher.knowledge.doctor.examine import CHECKS
from launcher.machine.gpus import Gpu, GpuFacts
from launcher.machine.hardware import MIB
from launcher.machine.machine_facts import BuildFacts, HostFacts, Machine, NetworkFacts
from launcher.machine.software import TESTED, SoftwareFacts
from launcher.machine.storage import DiskFacts, Folder
from launcher.plan.plan import Plan

GIB = 2**30
A100, V100 = ("NVIDIA A100-SXM4-80GB", 81920, (8, 0)), ("Tesla V100-SXM2-32GB", 32510, (7, 0))
ADA = ("NVIDIA GeForce RTX 4090", 24564, (8, 9))


def gpus(kind: tuple[str, int, tuple[int, int]] = A100, count: int = 8, used: int = 0) -> tuple[Gpu, ...]:
    name, mib, capability = kind
    return tuple(Gpu(str(i), f"GPU-{i:04d}", name, mib * MIB, used, capability) for i in range(count))


def folder(free: int = 900 * GIB, filesystem: int = 1, **changes: Any) -> Folder:
    return replace(Folder("/data/x", free, 2 * free, True, filesystem, False), **changes)


def torch_section(kind: tuple[str, int, tuple[int, int]] = A100, count: int = 8) -> dict[str, Any]:
    device = {"name": kind[0], "capability": list(kind[2]), "total": kind[1] * MIB, "bf16": True}
    return {
        "version": "2.13.0", "cuda": "12.8", "hip": None, "available": True, "nccl": "2.27.3",
        "arch_list": ["sm_70", "sm_80", "sm_90", "compute_90"], "devices": [device] * count,
        "p2p": [[True] * count] * count,
    }  # fmt: skip


BITSANDBYTES = {
    "version": "0.50.2", "backend": "CUDA", "loaded": True, "compiled_with_cuda": True, "said": "",
}  # fmt: skip
DEEPSPEED = {
    "version": "0.19.8", "installed": [], "built_with": {"version": "0.0"},
    "compatible": {"cpu_adam": True, "fused_adam": True, "async_io": True},
}  # fmt: skip
HEALTHY = Machine(
    gpu=GpuFacts("ok", "", "570.86.15", "12.8", gpus(), None, ""),
    build=BuildFacts("13.2.0", "c++", "/usr/local/cuda", "12.8", "1.11.1", True, True, "/x", False, ()),
    network=NetworkFacts(("eth0",), True, True, False, "reachable", "huggingface.co", None),
    disk=DiskFacts(
        {name: folder() for name in ("run", "hub", "datasets", "cache", "extensions", "temporary")},
        folder(64 * GIB, 2), (), 0,
    ),
    host=HostFacts(2000 * GIB, 1900 * GIB, 64, None, 1048576, {}, True, True, None),
    software=SoftwareFacts("Linux", "3.11.7", dict(TESTED), ("pdsh", "ssh"), False),
    stack={"torch": torch_section(), "bitsandbytes": BITSANDBYTES, "deepspeed": DEEPSPEED},
)  # fmt: skip


def changed(part: str, **changes: Any) -> Machine:
    """The healthy machine with fields of one part changed."""
    return replace(HEALTHY, **{part: replace(getattr(HEALTHY, part), **changes)})


def with_stack(section: str, facts: dict[str, Any] | None = None, **changes: Any) -> Machine:
    """The healthy machine whose child answered otherwise."""
    new = {**HEALTHY.stack[section], **changes} if facts is None else facts
    return replace(HEALTHY, stack={**HEALTHY.stack, section: new})


def with_folder(name: str, **changes: Any) -> Machine:
    """The healthy machine with one folder changed."""
    return changed("disk", folders={**HEALTHY.disk.folders, name: folder(**changes)})


NO_GPU = replace(
    changed("gpu", smi="absent", driver=None, cuda=None, gpus=()),
    stack={
        **HEALTHY.stack,
        "torch": {**torch_section(count=0), "cuda": None, "available": False, "arch_list": [], "nccl": None},
        "bitsandbytes": {**BITSANDBYTES, "backend": "CPU", "compiled_with_cuda": False},
    },
)


def verdict(check_id: str, machine: Machine, plan: Plan | None = None) -> Verdict:
    """One check's answer."""
    (check,) = [check for check in CHECKS if check.id == check_id]
    return check.verdict(machine, plan)
