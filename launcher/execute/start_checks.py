"""Check this node before a run starts: packages, devices and their memory, disk space, the folder of an
offload to NVMe."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from launcher.errors import Interrupted, MachineError, Problem
from launcher.execute.leftovers import LOCK, reserved_folder, swap_files
from launcher.execute.nodes import Nodes
from launcher.execute.signals import pause
from launcher.files.checkpoint import SAVING, SPARE, bytes_beside_tensors, complete_checkpoints, read_manifest
from launcher.knowledge.doctor.build_checks import (
    compiler,
    deepspeed_ops,
    libaio,
    ninja,
    nvcc,
    python_headers,
)
from launcher.knowledge.doctor.check import Verdict, size
from launcher.knowledge.doctor.needs import (
    checkpoint_bytes,
    checkpoints_kept,
    cuda_ops,
    needed_modules,
    nvme_path,
    result_bytes,
    saved_text,
)
from launcher.knowledge.doctor.storage_checks import nvme_folder
from launcher.machine import probe
from launcher.machine.gpus import Gpu, Holder, memory_holders, read_gpus, visible_gpus
from launcher.machine.machine_facts import BuildFacts, Stack, ask_stack, read_build
from launcher.machine.software import require_modules
from launcher.machine.storage import read_folder
from launcher.plan.plan import Plan

FREE_S = 60.0
"""How long the driver may take to free the memory of a process that has just ended."""
_POLL_S = 2.0


def check_machine(plan: Plan, nodes: Nodes | None = None) -> list[Gpu]:
    """The GPUs to use, none for a CPU. Raises MachineError if this node cannot run the plan."""
    require_modules(needed_modules(plan))
    hardware = plan.hardware
    if hardware.num_nodes != (1 if nodes is None else nodes.seat.num_nodes):
        here = "this is one" if nodes is None else f"{nodes.seat.num_nodes} take part"
        raise MachineError(
            Problem(
                "several-machines",
                f"{hardware.label} needs {hardware.num_nodes} node(s), and {here}",
                hint="list the nodes in a hostfile (launch.hostfile), or start the same command on each with "
                "--node-rank and --master-addr, or start it with srun in a Slurm job; --on plans for other "
                "hardware, --dry-run only writes the run directory",
            )
        )
    _check_host_memory(plan)
    if hardware.is_cpu:
        return []
    visible = visible_gpus()
    enough = [gpu for gpu in visible if gpu.is_enough_for(hardware)]
    # The agents count the devices of several nodes; with one task per device, a task may see only its own.
    if nodes is None and len(enough) < hardware.devices_per_node:
        weaker = [gpu.label for gpu in visible if gpu not in enough]
        less = f"; {', '.join(weaker)}: less memory or compute capability than planned" if weaker else ""
        raise MachineError(
            Problem(
                "device-missing",
                f"the plan is for {hardware.label}, this node has {len(enough)} such visible GPUs{less}",
                hint="--on plans for other hardware, --tiny rehearses the recipe on a CPU",
            )
        )
    return (enough if nodes is None else visible)[: hardware.devices_per_node]


def check_free_memory(needed: int, gpus: Sequence[Gpu], say: Callable[[str], None]) -> None:
    """Wait until each GPU has `needed` bytes free. MachineError, with who holds the rest, after FREE_S.

    gpus: as they were read last; those of which nvidia-smi does not report it count as free.
    """
    until, told = time.monotonic() + FREE_S, False
    while tight := [gpu for gpu in gpus if gpu.available is not None and gpu.available < needed]:
        if time.monotonic() >= until:
            holders = memory_holders()
            raise MachineError([_held(needed, gpu, holders) for gpu in tight])
        if not told:
            told = True
            names = ", ".join(f"GPU {gpu.index} has {size(gpu.available or 0)} free" for gpu in tight)
            say(f"{names}, the run needs {size(needed)}: waiting up to {FREE_S:.0f} s for ended processes")
        if (stopped := pause(min(_POLL_S, FREE_S))) is not None:
            raise Interrupted(Problem("interrupted", f"{stopped.name}: stopped while no rank was running"))
        now = {gpu.uuid: gpu for gpu in read_gpus(None, whole=False).gpus}
        gpus = [now.get(gpu.uuid, gpu) for gpu in gpus]


def spare_gpu(plan: Plan, known: Collection[str]) -> Gpu | None:
    """A GPU of this node that could be one of the plan's now; None where there is none.

    known: UUIDs of those that are not meant.
    """
    for gpu in read_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), whole=False).usable:
        is_sound = not (gpu.fault or gpu.is_mig or gpu.uuid in known) and gpu.is_enough_for(plan.hardware)
        if is_sound and (gpu.available is None or gpu.available >= plan.memory.needed):
            return gpu
    return None


def _held(needed: int, gpu: Gpu, holders: Sequence[Holder]) -> Problem:
    own = [holder for holder in holders if holder.uuid == gpu.uuid]
    by = [f"process {one.pid} ({one.name}) holds {_bytes(one.held)}" for one in own]
    listed = "; ".join(by) or f"{size(gpu.used)} is in use, and the driver lists no process here"
    of = "" if gpu.total is None else f" of {size(gpu.total)}"
    message = f"{gpu.label} has {size(gpu.available or 0)}{of} free, the run needs {size(needed)}: {listed}"
    hint = "end what uses it, or choose other GPUs with CUDA_VISIBLE_DEVICES"
    return Problem("device-memory-held", message, hint=hint)


def _bytes(held: int | None) -> str:
    return "an unknown part" if held is None else size(held)


def _check_host_memory(plan: Plan) -> None:
    """MachineError where this node's memory, or its cgroup's limit, is below what the plan needs of it.

    A plan for this machine fits already; one for hardware that a recipe or --on names was made without it.
    """
    held, needed = probe.host_memory_bytes(), plan.memory.host_bytes
    if held is None or needed <= held:
        return
    raise MachineError(
        Problem(
            "host-memory",
            f"the run needs {size(needed)} of host memory, and this node has {size(held)}",
            hint="remove `hardware` or --on, so that the plan counts this node's memory; or ask for more "
            "memory (launch.slurm.mem), or use a node with more",
        )
    )


def check_disk_space(plan: Plan, run_dir: Path, begins: float = inf) -> None:
    """Raise MachineError if the disk of `run_dir`, which need not exist, is too small for the run.

    Checkpoints of an earlier start count as written up to step `begins`, from which the run continues; later
    ones are moved aside and kept.
    """
    folder = read_folder(run_dir)
    result = result_bytes(plan) + bytes_beside_tensors(plan.spec.vocab_size)
    wanted = result + SPARE + _to_come(plan, run_dir / "checkpoints", begins)
    if folder.free >= wanted:
        return
    raise MachineError(
        Problem(
            "disk-full",
            f"the run will write {size(wanted)} ({saved_text(plan)} and the result) to {run_dir}, which has "
            f"{size(folder.free)} free",
            path="trainer.save_total_limit",
            hint="free disk space, set another --output-dir, lower trainer.save_total_limit, or set "
            "trainer.save_only_model: true",
        )
    )


def _to_come(plan: Plan, checkpoints: Path, begins: float) -> int:
    """Bytes of the checkpoints still to be written, by the estimate or the largest existing one.

    As much as a save asks to be free, which it skips otherwise (train/checkpoint/saving.py). An incomplete
    checkpoint is deleted before the next save. One more is assumed if the number is unknown.
    """
    complete = complete_checkpoints(checkpoints)
    there = [read_manifest(path) for step, path in complete.items() if step <= begins]
    first = checkpoint_bytes(plan) + bytes_beside_tensors(plan.spec.vocab_size)
    each = max([first, *(manifest.bytes for manifest in there if manifest is not None)])
    kept = checkpoints_kept(plan)
    more = 1 if kept is None else max(0, kept - len(there))
    incomplete = sum(path.stat().st_size for path in (checkpoints / SAVING).rglob("*") if path.is_file())
    return more * each - incomplete


_BUILD = {
    "libaio": libaio,
    "compiler": compiler,
    "ninja": ninja,
    "python-headers": python_headers,
    "nvcc": nvcc,
    "deepspeed-ops": deepspeed_ops,
}


@dataclass(frozen=True, slots=True)
class _BuildMachine:
    build: BuildFacts
    stack: Stack


def check_operators(plan: Plan) -> None:
    """Raise MachineError if an operator cannot be built, or an offload to NVMe lacks disk space.

    Only for operators that need more than a compiler (NVMe, ZeRO++, DeepSpeed's own Adam). Takes seconds: the
    training stack is imported in a child process.
    """
    path = nvme_path(plan)
    if path is None and not cuda_ops(plan):
        return
    verdicts = {} if path is None else {"nvme": _nvme_folder(Path(path), plan)}
    if all(verdict.status != "fail" for verdict in verdicts.values()):
        machine = _BuildMachine(read_build(os.environ), ask_stack(plan.interpreter, os.environ))
        verdicts |= {name: check(machine, plan) for name, check in _BUILD.items()}
    failed = [_problem(name, verdict) for name, verdict in verdicts.items() if verdict.status == "fail"]
    if failed:
        raise MachineError(failed)


def missing_for_operators(plan: Plan) -> list[str]:
    """What this node lacks for them, as warnings: the plan may run on another one."""
    path = nvme_path(plan)
    # torch itself is not asked: a plan for GPUs runs with a build for CUDA.
    machine = _BuildMachine(read_build(os.environ), {"deepspeed": {}, "torch": {"cuda": "any"}})
    verdicts = {} if path is None else {"nvme": _nvme_folder(Path(path), plan)}
    verdicts["libaio"] = libaio(machine, plan)
    if machine.build.nvcc is None:
        verdicts["nvcc"] = nvcc(machine, plan)
    bad = [_problem(name, found) for name, found in verdicts.items() if found.status in ("fail", "warn")]
    return [f"a run on this node would be slow or not start: {p.message} ({p.hint})" for p in bad]


def _nvme_folder(folder: Path, plan: Plan) -> Verdict:
    """The check of the folder. What a killed run left there is deleted before the next run starts."""
    left = sum(swap_files(folder).values()) if (folder / LOCK).exists() else 0
    return nvme_folder(read_folder(folder), plan, left)


@contextlib.contextmanager
def holding_nvme(plan: Plan, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the folder of the offload, if there is one, while the run lives.

    Raises MachineError if another run holds it.
    """
    path = nvme_path(plan)
    if path is None:
        yield
        return
    folder = Path(path)
    with reserved_folder(folder) as freed:
        if freed:
            say(f"removed {size(freed)} that a killed run left in {folder}")
        slow = nvme_folder(read_folder(folder), plan)
        if slow.status == "warn":
            say(f"{slow.found}: {slow.message} ({slow.hint})")
        yield


def _problem(name: str, verdict: Verdict) -> Problem:
    code = {"nvme": "nvme-folder", "libaio": "aio-missing", "nvcc": "jit-no-nvcc"}.get(name, name)
    path = "sharding.nvme_path" if name == "nvme" else None
    return Problem(code, f"{verdict.found}: {verdict.message}", path=path, hint=verdict.hint)
