"""Peak memory of a block of code: CUDA's own statistics, or live tensor storages on CPU."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(slots=True)
class Peak:
    """Filled when the measured block ends."""

    method: str
    """cuda-reserved | cpu-tensor-storages"""
    bytes: int = 0
    """Peak of this process's device or, on CPU, of its tensors."""
    allocated: int | None = None
    """CUDA only: peak of what tensors held inside the reserved bytes."""


@contextlib.contextmanager
def measure_peak(model: torch.nn.Module, *, on_cuda: bool) -> Iterator[Peak]:
    """Measure what training `model` takes within the block, weights included, for this process."""
    if on_cuda:
        peak = Peak("cuda-reserved")
        torch.cuda.reset_peak_memory_stats()
        try:
            yield peak
        finally:
            peak.bytes = torch.cuda.max_memory_reserved()
            peak.allocated = torch.cuda.max_memory_allocated()
        return
    peak = Peak("cpu-tensor-storages")
    meter = _StorageMeter()
    for tensor in (*model.parameters(), *model.buffers()):
        meter.add(tensor)
    try:
        with meter:
            yield peak
    finally:
        peak.bytes = meter.peak


class _StorageMeter(TorchDispatchMode):
    """Counts the bytes of storages from their first use as an output until they are freed.

    Unlike the process's resident set it gives the same number on every run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def add(self, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # a tensor without a storage of its own, e.g. sparse or fake
        key = storage._cdata
        if key in self._sizes:
            return
        size = storage.nbytes()
        self._sizes[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return out
