"""Checks of networking and of settings outside the recipe that change a run."""

from __future__ import annotations

import re

from launcher.engines.deepspeed import DEEPSPEED
from launcher.knowledge.doctor.check import Check, Verdict, fail, needed, ok, size, skip, warn
from launcher.knowledge.doctor.needs import on_gpu
from launcher.machine.machine_facts import DEFAULT_PORT, HOSTFILE, Machine
from launcher.plan.plan import Plan

_OLD_CACHE = "no longer read by transformers; used as HF_HUB_CACHE unless that or HF_HOME is set"
GONE = {
    "WANDB_DISABLED": "no longer read: set trainer.report_to instead",
    "TRANSFORMERS_CACHE": _OLD_CACHE,
    "PYTORCH_TRANSFORMERS_CACHE": _OLD_CACHE,
    "PYTORCH_PRETRAINED_BERT_CACHE": _OLD_CACHE,
}
CHANGES = {
    "ACCELERATE_MIXED_PRECISION": "overrides the precision of the plan",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "overrides the accumulation of the plan",
    "ACCELERATE_USE_DEEPSPEED": "enables DeepSpeed regardless of the plan",
    "ACCELERATE_USE_FSDP": "enables FSDP regardless of the plan",
    "ACCELERATE_TORCH_DEVICE": "moves every tensor to another device",
    "ACCELERATE_DYNAMO_BACKEND": "compiles the model",
    "CUDA_LAUNCH_BLOCKING": "synchronises every kernel: for debugging only, slow",
    "DS_SKIP_CUDA_CHECK": "mixes CUDA releases",
    "NVIDIA_TF32_OVERRIDE": "overrides torch's TF32 setting",
    "LD_PRELOAD": "preloads libraries in every process",
    "LOCAL_RANK": "a process of another launcher's run",
    "RANK": "a process of another launcher's run",
    "WORLD_SIZE": "a process of another launcher's run",
    "PYTORCH_CUDA_ALLOC_CONF": "old name of PYTORCH_ALLOC_CONF: overrides the allocator settings of the plan",
    "BNB_CUDA_VERSION": "overrides which native library bitsandbytes loads",
}
_LEAST_SHM = 64 * 2**20
"""Docker's default, which a few data-loading processes fill."""
_SHM_PER_RANK = 66 * 2**20
_LEAST_NOFILE = 4096
_LEAST_MEMLOCK = 64 * 2**20
_INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def interfaces(machine: Machine, plan: Plan | None) -> Verdict:
    """Whether process groups find an address to connect on."""
    there, env = machine.network.interfaces, machine.host.environment
    found = ", ".join(there) or "only loopback"
    for name in _INTERFACE_VARIABLES:
        value = env.get(name, "").lstrip("=")
        wanted = [w for w in value.split(",") if w and not w.startswith("^")]
        if wanted and not any(t.startswith(w.partition(":")[0]) for w in wanted for t in (*there, "lo")):
            many = plan is not None and plan.hardware.num_devices > 1
            message = f"{name}={value} names no interface of this machine"
            return needed(many, found, message, f"unset {name}")
    if not machine.network.host_resolves:
        message = "this machine's host name does not resolve: gloo and torchrun may hang or fail"
        return warn(found, message, "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME")
    if plan is not None and plan.hardware.num_nodes > 1 and not there:
        return fail(found, "several nodes need a network, and there is none")
    return ok(found)


def ports(machine: Machine, plan: Plan | None) -> Verdict:
    """29500, the default port of torchrun, accelerate and deepspeed."""
    if machine.network.default_port_free:
        return ok(f"{DEFAULT_PORT} is free")
    message = "another job may use it; effilaunch picks a free port, other launchers do not"
    return warn(f"{DEFAULT_PORT} is taken", message, "pass --master_port to other launchers")


def hostfile(machine: Machine, plan: Plan | None) -> Verdict:
    """deepspeed's default hostfile."""
    lines = machine.network.hostfile
    if lines is None:
        return ok(f"no {HOSTFILE}")
    entries = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    bad = [entry for entry in entries if not re.fullmatch(r"\S+\s+slots=\d+", entry)]
    hint = f"move {HOSTFILE} away, or pass another with --hostfile"
    if bad:
        message = "deepspeed reads it by default and stops at entries other than `HOST slots=N`"
        run = plan is not None and plan.job.engine is DEEPSPEED
        return needed(run, f"{len(bad)} bad entries of {len(entries)}", message, hint)
    missing = "" if "pdsh" in machine.software.programs or len(entries) < 2 else "; pdsh is not installed"
    message = "deepspeed reads it by default and starts processes on its hosts"
    return warn(f"{len(entries)} hosts{missing}", message, hint)


