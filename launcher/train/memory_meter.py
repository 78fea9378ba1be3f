"""Peaks of a process's device memory by phase: CUDA's own statistics, or live tensor storages on CPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback

from launcher.train.trace.tape import StorageWatch

METERED_STEPS = 3
"""Optimizer steps after which a CPU run is measured no more: watching every operation takes a seventh of its
speed. The first makes the optimizer's states, and the ones after it have them all along."""


class Held(NamedTuple):
    """Peak bytes of one device; on CPU both are those of live tensor storages."""

    allocated: int = 0
    """What tensors held."""
    reserved: int = 0
    """What the caching allocator had taken from the device."""


class Meter:
    """Peaks of named phases, on every device of this process.

    A phase within another one counts for itself alone: an evaluation in the middle of training is not
    training. What lives through a phase counts in it.
    """

    def __init__(self, *, on_cuda: bool) -> None:
        self._gauge: _CudaGauge | _CpuGauge = _CudaGauge() if on_cuda else _CpuGauge()
        self._open: list[str] = []
        self._peaks: dict[str, dict[int, Held]] = {}
        self._largest: dict[str, int] = {}
        self.held: Callable[[], Iterable[torch.Tensor]] = tuple
        """What lives all along, and may have been made while nothing was measured."""

    @property
    def method(self) -> str:
        """How the peaks are taken; figures of one method are not those of the other."""
        return self._gauge.method

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as a part of the phase `name`, which may come several times.

        On a CPU a phase that has had batches before rests until a larger one comes.
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
        """Measure no more until `wake` or a larger batch, where measuring costs time."""
        self._gauge.rest()

    def comes(self, batch: Mapping[str, Any]) -> None:
        """A batch of the innermost phase is about to be used: one that is larger than all before is measured.

        Its tensors are counted, which a process or thread of the data loader may have made.
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
        """Count tensors made outside of a phase, by another thread or process (CUDA counts them anyway)."""
        self._gauge.watch(tensors)

    def peak(self, name: str) -> Held | None:
        """The phase's peak on its fullest device, None for a phase that never was."""
        if name not in self._peaks:
            return None
        return self._peaks[name][self.fullest(name)]

    def fullest(self, name: str) -> int:
        """The device that held most in a phase; 0 for the CPU."""
        peaks = self._peaks[name]
        return max(peaks, key=lambda device: peaks[device].reserved)

    def context(self, device: int) -> int:
        """Bytes that the device has lost beside the allocator's: context, kernels, NCCL, other processes."""
        return self._gauge.context(device)

    def device_bytes(self, device: int) -> int | None:
        """Bytes that CUDA shows of the device, None for the CPU."""
        return self._gauge.device_bytes(device)

    def _note(self) -> None:
        """Keep what the innermost phase has reached so far."""
        if not self._open:
            return
        before = self._peaks.setdefault(self._open[-1], {})
        for device, now in self._gauge.read().items():
            old = before.get(device, Held())
            before[device] = Held(max(old.allocated, now.allocated), max(old.reserved, now.reserved))


class _CudaGauge:
    """The caching allocator's peaks on every visible device: a device map spreads over several."""

    method = "cuda-reserved+context"
    awake = True

    def __init__(self) -> None:
        torch.cuda.init()

    def wake(self) -> None:
        """Nothing to do: the allocator counts all along, and it costs nothing."""

    def rest(self) -> None:
        """Nothing either."""

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Nothing to do: the allocator knows every tensor."""

    def restart(self) -> None:
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> dict[int, Held]:
        return {
            device: Held(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
            for device in range(torch.cuda.device_count())
        }

    def context(self, device: int) -> int:
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free - torch.cuda.memory_reserved(device))

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
            # Layers that are called while every operation is watched would never be compiled afterwards.
            self._open.enter_context(torch.compiler.set_stance("force_eager"))
        self._open.enter_context(self._storages)
        self.awake = True

    def rest(self) -> None:
        self._open.close()
        self.awake = False

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._storages.handed_over(tensor)

    def restart(self) -> None:
        self._storages.peak = self._storages.live

    def read(self) -> dict[int, Held]:
        return {0: Held(self._storages.peak, self._storages.peak)}

    def context(self, device: int) -> int:
        return 0

    def device_bytes(self, device: int) -> None:
        return None


class _StorageMeter(StorageWatch):
    """Counts the bytes of storages while they live.

    Unlike the process's resident set it gives the same number on every run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0

    def add(self, tensor: torch.Tensor) -> int | None:
        """Batches that wait in a data loader's queue do not count: no device holds them yet."""
        return None if tensor.layout is torch.strided and tensor.is_shared() else super().add(tensor)

    def handed_over(self, tensor: torch.Tensor) -> None:
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
    """Lets the meter of a CPU run rest once the first steps are measured.

    What else may be the peak is measured, too: the first save, and what comes after the last step. The meter
    itself sees to larger batches and to evaluations.
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
