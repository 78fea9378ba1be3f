"""Peaks of a process's device memory by phase: CUDA's own statistics, or live tensor storages on CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from launcher.train.storages import StorageWatch


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

    @property
    def method(self) -> str:
        """How the peaks are taken; figures of one method are not those of the other."""
        return self._gauge.method

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as a part of the phase `name`, which may come several times."""
        self._note()
        watching = contextlib.nullcontext() if self._open else self._gauge.watching()
        self._open.append(name)
        self._gauge.restart()
        try:
            with watching:
                yield
        finally:
            self._note()
            self._open.pop()
            self._gauge.restart()

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

    def __init__(self) -> None:
        torch.cuda.init()

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

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

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        return self._storages

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
