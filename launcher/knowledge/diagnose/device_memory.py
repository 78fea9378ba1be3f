"""What the numbers of a message of torch's CUDA allocator say: fragmentation, or another process."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_SIZE = r"(\d+(?:\.\d+)?) (bytes|[KMGT]iB)"
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_CONTEXT = 3 << 29
"""Bytes of a process outside of torch's allocator: CUDA's context, libraries, NCCL's buffers."""
_LARGE = 0.05
"""Share of the device that is no usual remainder."""
_FORMS: Mapping[str, re.Pattern[str]] = {
    "requested": re.compile(rf"Tried to allocate {_SIZE}"),
    "total": re.compile(rf"total capaci?ty of {_SIZE}|{_SIZE} total capacity"),
    "free": re.compile(rf"of which {_SIZE} is free|{_SIZE} free"),
    "process": re.compile(rf"this process has {_SIZE} memory in use"),
    "allocated": re.compile(rf"Of the allocated memory {_SIZE}|{_SIZE} already allocated"),
    "unallocated": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
    "reserved": re.compile(rf"{_SIZE} (?:reserved in total by PyTorch|cached)"),
}
"""Each size as torch 2.1 and later write it, and as older versions did."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Sizes in bytes."""

    requested: float
    total: float
    free: float
    unallocated: float
    """What torch has reserved beyond its tensors."""
    others: float
    """What other processes hold, without what is probably this process's own."""


def read_memory(message: str) -> DeviceMemory | None:
    """The sizes in a message; None if one is missing."""
    found = {name: _size(form, message) for name, form in _FORMS.items()}
    requested, total, free, allocated = (found[n] for n in ("requested", "total", "free", "allocated"))
    unallocated, reserved = found["unallocated"], found["reserved"]
    if reserved is None and allocated is not None and unallocated is not None:
        reserved = allocated + unallocated
    if requested is None or not total or free is None or allocated is None or reserved is None:
        return None
    process = found["process"] or 0.0
    own = process if process > reserved else reserved + _CONTEXT
    return DeviceMemory(requested, total, free, max(0.0, reserved - allocated), max(0.0, total - free - own))


def _size(form: re.Pattern[str], message: str) -> float | None:
    found = form.search(message)
    if found is None:
        return None
    number, unit = (group for group in found.groups() if group is not None)
    return float(number) * _UNITS[unit]


def is_fragmented(message: str) -> bool:
    """Whether the reserved memory without tensors would have held the request."""
    memory = read_memory(message)
    return memory is not None and memory.unallocated >= max(memory.requested, _LARGE * memory.total)


def is_held_by_others(message: str) -> bool:
    """Whether the memory of other processes would have held the request."""
    memory = read_memory(message)
    if memory is None or is_fragmented(message):
        return False
    return memory.others >= _LARGE * memory.total and memory.others + memory.free >= memory.requested


CONDITIONS: Mapping[str, Callable[[str], bool]] = {
    "oom-fragmentation": is_fragmented,
    "gpu-in-use": is_held_by_others,
}
"""Failure -> what must be true of a message besides its patterns."""
