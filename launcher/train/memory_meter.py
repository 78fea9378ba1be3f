"""Memory of a training process: peaks by phase, bytes of its states, and `memory` of result.json."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback

from launcher.machine.gpus import memory_of_process
from launcher.machine.hardware import MIB
from launcher.train.job import Job
from launcher.train.trace.tape import StorageWatch
from launcher.train.upstream.deepspeed_seams import call_before_step
from launcher.train.upstream.torch_seams import local_part, storage_key

METERED_STEPS = 3
"""Optimizer steps that are measured on a CPU: watching every operation costs a seventh of its speed. The
first makes the optimizer's states."""


class PeakBytes(NamedTuple):
    """Peak bytes of one device; on CPU both are those of live tensor storages."""

    allocated: int = 0
    """Bytes of tensors."""
    reserved: int = 0
    """Bytes that the caching allocator had reserved."""


class Meter:
    """Peaks of named phases on every device of this process: CUDA's statistics, or tensor storages on CPU.

    A phase within another one is measured separately: an evaluation during training is not training. Tensors
    that live through a phase count in it.
    """

    def __init__(self, *, on_cuda: bool) -> None:
        self._gauge: _CudaGauge | _CpuGauge = _CudaGauge() if on_cuda else _CpuGauge()
        self._open: list[str] = []
        self._peaks: dict[str, dict[int, PeakBytes]] = {}
        self._largest: dict[str, int] = {}
        self.held: Callable[[], Iterable[torch.Tensor]] = tuple
        """Long-lived tensors, which may have been made while nothing was measured."""

    @property
    def method(self) -> str:
        """How the peaks are measured; numbers of two methods are not comparable."""
        return self._gauge.method

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as a part of the phase `name`, which may occur several times.

        On a CPU a phase that has had batches before is measured again only from a larger batch on.
        """
        self._note()
        awake = self._gauge.awake
        self._open.append(name)
        self._gauge.restart()
        try:
            if name in self._largest:
                self.rest()
            else:
                self.wake()
            yield
        finally:
            self._note()
            self._open.pop()
            if awake:
                self.wake()
            else:
                self.rest()
            self._gauge.restart()

    def wake(self) -> None:
        """Measure from here on."""
        if not self._gauge.awake:
            self._gauge.watch(self.held())
            self._gauge.wake()

    def rest(self) -> None:
        """Pause until `wake` or a larger batch, if measuring costs time."""
        self._gauge.rest()

    def comes(self, batch: Mapping[str, Any]) -> None:
        """A batch of the innermost phase is about to be used; one that is larger than all before is measured.

        Its tensors, which another process or thread may have made, are counted.
        """
        tensors = [item for item in batch.values() if isinstance(item, torch.Tensor)]
        self.watch(tensors)
        if not self._open:
            return
        size = sum(tensor.numel() for tensor in tensors if tensor.dim() > 1)
        if size > self._largest.get(self._open[-1], -1):
            self._largest[self._open[-1]] = size
            self.wake()

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that another thread or process made, or that were made outside of a phase."""
        self._gauge.watch(tensors)

    def peak(self, name: str) -> PeakBytes | None:
        """The phase's peak on its fullest device, None for a phase that did not occur."""
        if name not in self._peaks:
            return None
        return self._peaks[name][self.fullest(name)]

    def fullest(self, name: str) -> int:
        """The device with the highest peak in a phase; 0 for the CPU."""
        peaks = self._peaks[name]
        return max(peaks, key=lambda device: peaks[device].reserved)

    def context(self, device: int) -> int:
        """Bytes of the device that this process has outside the allocator: context, kernels, NCCL."""
        return self._gauge.context(device)

    def device_bytes(self, device: int) -> int | None:
        """Total bytes of the device as CUDA reports them, None for the CPU."""
        return self._gauge.device_bytes(device)

    def _note(self) -> None:
        """Record the peak of the innermost phase so far."""
        if not self._open:
            return
        before = self._peaks.setdefault(self._open[-1], {})
        for device, now in self._gauge.read().items():
            old = before.get(device, PeakBytes())
            before[device] = PeakBytes(max(old.allocated, now.allocated), max(old.reserved, now.reserved))


