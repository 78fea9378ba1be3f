"""Streams that only keep account of their order, to find what two of them do to the same memory at once.

A CPU does everything at once and in order, so copies on streams of their own are right there whatever waits
are missing. Here each operation is an access of the current stream to the memory of its tensors; two
accesses, one of which writes, must be ordered by waits. Freed memory that is given out again is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Stream:
    def __init__(self) -> None:
        self.seen: dict[Stream, int] = {self: 0}
        """How much of each stream has ended before what this one does next."""

    def record_event(self) -> dict[Stream, int]:
        return dict(self.seen)

    def wait_event(self, event: dict[Stream, int]) -> None:
        for stream, count in event.items():
            self.seen[stream] = max(self.seen.get(stream, 0), count)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Streams(TorchDispatchMode):
    """Stands in for the device's module, and watches what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.current = Stream()
        self.races: list[str] = []
        self.host: list[torch.Tensor] = []
        """Kept until the end: page-locked memory is not given out again before its copies have ended."""
        self._accesses: dict[int, list[tuple[Stream, int, bool, str]]] = {}

    Stream = Stream

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if "empty" in name or "view" in name or "detach" in name:
            return out  # neither reads nor writes
        self.current.seen[self.current] += 1
        written = {id(one) for one in tree_leaves(out)}
        for tensor in {id(one): one for one in tree_leaves((args, kwargs, out))}.values():
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                self._access(tensor, id(tensor) in written, name)
        return out

    def _access(self, tensor: torch.Tensor, writes: bool, name: str) -> None:
        known = self._accesses.setdefault(tensor.untyped_storage().data_ptr(), [])
        for stream, count, wrote, earlier in known:
            if (writes or wrote) and self.current.seen.get(stream, 0) < count:
                self.races.append(f"{name} does not wait for {earlier}")
        known.append((self.current, self.current.seen[self.current], writes, name))
