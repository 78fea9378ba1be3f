"""Checks of disks and host memory."""

from __future__ import annotations

from launcher.knowledge.doctor.check import Check, Verdict, fail, needed, ok, size, skip, warn
from launcher.knowledge.doctor.needs import (
    checkpoint_bytes,
    checkpoints_kept,
    saved_text,
    uses_nvme,
    weights_bytes,
    written_bytes,
)
from launcher.machine.machine_facts import Machine
from launcher.machine.storage import Folder
from launcher.plan.plan import Plan

_LEAST_FREE = 10 * 2**30
_CACHES = ("hub", "datasets", "cache", "extensions", "temporary")


def download_bytes(machine: Machine, plan: Plan | None) -> int:
    """The size of the model if it is not in the cache."""
    model = machine.hub_model
    return 0 if plan is None or model is None or model.cached else weights_bytes(plan)


def disk(machine: Machine, plan: Plan | None) -> Verdict:
    """Free space of the run's folder for its checkpoints."""
    folder = machine.disk.folders["run"]
    found = f"{size(folder.free)} free at {folder.path}"
    if not folder.writable:
        hint = "--output-dir, or another folder"
        return needed(plan is not None, found, "not writable for this user", hint)
    if plan is None:
        if folder.free < _LEAST_FREE:
            return warn(found, "little space for checkpoints", "free space, or run on another disk")
        return ok(found)
    wanted = written_bytes(plan)
    if folder.filesystem == machine.disk.folders["hub"].filesystem:
        wanted += download_bytes(machine, plan)
    hint = "free space, set another --output-dir, or lower trainer.save_total_limit"
    if folder.free < wanted:
        return fail(found, f"the run writes {size(wanted)} ({saved_text(plan)} and the result)", hint)
    if checkpoints_kept(plan) is None:
        message = f"each checkpoint is {size(checkpoint_bytes(plan))}, and their number is not limited"
        return warn(found, message, "set trainer.save_total_limit")
    return ok(found, f"the run writes {size(wanted)} at most")


def nvme(machine: Machine, plan: Plan | None) -> Verdict:
    """The folder of states that are offloaded to NVMe."""
    if plan is None or not uses_nvme(plan):
        return skip("no NVMe offload")
    if machine.nvme is None:
        return fail("no nvme_path", "NVMe offload needs a folder", "set sharding.nvme_path")
    return nvme_folder(machine.nvme, plan)


def nvme_folder(folder: Folder, plan: Plan, swapped: int = 0) -> Verdict:
    """The same for a folder that need not exist yet; swapped: bytes of files there that the run replaces."""
    found = f"{size(folder.free)} free at {folder.path}"
    hint = "set sharding.nvme_path to a folder on a local disk"
    if not folder.writable:
        return fail(found, "not writable for this user", hint)
    wanted = plan.memory.host.nvme
    if folder.free + swapped < wanted:
        return fail(found, f"the run needs {size(wanted)} there", f"free space, or {hint}")
    if folder.on_network:
        return warn(found, "network filesystem: slow in every step", hint)
    return ok(found, f"the run needs {size(wanted)} there")


def mirror(machine: Machine, plan: Plan | None) -> Verdict:
    """The object store of the checkpoints."""
    url = None if plan is None else plan.runtime.mirror
    if url is None:
        return skip("no mirror")
    if machine.mirror_obstacle is not None:
        hint = "check runtime.mirror, the network and the credentials (for S3: AWS_ACCESS_KEY_ID, …)"
        return fail(url, f"it cannot be written: {machine.mirror_obstacle}", hint)
    return ok(url, "an object was written, read and removed")


def caches(machine: Machine, plan: Plan | None) -> Verdict:
    """Where models, data and built operators are kept."""
    folders = machine.disk.folders
    hub = folders["hub"]
    found = f"{size(hub.free)} free at {hub.path}"
    barred = [name for name in _CACHES if not folders[name].writable]
    if barred:
        message = "not writable: " + ", ".join(f"{name} ({folders[name].path})" for name in barred)
        hint = "set HF_HOME, EFFILAUNCH_CACHE, TORCH_EXTENSIONS_DIR, TMPDIR"
        return needed(plan is not None, found, message, hint)
    wanted = download_bytes(machine, plan)
    if hub.free < wanted:
        message = f"the model download is {size(wanted)}"
        return fail(found, message, "set HF_HOME to a larger disk")
    if hub.free < _LEAST_FREE:
        return warn(found, "little space for models and data", "set HF_HOME to a larger disk")
    if folders["extensions"].on_network:
        message = "operators are compiled on a network filesystem, where stale locks may remain"
        return warn(found, message, "set TORCH_EXTENSIONS_DIR to a local disk")
    return ok(found)


def host_memory(machine: Machine, plan: Plan | None) -> Verdict:
    """Host memory that the ranks of this machine use."""
    total, free = machine.host.memory, machine.host.available
    if total is None:
        return skip("unknown")
    found = f"{size(total)}" + ("" if free is None else f", {size(free)} available")
    if plan is None:
        return ok(found)
    wanted = plan.memory.host_bytes
    hint = "use fewer ranks, no CPU offload, or a machine with more memory (else the OOM killer ends the run)"
    if wanted > total:
        return fail(found, f"the run needs {size(wanted)}", hint)
    if free is not None and wanted > free:
        return warn(found, f"the run needs {size(wanted)}, but other processes leave less", hint)
    return ok(found, f"the run needs {size(wanted)}")


STORAGE_CHECKS = (
    Check("disk", "disk of the run", disk),
    Check("nvme", "NVMe folder", nvme),
    Check("mirror", "object store", mirror),
    Check("caches", "caches", caches),
    Check("host-memory", "host memory", host_memory),
)
