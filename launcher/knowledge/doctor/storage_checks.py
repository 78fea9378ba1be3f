"""Verdicts on disks and host memory."""

from __future__ import annotations

from launcher.facts.machine import Machine
from launcher.facts.machine_disk import Folder
from launcher.knowledge.doctor.check import Check, Verdict, fail, needed, ok, size, skip, warn
from launcher.knowledge.doctor.needs import (
    checkpoint_bytes,
    checkpoints_kept,
    saved_text,
    uses_nvme,
    weights_bytes,
    written_bytes,
)
from launcher.plan.plan import Plan

_LEAST_FREE = 10 * 2**30
_CACHES = ("hub", "datasets", "cache", "extensions", "temporary")


def download_bytes(machine: Machine, plan: Plan | None) -> int:
    """What of the model is still to be fetched."""
    model = machine.hub_model
    return 0 if plan is None or model is None or model.cached else weights_bytes(plan)


def disk(machine: Machine, plan: Plan | None) -> Verdict:
    """The run's folder against the checkpoints that will lie in it."""
    folder = machine.disk.folders["run"]
    found = f"{size(folder.free)} free at {folder.path}"
    if not folder.writable:
        return needed(
            plan is not None, found, "this user may not write there", "--output-dir, or another folder"
        )
    if plan is None:
        if folder.free < _LEAST_FREE:
            return warn(found, "little room for checkpoints", "make room, or start runs elsewhere")
        return ok(found)
    wanted = written_bytes(plan)
    if folder.filesystem == machine.disk.folders["hub"].filesystem:
        wanted += download_bytes(machine, plan)
    hint = "make room, name another folder with --output-dir, or lower trainer.save_total_limit"
    if folder.free < wanted:
        return fail(found, f"the run writes {size(wanted)} ({saved_text(plan)} and the result)", hint)
    if checkpoints_kept(plan) is None:
        message = (
            f"every checkpoint takes {size(checkpoint_bytes(plan))} and nothing limits how many are kept"
        )
        return warn(found, message, "set trainer.save_total_limit")
    return ok(found, f"the run writes {size(wanted)} at most")


def nvme(machine: Machine, plan: Plan | None) -> Verdict:
    """The folder of states that are offloaded to NVMe."""
    if plan is None or not uses_nvme(plan):
        return skip("no recipe that offloads to NVMe")
    if machine.nvme is None:
        return fail("no nvme_path", "offload to NVMe needs a folder", "set sharding.nvme_path")
    return nvme_folder(machine.nvme, plan)


def nvme_folder(folder: Folder, plan: Plan, swapped: int = 0) -> Verdict:
    """The same for a folder that need not exist yet; swapped: bytes of files there that the run replaces."""
    found = f"{size(folder.free)} free at {folder.path}"
    hint = "set sharding.nvme_path to a folder on a local disk"
    if not folder.writable:
        return fail(found, "this user may not write there", hint)
    wanted = plan.memory.host.nvme
    if folder.free + swapped < wanted:
        return fail(found, f"the run keeps {size(wanted)} there", f"make room, or {hint}")
    if folder.on_network:
        return warn(found, "a network filesystem: every step waits for it", hint)
    return ok(found, f"the run keeps {size(wanted)} there")


def caches(machine: Machine, plan: Plan | None) -> Verdict:
    """Where models, data and built operators are kept."""
    folders = machine.disk.folders
    hub = folders["hub"]
    found = f"{size(hub.free)} free at {hub.path}"
    barred = [name for name in _CACHES if not folders[name].writable]
    if barred:
        message = "not writable: " + ", ".join(f"{name} ({folders[name].path})" for name in barred)
        return needed(
            plan is not None, found, message, "set HF_HOME, EFFILAUNCH_CACHE, TORCH_EXTENSIONS_DIR, TMPDIR"
        )
    wanted = download_bytes(machine, plan)
    if hub.free < wanted:
        message = f"the model takes {size(wanted)} to download"
        return fail(found, message, "set HF_HOME to a larger disk")
    if hub.free < _LEAST_FREE:
        return warn(found, "little room for models and data", "set HF_HOME to a larger disk")
    if folders["extensions"].on_network:
        message = "operators are built on a network filesystem, where a lock may outlive its builder"
        return warn(found, message, "set TORCH_EXTENSIONS_DIR to a local disk")
    return ok(found)


def host_memory(machine: Machine, plan: Plan | None) -> Verdict:
    """What the ranks of this machine take beside the devices."""
    total, free = machine.host.memory, machine.host.available
    if total is None:
        return skip("unknown")
    found = f"{size(total)}" + ("" if free is None else f", {size(free)} available")
    if plan is None:
        return ok(found)
    wanted = plan.memory.host_bytes
    hint = (
        "fewer ranks, no offload to the CPU, or a machine with more memory (the kernel kills with signal 9)"
    )
    if wanted > total:
        return fail(found, f"the run takes {size(wanted)}", hint)
    if free is not None and wanted > free:
        return warn(found, f"the run takes {size(wanted)}, and other processes leave less", hint)
    return ok(found, f"the run takes {size(wanted)}")


STORAGE_CHECKS = (
    Check("disk", "disk of the run", disk),
    Check("nvme", "NVMe folder", nvme),
    Check("caches", "caches", caches),
    Check("host-memory", "host memory", host_memory),
)