def mpi4py(machine: Machine, plan: Plan | None) -> Verdict:
    """Used only by a DeepSpeed script that is started without a launcher."""
    absent = skip("not installed", "not needed: every run uses a launcher")
    return ok("installed") if machine.software.mpi4py else absent


def shared_memory(machine: Machine, plan: Plan | None) -> Verdict:
    """Data-loading processes, NCCL and DeepSpeed on CPUs exchange data in it."""
    folder = machine.disk.shared_memory
    if folder is None:
        return warn("no /dev/shm", "DataLoader workers and NCCL use it", "mount a tmpfs there")
    found = f"{size(folder.free)} free of {size(folder.total)}"
    ranks = 1 if plan is None else plan.hardware.devices_per_node
    engine = plan is not None and plan.job.engine is DEEPSPEED and plan.hardware.is_cpu
    wanted = ranks * _SHM_PER_RANK if engine else 0
    hint = "docker run --shm-size=16g (or --ipc=host); Kubernetes: an emptyDir of medium Memory"
    if not folder.writable or folder.free < wanted:
        message = f"the run's ranks need {size(wanted)}" if wanted else "it is not writable"
        return needed(plan is not None, found, message, hint)
    if folder.total <= _LEAST_SHM:
        message = (
            "Docker's default: DataLoader workers fail with `Bus error`, NCCL with `unhandled system error`"
        )
        many = plan is not None and on_gpu(plan) and ranks > 1
        return needed(many, found, message, hint)
    return ok(found)


def leftovers(machine: Machine, plan: Plan | None) -> Verdict:
    """DeepSpeed's buffers of CPU runs that ended."""
    count, used = len(machine.disk.leftovers), machine.disk.leftover_bytes
    if not count:
        return ok("none")
    message = "left by DeepSpeed CPU runs; they occupy memory"
    hint = "if no DeepSpeed run is active: rm /dev/shm/deepspeed_allreduce_buffer_*"
    return warn(f"{count} buffers, {size(used)}", message, hint)


def environment(machine: Machine, plan: Plan | None) -> Verdict:
    """Variables that change a run silently."""
    env = machine.host.environment
    changes = [f"{name}: {why}" for name, why in {**GONE, **CHANGES}.items() if name in env]
    if not changes:
        return ok(f"none of {len(env)} variables changes runs")
    hint = "unset those that are not meant for this run"
    return warn(f"{len(changes)} variables", "; ".join(changes), hint)


def accelerate_config(machine: Machine, plan: Plan | None) -> Verdict:
    """accelerate's default configuration, which `accelerate launch` reads silently."""
    path = machine.host.accelerate_config
    if path is None:
        return ok("none")
    message = "a plain `accelerate launch` reads it silently; effilaunch passes its own configuration"
    return warn(path, message, "move it away if runs differ between users")


def ulimits(machine: Machine, plan: Plan | None) -> Verdict:
    """Open files and page-locked memory."""
    host = machine.host
    files = "unlimited" if host.nofile is None else str(host.nofile)
    locked = "unlimited" if host.memlock is None else size(host.memlock)
    found = f"nofile {files}, memlock {locked}"
    if host.nofile is not None and host.nofile < _LEAST_NOFILE:
        message = "DataLoader workers pass tensors as open files: `Too many open files`"
        return warn(found, message, f"ulimit -n {_LEAST_NOFILE * 16}")
    several = plan is not None and plan.hardware.num_nodes > 1
    if several and host.memlock is not None and host.memlock < _LEAST_MEMLOCK:
        return warn(found, "InfiniBand needs locked memory", "ulimit -l unlimited")
    return ok(found)


LAUNCH_CHECKS = (
    Check("interfaces", "network interfaces", interfaces),
    Check("ports", "ports", ports),
    Check("hostfile", "hostfile", hostfile),
    Check("mpi4py", "mpi4py", mpi4py),
    Check("shared-memory", "shared memory", shared_memory),
    Check("shared-memory-leftovers", "dead shared buffers", leftovers),
    Check("environment", "environment", environment),
    Check("accelerate-config", "accelerate's defaults", accelerate_config),
    Check("ulimits", "limits", ulimits),
)
