"""Follows memory by the storages behind tensors, real ones and fake ones."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from launcher.train.upstream.torch_seams import DispatchMode, leaves, local_part, storage_key


class StorageWatch(DispatchMode):
    """Sees each storage from its first use as an output of an operation until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, int] = {}

    def born(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> int:
        """A storage is seen for the first time, behind `tensor`; the number under which it is remembered."""
        raise NotImplementedError

    def died(self, number: int) -> None:
        """The storage that `born` gave this number was freed."""
        raise NotImplementedError

    def add(self, tensor: torch.Tensor) -> int | None:
        """The number of the tensor's storage, None for one that has no storage of its own (sparse)."""
        try:
            storage = local_part(tensor).untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None
        key = storage_key(storage)
        if key not in self._known:
            self._known[key] = self.born(storage, tensor)
            weakref.finalize(storage, self._free, key)
        return self._known[key]

    def _free(self, key: int) -> None:
        self.died(self._known.pop(key))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        # Most operations return one tensor, and walking a tree of one costs more than looking.
        for leaf in (out,) if isinstance(out, torch.Tensor) else leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return out
