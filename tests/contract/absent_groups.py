"""Process groups of ranks that are not there: torch's fake groups in the places of NCCL and gloo.

One process runs as one rank of `WORLD_SIZE`. Each collective is written down with its group, its backend and
the device of its tensors, and is computed as if every other rank had what this one has: a sum is this rank's
tensor times the ranks, a gather its copies. What all ranks get from one (a broadcast, a scatter, what gloo
reduces or gathers) rank 0's run leaves for the others, so that they take the same way through the code; a
group of other ranks is told what rank 0's own is.

Not covered: what a communicator needs of network and memory, timeouts, values that are different on each
rank, and that the shards of all ranks fill a checkpoint's tensors (torch's check of it is off: each rank has
the same shard here). A collective that other ranks alone call shows only where records are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from absent_cuda import Gpus, on_device
from torch._C._distributed_c10d import FakeProcessGroup, ProcessGroup, _create_work_from_future
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint import default_planner
from torch.distributed.distributed_c10d import ReduceOp

PLACES = {  # operation -> (index of what it fills, of what it reads, of the group)
    "broadcast_": (0, 0, 1), "allreduce_": (0, 0, 1), "allreduce_coalesced_": (0, 0, 1),
    "allgather_": (0, 1, 2), "_allgather_base_": (0, 1, 2), "allgather_coalesced_": (0, 1, 2),
    "allgather_into_tensor_coalesced_": (0, 1, 2), "reduce_scatter_": (0, 1, 2),
    "_reduce_scatter_base_": (0, 1, 2), "reduce_scatter_tensor_coalesced_": (0, 1, 2), "reduce_": (0, 0, 1),
    "gather_": (0, 1, 2), "scatter_": (0, 1, 2), "alltoall_": (0, 1, 2), "alltoall_base_": (0, 1, 2),
    "barrier": (0, 0, 1),
}  # fmt: skip
ALONE = {"reduce_", "gather_", "alltoall_base_", "barrier", "allreduce_coalesced_", "allgather_coalesced_",
         "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"}  # fmt: skip
"""Operations that return their work alone."""


class Groups:
    """The collectives of this rank."""

    def __init__(self, gpus: Gpus, rank: int, shared: Path) -> None:
        """shared: where rank 0 leaves what the others get from it."""
        self._gpus = gpus
        self.rank = rank
        self._shared = shared
        self._given: list[list[torch.Tensor]] = torch.load(shared) if rank else []
        self._next = 0
        self.op: Any = ReduceOp.SUM
        """Of the collective that Python has begun; C++ asks for sums."""

    def leave(self) -> None:
        if self.rank == 0:
            torch.save(self._given, self._shared)

    # --- one collective ---------------------------------------------------------------------------

    def answers(self, func: Any) -> bool:
        """Whether an operation is a collective."""
        name = func.name().partition("::")[2].partition(".")[0]
        return func.namespace == "c10d" or (
            func.namespace == "_c10d_functional" and not name.startswith("_wrap")
        )

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.name().partition("::")[2]
        if func.namespace == "_c10d_functional":
            return self._functional(name.partition(".")[0], args)
        out, given, place = PLACES[name]
        group = ProcessGroup.unbox(args[place])
        outs, ins = _flat(args[out]), _flat(args[given])
        op, self.op = self.op, ReduceOp.SUM
        if "reduce" in name:
            self._note(name, group, ins, op)
        else:
            self._note(name, group, ins)
        if name == "scatter_" or (name == "broadcast_" and args[2] == 0):
            self._from_rank_0(outs, ins if name == "scatter_" else None)
        elif self._backend(group) == "gloo" and name in ("allreduce_", "allgather_", "_allgather_base_"):
            self._as_if_alike(name, args, outs, ins, group, op)
            self._from_rank_0(outs, None)
        else:
            self._as_if_alike(name, args, outs, ins, group, op)
        work = _done(outs).boxed()
        return work if name in ALONE else (args[out], work)

    def _from_rank_0(self, outs: list[torch.Tensor], choices: list[torch.Tensor] | None) -> None:
        """What rank 0 gives: it keeps a copy for the others. choices: one for each rank, of rank 0."""
        if self.rank == 0:
            kept = outs if choices is None else choices
            self._given.append([_plain(tensor) for tensor in kept])
            if choices:
                outs[0].copy_(choices[0])
            return
        given = self._given[self._next] if self._next < len(self._given) else []
        self._next += 1
        mine = given if choices is None else given[self.rank : self.rank + 1]
        for tensor, value in zip(outs, mine, strict=False):
            if tensor.shape == value.shape:
                tensor.copy_(value)

    def _as_if_alike(  # noqa: C901 - one branch for each operation
        self, name: str, args: Any, outs: list[torch.Tensor], ins: list[torch.Tensor], group: Any, op: Any
    ) -> None:
        size, own = group.size(), group.rank()
        if name in ("allreduce_", "allreduce_coalesced_", "reduce_"):
            for tensor in outs:
                tensor.copy_(_reduced(tensor, op, size))
        elif name in ("allgather_", "gather_", "allgather_coalesced_"):
            for listed, tensor in zip(args[0], ins, strict=False):
                for each in listed:
                    if each.shape == tensor.shape:
                        each.copy_(tensor)
        elif name in ("_allgather_base_", "allgather_into_tensor_coalesced_"):
            for whole, part in zip(outs, ins, strict=True):
                whole.view(-1).view(size, -1).copy_(part.reshape(1, -1).expand(size, -1))
        elif name == "reduce_scatter_":
            for tensor, parts in zip(outs, args[1], strict=True):
                tensor.copy_(_reduced(parts[own], op, size))
        elif name in ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"):
            for part, whole in zip(outs, ins, strict=True):
                part.view(-1).copy_(_reduced(whole.reshape(size, -1)[own], op, size))
        elif name == "alltoall_":
            for tensor, value in zip(outs, ins, strict=True):
                if tensor.shape == value.shape:
                    tensor.copy_(value)
        elif name == "alltoall_base_" and outs[0].numel() == ins[0].numel():
            outs[0].view(-1).copy_(ins[0].reshape(-1))

    def _functional(self, name: str, args: Any) -> Any:
        """Collectives of DTensor, whose results are new tensors."""
        if name == "wait_tensor":
            return args[0]
        assert isinstance(args[-1], str), name
        group = c10d._resolve_process_group(args[-1])
        ins = _flat(args[0])
        op = getattr(ReduceOp, args[1].upper()) if "reduce" in name else None
        self._note(name, group, ins, op)
        size, own = group.size(), group.rank()

        def made(tensor: torch.Tensor) -> torch.Tensor:
            gpu = self._gpus.of(tensor)
            if name.startswith("all_reduce"):
                found = _reduced(tensor, op, size)
            elif name.startswith("all_gather"):
                found = tensor.repeat(size, *[1] * (tensor.dim() - 1))
            elif name.startswith("reduce_scatter"):
                found = _reduced(tensor.chunk(size)[own], op, size).contiguous()
            else:
                found = tensor.clone()
            return found if gpu is None else self._gpus.put(found, gpu)

        results = [made(tensor) for tensor in ins]
        if name.endswith("_"):
            for tensor, value in zip(ins, results, strict=True):
                tensor.copy_(value)
            return args[0]
        return results if isinstance(args[0], list | tuple) else results[0]

    # --- what is written down ---------------------------------------------------------------------

    def _backend(self, group: Any) -> str:
        return str(c10d._world.pg_map[group][0])

    def _note(self, name: str, group: Any, tensors: list[torch.Tensor], op: Any = None) -> None:
        gpus = [self._gpus.of(tensor) for tensor in tensors]
        self._gpus.record.add(
            "collective",
            op=name.strip("_"),
            backend=self._backend(group),
            ranks=dist.get_process_group_ranks(group),
            devices=sorted({"cpu" if gpu is None else f"cuda:{gpu}" for gpu in gpus}),
            current=self._gpus.current,
            tensors=[[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors],
            reduce=None if op is None else str(op.op if hasattr(op, "op") else op).rpartition(".")[2],
        )


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _flat(item)]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _reduced(tensor: torch.Tensor, op: Any, size: int) -> torch.Tensor:
    name = str(op)
    return tensor * size if "SUM" in name else tensor.clone()


def _done(result: list[torch.Tensor]) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


# --- the groups --------------------------------------------------------------------------------------


class _Fake(type):
    def __instancecheck__(cls, found: Any) -> bool:
        return isinstance(found, FakeProcessGroup)


def _backend_class(name: str) -> Any:
    class Options:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.is_high_priority_stream = False

    def new(cls: Any, store: Any, rank: int, size: int, *_: Any, **__: Any) -> Any:
        return FakeProcessGroup._create_internal(rank, size)

    FakeProcessGroup._set_sequence_number_for_group = lambda self: None

    return _Fake(name, (), {"__new__": new, "Options": Options})


def answer_for_groups(groups: Groups, gpus: Gpus) -> None:
    """torch.distributed with NCCL and gloo, whose other ranks are not there."""
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = _backend_class("ProcessGroupNCCL")
    c10d.ProcessGroupGloo = _backend_class("ProcessGroupGloo")
    c10d._NCCL_AVAILABLE = True
    dist.is_nccl_available = c10d.is_nccl_available = lambda: True
    c10d._store_based_barrier = lambda *_, **__: None

    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[Any]:
        import os

        own = [int(os.environ[n]) if v == -1 else v for n, v in (("RANK", rank), ("WORLD_SIZE", world_size))]
        yield dist.HashStore(), *own

    c10d.rendezvous = rendezvous
    default_planner._validate_global_plan = lambda plans, metadata: []
    _remember_operations(groups)
    _note_new_groups(groups, gpus)
    device_mesh.split_group = c10d.split_group = dist.split_group = _split_group
    _all_to_all(groups, gpus)
    _reducer(gpus)
    # An object with tensors that was sent: they lie on the host, like what else comes from rank 0.
    torch.serialization.register_package(
        5, lambda _storage: None, lambda storage, place: storage if place.startswith("cuda") else None
    )


def _all_to_all(groups: Groups, gpus: Gpus) -> None:
    """DeepSpeed calls it within an operation written in Python, of which a dispatch mode sees nothing."""

    def all_to_all_single(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None,
        group: Any = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        before, gpus.computing = gpus.computing, False
        for tensor in (output, input) if before else ():
            gpus.put(tensor, gpus.current)
        place = (group or c10d._get_default_group()).boxed()
        work = groups(torch.ops.c10d.alltoall_base_.default, (output, input, place), {})
        gpus.computing = before
        return dist.Work.unbox(work) if async_op else None

    dist.all_to_all_single = c10d.all_to_all_single = all_to_all_single


def _split_group(parent_pg: Any = None, split_ranks: Any = (), **_: Any) -> Any:
    """The group of this rank among parts of a group, which NCCL splits without `new_group`."""
    made = {tuple(ranks): c10d.new_group(list(ranks), backend="nccl") for ranks in split_ranks}
    return next((group for ranks, group in made.items() if dist.get_rank() in ranks), None)


def _remember_operations(groups: Groups) -> None:
    """What to reduce by: the dispatcher passes an object of C++."""
    for name in ("AllreduceOptions", "AllreduceCoalescedOptions", "ReduceOptions", "ReduceScatterOptions"):
        plain = getattr(c10d, name)

        def remember(self: Any, attribute: str, value: Any, _plain: Any = plain) -> None:
            if attribute == "reduceOp":
                groups.op = value
            _plain.__setattr__(self, attribute, value)

        setattr(c10d, name, type(name, (plain,), {"__setattr__": remember}))


def _note_new_groups(groups: Groups, gpus: Gpus) -> None:
    make = c10d._new_group_with_tag

    def new_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        gpus.record.add(
            "group", backend=str(backend or "as the first"), ranks=None if ranks is None else list(ranks)
        )
        return make(ranks, timeout, backend, *args, **kwargs)

    c10d._new_group_with_tag = new_group


def _reducer(gpus: Gpus) -> None:
    """DDP's C++ makes its buckets on the device of the parameters."""

    def inside(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with on_device(gpus):
                return call(*args, **kwargs)

        return run

    reducer = dist.Reducer
    for name in ("_rebuild_buckets",):
        setattr(reducer, name, inside(getattr(reducer, name)))
    dist.Reducer = inside(reducer)
    verify = inside(dist._verify_params_across_processes)
    c10d._verify_params_across_processes = dist._verify_params_across_processes = verify
