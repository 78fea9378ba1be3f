"""DeepSpeed's offload to NVMe (ZeRO-Infinity): the folder and the buffers. Pure.

As read in DeepSpeed 0.19.8: runtime/swap_tensor/, runtime/zero/stage3.py and partition_parameters.py. `auto`
never chooses it: NVMe is many times slower than host memory, and how much slower was not measured here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.engines.deepspeed_config import FROM_PROFILE, profile_value
from launcher.machine.hardware import Hardware
from launcher.memory.job import MemoryJob
from launcher.memory.states import largest_tensor
from launcher.models.model import ModelSpec

if TYPE_CHECKING:
    from launcher.plan.draft import Draft

PATH = "sharding.nvme_path"
OPTIMIZER, PARAM, AIO = "offload_optimizer", "offload_param", "aio"

NO_RESUME = "DeepSpeed does not read the optimizer's states again, and would continue with fresh ones"

REUSE = "stage3_max_reuse_distance"

_ZERO = "zero_optimization"
_ADAM_TENSORS = 4
"""Weights, gradient and two moments: what one sub-group has in memory while it is updated."""
_ALIGNED_BYTES = 1024
"""Bytes that one thread reads or writes are a multiple of this (swap_tensor/utils.py AIO_ALIGNED_BYTES)."""

_AIO: dict[str, tuple[object, str]] = {
    "block_size": (
        1 << 20,
        "DeepSpeed's default: bytes of one request; a tensor smaller than this stays in memory",
    ),
    "queue_depth": (8, "DeepSpeed's default: requests that wait at the disk; `ds_nvme_tune` measures others"),
    "intra_op_parallelism": (1, "DeepSpeed's default: threads that share a tensor (once `thread_count`)"),
    "single_submit": (False, "DeepSpeed's default: requests are handed over a queue at a time"),
    "overlap_events": (True, "DeepSpeed's default: new requests are handed over while others are waited for"),
}


def on_nvme(draft: Draft) -> tuple[str, ...]:
    """Which of offload_optimizer and offload_param go to NVMe."""
    offloads = {OPTIMIZER: draft.sharding.offload_optimizer, PARAM: draft.sharding.offload_param}
    return tuple(name for name, device in offloads.items() if device == "nvme")


def decide_nvme(
    draft: Draft,
    profile: Mapping[str, object] | None,
    spec: ModelSpec,
    hardware: Hardware,
    processes: int,
) -> None:
    """Put the folder, the buffers and the I/O settings of an offload to NVMe into the draft.

    RecipeError where that is impossible: below stage 3, without a folder, with buffers that stop DeepSpeed.
    """
    used = on_nvme(draft)
    stage = draft.sharding.zero_stage
    if stage not in (None, 3):
        message = f"offload to NVMe needs ZeRO-3: at stage {stage} DeepSpeed keeps the states in host memory"
        hint = f"write zero_stage: 3 (or auto), or {used[0]}: cpu"
        raise draft.refuse("nvme-stage", f"sharding.{used[0]}", message, hint)
    if PARAM in used and hardware.is_cpu and processes == 1:
        message = (
            "one process on a CPU computes on the buffer into which DeepSpeed then reads the next parameter: "
            "the losses would silently be wrong"
        )
        hint = "use several processes, or offload_param: none"
        raise draft.refuse("nvme-one-cpu", f"sharding.{PARAM}", message, hint)
    _check_restarts(draft)
    _decide_path(draft, profile, used)
    given = _NvmeGiven(draft, profile or {})
    for name in used:
        given.put(f"{name}.pin_memory", not hardware.is_cpu, "page-locked: copies and the GPU overlap")
    if OPTIMIZER in used:
        _decide_optimizer(given)
    if PARAM in used:
        _decide_param(given, spec, processes)
    for name, (value, reason) in _AIO.items():
        given.put(f"{AIO}.{name}", value, reason)


def with_buffers(job: MemoryJob, draft: Draft) -> MemoryJob:
    """The job with the sizes of the buffers that were decided for it."""
    used = on_nvme(draft)
    if OPTIMIZER in used:
        job = replace(job, optimizer_buffers=draft.deepspeed.offload_optimizer.buffer_count)
    if PARAM in used:
        job = replace(
            job,
            param_buffers=draft.deepspeed.offload_param.buffer_count,
            param_buffer_values=draft.deepspeed.offload_param.buffer_size,
            params_in_host=draft.deepspeed.offload_param.max_in_cpu,
        )
    return job


class _NvmeGiven:
    """Settings that a base profile may have."""

    def __init__(self, draft: Draft, profile: Mapping[str, object]) -> None:
        self.draft, self._profile = draft, profile

    def put(self, name: str, value: object, reason: str) -> object:
        """Record the profile's value of `name` (block.key), else `value`; return the recorded one."""
        given = profile_value(self._profile, name if name.startswith(AIO) else f"{_ZERO}.{name}")
        setting = f"deepspeed.{name}"
        if given in (None, "auto"):
            self.draft.put(setting, value, reason)
            return value
        origin = self.draft.origin("sharding.config")
        by = "sharding.config" if origin is None else origin.by
        self.draft.put(setting, given, FROM_PROFILE, source="recipe", by=by)
        return given

    def small(self, name: str, value: object, least: int, why: str) -> None:
        """RecipeError where a profile's number makes DeepSpeed stop."""
        if isinstance(value, (int, float)) and value >= least:
            return
        message = f"{name} = {value!r} in the base profile: {why}, at least {least:,}"
        hint = "write a larger one, or remove it: the plan computes it"
        raise self.draft.refuse("nvme-buffers", "sharding.config", message, hint)


