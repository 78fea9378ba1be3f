"""The device of this rank, compared with the plan and with the GPU that the run was started for."""

from __future__ import annotations

import os

import torch
from transformers import TrainingArguments

from launcher.errors import MachineError, Problem
from launcher.machine.gpus import SAME_SIZE, STARTED_FOR
from launcher.train.arguments import make_arguments
from launcher.train.job import Job
from launcher.train.machine import why_no_device

CODE = "device-differs"
_GIB = 2**30


def arguments_on_planned_device(job: Job) -> TrainingArguments:
    """`make_arguments`, which sets the device. MachineError where that is not the planned one."""
    check_cuda(job)
    args = make_arguments(job)
    check_device(job, args.device)
    return args


def check_cuda(job: Job) -> None:
    """MachineError where a run that is planned for GPUs would find none: before the arguments exist.

    transformers would refuse bf16 without the cause, and train in fp16 or fp32 on the CPU.
    """
    if job.plan["hardware"]["device"] != "cpu" and not torch.cuda.is_available():
        raise _differs(job, f"torch sees no GPU: {why_no_device(torch)}", _hint_without_cuda())


def check_device(job: Job, device: torch.device) -> None:
    """MachineError where this rank's device is not the one that the plan counts on.

    device: that of the arguments. Compared are its kind, memory, compute capability and, where the run was
    started by `effilaunch`, UUID.
    """
    planned = job.plan["hardware"]
    wanted = "cpu" if planned["device"] == "cpu" else "cuda"
    if device.type != wanted:
        hint = "unset ACCELERATE_* variables of your environment"
        raise _differs(job, f"this rank would train on {device}", hint)
    if wanted == "cpu":
        return
    found = torch.cuda.get_device_properties(device)
    level, least = (found.major, found.minor), planned["compute_capability"]
    text = f"this rank has {device}, {found.name} ({_gib(found.total_memory)}, sm_{level[0]}{level[1]}"
    uuid = f"GPU-{found.uuid}"
    started = [one for one in os.environ.get(STARTED_FOR, "").split(",") if one]
    number = torch.cuda.current_device() if device.index is None else device.index
    if number < len(started) and started[number] != uuid:
        hint = "compare `nvidia-smi -L` with the run's CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER"
        raise _differs(job, f"{text}, {uuid}), and was started for {started[number]}", hint)
    size = planned["device_bytes"]
    if size is not None and found.total_memory < SAME_SIZE * size:
        raise _differs(job, f"{text}), and the plan counts on {_gib(size)}", _OTHER)
    if least is not None and level < _capability(least):
        raise _differs(job, f"{text}), and the plan counts on compute capability {least}", _OTHER)


_OTHER = "plan for the GPUs of this machine (without --on), or choose others with CUDA_VISIBLE_DEVICES"


def _capability(number: float) -> tuple[int, int]:
    """12.1 -> (12, 1)"""
    major, _, minor = str(number).partition(".")
    return int(major), int(minor)


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"


def _differs(job: Job, what: str, hint: str) -> MachineError:
    planned = job.plan["hardware"]
    count = planned["num_nodes"] * planned["devices_per_node"]
    message = f"the run is planned for {count}x{planned['device']}, and {what}"
    return MachineError(Problem(CODE, message, hint=hint))


def _hint_without_cuda() -> str:
    if torch.version.cuda is None:
        return "install torch from the index of a CUDA build (pytorch.org/get-started), or plan with --on cpu"
    return "repair or update the driver (`effilaunch doctor` says more), or plan with --on cpu"
