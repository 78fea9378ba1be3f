"""Private parts of torch: storages, fake tensors, kernels and defaults that have no public name."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["DispatchMode", "leaves", "never_compiled"]

DispatchMode = TorchDispatchMode
leaves = tree_leaves
never_compiled = torch._disable_dynamo  # torch.compiler.disable imports the compiler at once
_ATEN = torch.ops.aten


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor: its shard of one that FSDP2 spreads over the ranks.

    DTensor.to_local() would add an operation, which a DispatchMode sees.
    """
    shard: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return shard


def assert_on_device(holds: torch.Tensor) -> None:
    """Assert without waiting for the device: a later operation there raises."""
    torch._assert_async(holds)


def writes_to(tensor: torch.Tensor) -> int:
    """How often a tensor's values were changed in place, through whichever of its views."""
    return int(tensor._version)


def storage_key(storage: torch.UntypedStorage) -> int:
    """The same for all Python objects of one storage, fake ones included, whose data_ptr is always 0."""
    return int(storage._cdata)


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Operations within this compute shapes alone; autocast frees the casts that it keeps in their order."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), _CastsInOrder():
        yield


class _CastsInOrder(TorchDispatchMode):
    """autocast keeps its casts of parameters by their addresses, so it frees them in another order each time:
    two traces of one step would differ."""

    def __enter__(self) -> Self:
        self._casts: list[weakref.ref[torch.Tensor]] = []
        self._clear, torch.clear_autocast_cache = torch.clear_autocast_cache, self._freed
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        torch.clear_autocast_cache = self._clear
        super().__exit__(*failure)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _ATEN._to_copy.default and isinstance(args[0], torch.nn.Parameter):
            self._casts.append(weakref.ref(result))
        return result

    def _freed(self) -> None:
        held = [cast() for cast in reversed(self._casts)]
        self._casts.clear()
        self._clear()
        while held:
            held.pop()


class EveryExpertHit(TorchDispatchMode):
    """Experts in a loop over those that have tokens, on fake tensors: each has the same number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self._experts = 0
        self._hits = -1
        self._compared = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The loops of transformers 5.23: `hit.nonzero()` of one value for each expert, then `torch.where` of
        an expert's row [choices, tokens], and a comparison of its index with the number of experts."""
        first: Any = args[0] if args else None
        if func is _ATEN.nonzero.default and torch.is_tensor(first):
            if first.dim() == 1:
                self._experts = first.numel()
                hits = first.new_empty((first.numel(), 1), dtype=torch.long)
                self._hits = storage_key(hits.untyped_storage())
                return hits
            if self._experts and first.dim() == 2:
                rows = -(-first.numel() // self._experts)
                return first.new_empty((rows, 2), dtype=torch.long)
        if func is _ATEN._local_scalar_dense.default and first in self._compared:
            return False
        if func is _ATEN._local_scalar_dense.default and storage_key(first.untyped_storage()) == self._hits:
            return 0
        if func in (_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default):
            args = (first, [_every_place(one) for one in args[1]], *args[2:])
        result = func(*args, **(kwargs or {}))
        if func is _ATEN.eq.Scalar and self._experts and result.dim() == 0:
            self._compared[result] = True
        return result


def _every_place(index: torch.Tensor | None) -> torch.Tensor | None:
    """Instead of a mask of one dimension, as many places as it may choose at most."""
    if index is None or index.dtype != torch.bool or index.dim() != 1:
        return index
    return index.new_empty(index.shape, dtype=torch.long)


def replace_tensors(module: torch.nn.Module, new: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace each parameter and buffer of a module itself, which setattr refuses for some."""
    for held in (module._parameters, module._buffers):
        held.update({name: new(tensor) for name, tensor in held.items() if tensor is not None})


def compile_or_run_plainly() -> None:
    """A layer that torch cannot compile here trains as it is, with torch's warning."""
    import torch._dynamo

    torch._dynamo.config.suppress_errors = True


def cuda_architectures() -> list[str]:
    """The architectures that torch was built for, on a machine without a driver too."""
    return list(torch.cuda.get_arch_list() or torch._C._cuda_getArchFlags().split())


def set_group_timeout(limit: timedelta) -> None:
    """The timeout of process groups that are made without one."""
    from torch.distributed import distributed_c10d

    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = limit


@contextlib.contextmanager
def autocast_kernels(kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Run other code for operations of aten where CPU autocast is on; names as `pow.Tensor_Scalar`."""
    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of these have a kernel, which is replaced
        for name, kernel in kernels.items():
            library.impl(name, kernel, "AutocastCPU")
        yield


def without_cpu_autocast() -> contextlib.AbstractContextManager[Any]:
    excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    guard: contextlib.AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(excluded)
    return guard


def flash_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The flash kernel of scaled_dot_product_attention: its output."""
    out: torch.Tensor = _ATEN._scaled_dot_product_flash_attention(*args, **kwargs)[0]
    return out


def efficient_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The memory-efficient kernel of scaled_dot_product_attention: its output."""
    out: torch.Tensor = efficient_forward(*args, **kwargs)[0]
    return out


def efficient_forward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Its output, the logarithms of its rows' sums, and the state of its random numbers."""
    found: tuple[torch.Tensor, ...] = _ATEN._scaled_dot_product_efficient_attention(*args, **kwargs)
    return found


def efficient_backward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """The gradients of its query, key, value and mask."""
    found: tuple[torch.Tensor, ...] = _ATEN._scaled_dot_product_efficient_attention_backward(*args, **kwargs)
    return found
