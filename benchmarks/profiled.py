"""The peak of a piece of code on a CPU, from what torch's profiler saw of the allocator."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


def count_all_threads() -> None:
    """From here on the allocator keeps its total for every thread; call it before tensors are made.

    By itself it counts those of the profiler alone, and what a thread of gloo frees would count as held.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def tensor_bytes() -> int:
    """Bytes of the storages of all CPU tensors that Python knows."""
    storages: dict[int, int] = {}
    gc.collect()
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and found.device.type == "cpu":
            local = getattr(found, "_local_tensor", found)  # a DTensor holds a share
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def peak_bytes(run: Callable[[], object]) -> int:
    """Bytes that tensors held before `run`, plus how far the allocator's total rose above its start."""
    before = tensor_bytes()
    gc.disable()  # cycles would be freed at moments that differ from run to run
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            run()
    finally:
        gc.enable()
    changes = [event.extra_fields for event in _events(seen.profiler.kineto_results.experimental_event_tree())
               if event.tag == _EventType.Allocation]  # fmt: skip
    start = changes[0].total_allocated - changes[0].alloc_size
    return before + max(change.total_allocated for change in changes) - start


def _events(roots: list[Any]) -> Iterator[Any]:
    """Every event of the trees, in the order of time within each branch."""
    waiting = roots[::-1]
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(reversed(event.children))