class _CudaGauge:
    """The caching allocator's peaks on every visible device, since a device map may use several."""

    method = "cuda-reserved+context"
    awake = True

    def __init__(self) -> None:
        torch.cuda.init()

    def wake(self) -> None:
        """Nothing: the allocator always counts, at no cost."""

    def rest(self) -> None:
        """Nothing."""

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Nothing: the allocator knows every tensor."""

    def restart(self) -> None:
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> dict[int, PeakBytes]:
        return {
            device: PeakBytes(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
            for device in range(torch.cuda.device_count())
        }

    def context(self, device: int) -> int:
        """By nvidia-smi where it lists this process; else all that is used, which counts other processes."""
        free, total = torch.cuda.mem_get_info(device)
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        own = memory_of_process(os.getpid()).get(uuid, total - free)
        return max(0, int(min(own, total - free) - torch.cuda.memory_reserved(device)))

    def device_bytes(self, device: int) -> int:
        return int(torch.cuda.mem_get_info(device)[1])


class _CpuGauge:
    """Live tensor storages, as one device."""

    method = "cpu-tensor-storages"

    def __init__(self) -> None:
        self._storages = _StorageMeter()
        self._open = contextlib.ExitStack()
        self.awake = False

    def wake(self) -> None:
        if self.awake:
            return
        if "torch._dynamo" in sys.modules:
            # Layers that are called while every operation is watched would never be compiled later.
            self._open.enter_context(torch.compiler.set_stance("force_eager"))
        self._open.enter_context(self._storages)
        self.awake = True

    def rest(self) -> None:
        self._open.close()
        self.awake = False

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._storages.take_over(tensor)

    def restart(self) -> None:
        self._storages.peak = self._storages.live

    def read(self) -> dict[int, PeakBytes]:
        return {0: PeakBytes(self._storages.peak, self._storages.peak)}

    def context(self, device: int) -> int:
        return 0

    def device_bytes(self, device: int) -> None:
        return None


class _StorageMeter(StorageWatch):
    """Counts the bytes of live storages, which are the same on every run, unlike the resident set."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0

    def add(self, tensor: torch.Tensor) -> int | None:
        """Batches in a data loader's queue do not count: they are not on a device yet."""
        return None if tensor.layout is torch.strided and tensor.is_shared() else super().add(tensor)

    def take_over(self, tensor: torch.Tensor) -> None:
        super().add(tensor)

    def born(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> int:
        """Its bytes."""
        size = 0 if storage.device.type == "meta" else storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        return size

    def died(self, number: int) -> None:
        self.live -= number


class MeteredSteps(TrainerCallback):
    """Pauses the meter of a CPU run after the first steps.

    Other possible peaks are measured too: the first save and the end of training; by the meter itself larger
    batches and evaluations.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._steps = 0
        self._saved = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._steps += 1
        first_save = control.should_save and not self._saved
        self._saved = self._saved or control.should_save
        ends = control.should_training_stop or state.global_step >= state.max_steps
        if first_save or ends or self._steps < METERED_STEPS:
            self._meter.wake()
        else:
            self._meter.rest()


class FirstContext(TrainerCallback):
    """Measures what each process holds outside torch's allocator after its first step, and reports it.

    The first step has made NCCL's communicators. On a CPU there is nothing to measure.
    """

    def __init__(self, meter: Meter, planned: Mapping[str, Any]) -> None:
        """planned: components of the plan, bytes."""
        self._meter, self._planned = meter, planned
        self.found: list[int] = []
        """Bytes, by rank."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.found or not self._meter.method.startswith("cuda"):
            return
        own = self._meter.context(args.device.index or 0)
        self.found = [row["context"] or 0 for row in gathered({"context": own})]
        if args.process_index == 0:
            planned = planned_outside(self._planned)
            beside = "" if planned is None else f", {planned / MIB:,.0f} MiB planned"
            sizes = [f"{size / MIB:,.0f}" for size in sorted({min(self.found), max(self.found)})]
            print(f"CUDA context and NCCL's buffers: {' to '.join(sizes)} MiB per process{beside}")


def planned_outside(components: Mapping[str, Any]) -> int | None:
    """Bytes of a plan's components outside torch's allocator; None without a plan of them."""
    return None if "context" not in components else components["context"] + components.get("nccl", 0)


CPU = -1
"""The CPU among device indices."""

# Where DeepSpeed's optimizers (runtime/zero/stage_1_and_2.py, stage3.py, bf16_optimizer.py,
# fp16/*.py) keep the float32 copies that they update.
_MASTERS = (
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat_partition",
    "fp32_groups_flat",
    "fp32_groups",
)


def bytes_by_device(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of the distinct storages behind tensors: device index -> bytes, the CPU's under `CPU`."""
    seen: set[int] = set()
    found: dict[int, int] = {}
    for tensor in tensors:
        storage = local_part(tensor).untyped_storage()
        if storage_key(storage) in seen or storage.device.type == "meta":
            continue
        seen.add(storage_key(storage))
        device = storage.device.index if storage.device.type == "cuda" else CPU
        found[device] = found.get(device, 0) + storage.nbytes()
    return found


def held_tensors(trainer: Any) -> Iterator[torch.Tensor]:
    """Every tensor of the model, and of its reference model."""
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            yield from weight_tensors(model)
            yield from model.buffers()


def weight_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters with the constants of quantised ones; under ZeRO-3 the shards of this process.

    Small parameters that ZeRO-3 keeps gathered are a buffer of the engine, not weights of the rank.
    """
    for parameter in model.parameters():
        shard = getattr(parameter, "ds_tensor", None)
        yield parameter.data if shard is None else shard
        if (scales := getattr(parameter, "SCB", None)) is not None:
            yield scales
        state = getattr(parameter, "quant_state", None)
        while state is not None:
            yield from _tensors(vars(state))
            state = getattr(state, "state2", None)
    for module in model.modules():  # bitsandbytes moves int8 scales there in the first forward
        scales = getattr(getattr(module, "state", None), "SCB", None)
        if isinstance(scales, torch.Tensor):
            yield scales


def gradient_tensors(model: torch.nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    """Gradients before an optimizer step: of the parameters, and the partitions of ZeRO."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            yield parameter.grad
    for level in _levels(optimizer):
        yield from _tensors(getattr(level, "averaged_gradients", {}))


def optimizer_tensors(model: torch.nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    """States of the optimizer and float32 copies of an engine, without the model's own parameters."""
    own = {storage_key(local_part(parameter).untyped_storage()) for parameter in model.parameters()}
    for level in _levels(optimizer):
        copies = [getattr(level, name, ()) for name in _MASTERS]
        copies.append([group["params"] for group in getattr(level, "param_groups", ())])
        yield from (t for t in _tensors(copies) if storage_key(local_part(t).untyped_storage()) not in own)
        yield from _tensors(list(getattr(level, "state", {}).values()))


def _levels(optimizer: Any) -> Iterator[Any]:
    """An optimizer and those that it wraps: accelerate's, DeepSpeed's, torch's."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists and mappings."""
    if isinstance(value, torch.Tensor):
        yield value.data
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


class GradientBytes(TrainerCallback):
    """Records the gradients' bytes once, just before the first optimizer step."""

    def __init__(self, *, steps_in_backward: bool) -> None:
        self._steps_in_backward = steps_in_backward
        self.found: dict[int, int] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """DeepSpeed's engine steps inside backward, where no callback is called."""
        if self._steps_in_backward:
            engine = given["optimizer"].optimizer
            call_before_step(engine, lambda: self._take(given["model"], engine))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if not self._steps_in_backward:
            self._take(given["model"], given["optimizer"])

    def _take(self, model: torch.nn.Module, optimizer: Any) -> None:
        if not self.found:
            self.found = bytes_by_device(gradient_tensors(model, optimizer))


STATES = ("weights", "gradients", "optimizer", "context")


def memory_record(job: Job, meter: Meter, measured: Any) -> dict[str, Any]:
    """Predicted and measured bytes of one device, `host` of one node; None if unknown.

    measured: what `fit` returned. The largest value of all processes counts; every process must call it.
    """
    context = measured.components["context"]
    train = meter.peak("train")
    assert train is not None, "a run is recorded after it was trained"
    on_cuda = meter.method.startswith("cuda")
    mine: dict[str, int | None] = {
        "measured": train.reserved + context,
        "allocated": train.allocated if on_cuda else None,
        "host": resident_peak(),
        "largest": measured.largest_batch or None,
        **_visible_states(job, measured.components, on_cuda=on_cuda),
    }
    for phase in ("load", "eval", "save"):
        peak = meter.peak(phase)
        mine[phase] = None if peak is None else peak.allocated + context
    ranks = gathered(mine)
    most = {name: _most(rank[name] for rank in ranks) for name in mine}
    plan = job.plan.get("memory") or {}
    resident = plan.get("phases", {}).get("step", {})
    return {
        "predicted": plan.get("total"),
        "measured": most["measured"],
        "method": meter.method,
        "allocated": most["allocated"],
        "load": {"predicted": plan.get("load_peak"), "measured": most["load"]},
        "eval": {"predicted": plan.get("eval_peak"), "measured": most["eval"]},
        "save": {"predicted": plan.get("save_peak"), "measured": most["save"]},
        "host": {"predicted": plan.get("host_bytes"), "measured": _fullest_node(job, ranks)},
        "components": {
            name: {
                "predicted": planned_outside(resident) if name == "context" else resident.get(name),
                "measured": most[name],
            }
            for name in STATES
        },
        "contexts": measured.contexts,
        "device_bytes": meter.device_bytes(meter.fullest("train")),
        "steps": measured.steps,
        "tokens": {"planned": planned_tokens(job), "largest": most["largest"]},
    }


def _most(values: Iterable[int | None]) -> int | None:
    """The largest of the measured values."""
    return max((value for value in values if value is not None), default=None)


def _visible_states(job: Job, components: dict[str, int], *, on_cuda: bool) -> dict[str, int | None]:
    """The components that are certainly on the device, which a CPU run cannot distinguish from its host."""
    found: dict[str, int | None] = dict(components)
    if not on_cuda and job.sharding.offload_optimizer != "none":
        found["optimizer"] = found["gradients"] = None
    if not on_cuda and job.sharding.offload_param != "none":
        found["weights"] = None
    return found


def planned_tokens(job: Job) -> int | None:
    """Tokens of a micro-batch as planned, padding included; None for images."""
    task = job.task
    if not task.reads_tokens:
        return None
    micro = job.trainer.per_device_train_batch_size or 1
    return task.sequences(job) * micro * job.data.max_length


def resident_peak() -> int:
    """Peak bytes of this process's resident set."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def gathered(mine: dict[str, int | None]) -> list[dict[str, int | None]]:
    """The values of every process, by rank; every process must call it."""
    if not torch.distributed.is_initialized():
        return [mine]
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    row = [-1 if value is None else value for value in mine.values()]
    tensor = torch.tensor(row, dtype=torch.int64, device=device)
    rows = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(rows, tensor)
    return [
        {name: None if value < 0 else value for name, value in zip(mine, row.tolist(), strict=True)}
        for row in rows
    ]


def _fullest_node(job: Job, ranks: list[dict[str, int | None]]) -> int:
    """The sum of the workers' resident sets on the node where it is largest."""
    local = min(job.plan["hardware"]["devices_per_node"], len(ranks))
    sizes = [rank["host"] or 0 for rank in ranks]
    return max(sum(sizes[start : start + local]) for start in range(0, len(sizes), local))