def _check_restarts(draft: Draft) -> None:
    """Such a run cannot resume from a checkpoint: launcher/train/checkpoint/resuming.py refuses it."""
    if draft.launch.max_restarts:
        message = f"a restart resumes from a checkpoint, which states on NVMe do not allow: {NO_RESUME}"
        raise draft.refuse("nvme-restarts", "launch.max_restarts", message, "remove it, or offload to cpu")
    draft.warn(f"a run that offloads to NVMe cannot be resumed: {NO_RESUME}; its saved weights are complete")


def _decide_path(draft: Draft, profile: Mapping[str, object] | None, used: tuple[str, ...]) -> None:
    """The recipe's folder, else the profile's: one for both offloads."""
    if draft.sharding.nvme_path is not None:
        return
    folders = {profile_value(profile or {}, f"{_ZERO}.{name}.nvme_path") for name in used} - {None, "auto"}
    if len(folders) > 1:
        message = f"the base profile names {' and '.join(sorted(map(str, folders)))}: one folder is checked"
        hint = "name one folder with sharding.nvme_path"
        raise draft.refuse("nvme-path-missing", "sharding.config", message, hint)
    if not folders:
        message = "offload to NVMe needs a folder on a local disk"
        hint = "write e.g. nvme_path: /local/nvme under `sharding:`, or `${ENV:TMPDIR}`"
        raise draft.refuse("nvme-path-missing", f"sharding.{used[0]}", message, hint)
    origin = draft.origin("sharding.config")
    by = "sharding.config" if origin is None else origin.by
    draft.put(PATH, str(folders.pop()), FROM_PROFILE, source="recipe", by=by)


def _decide_optimizer(given: _NvmeGiven) -> None:
    reason = "buffers of a complete sub-group each: weights, gradient and two moments of Adam at once"
    count = given.put(f"{OPTIMIZER}.buffer_count", _ADAM_TENSORS, reason)
    alone = "the next sub-group would need as many buffers again, and the last one to be written more"
    reading = given.put(f"{OPTIMIZER}.pipeline_read", False, alone)
    writing = given.put(f"{OPTIMIZER}.pipeline_write", False, alone)
    least = _ADAM_TENSORS * (1 + bool(reading) + bool(writing))
    given.small(f"{OPTIMIZER}.buffer_count", count, least, "a sub-group has four tensors, so has the next")


def _decide_param(given: _NvmeGiven, spec: ModelSpec, processes: int) -> None:
    needed = param_buffer_values(spec, processes, len(given.draft.model.add_tokens or ()))
    count = given.put(f"{PARAM}.buffer_count", 5, "DeepSpeed's default: parameters that are there at a time")
    given.small(f"{PARAM}.buffer_count", count, 2, "one is read while another is used")
    reason = "values of a rank's share of the largest parameter: in a smaller buffer DeepSpeed stops"
    size = given.put(f"{PARAM}.buffer_size", needed, reason)
    given.small(f"{PARAM}.buffer_size", size, needed, "a rank's share of the largest parameter goes into one")
    given.put(
        f"{PARAM}.max_in_cpu",
        1_000_000_000,
        "DeepSpeed's default: so many values of a rank stay in host memory, the rest goes to the disk",
    )
    reuse = "a parameter that waits for its next use keeps its buffer: none waits"
    if given.put(REUSE, 0, reuse):
        given.draft.warn(
            f"the base profile's {REUSE} keeps parameters that are used again soon, each in one of {count} "
            "buffers: with more of them DeepSpeed stops (Not enough buffers); 0 keeps none"
        )


def param_buffer_values(spec: ModelSpec, processes: int, added_tokens: int = 0) -> int:
    """Values of one parameter buffer: the largest partition of a parameter, rounded up to complete requests.

    transformers holds the experts of a layer in one parameter; embeddings grow by the added tokens.
    """
    experts = max((stack.experts for stack in spec.layout.stacks), default=0)
    rows = added_tokens * max(spec.layout.embed_width, spec.hidden_size)
    largest = max(largest_tensor(spec) + rows, experts)
    share, unit = -(-largest // processes), _ALIGNED_BYTES // 2
    return -(-share // unit) * unit
