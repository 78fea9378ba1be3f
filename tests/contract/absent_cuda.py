"""GPUs that are not there: torch.cuda of a machine with H100s, on a torch that was built without CUDA.

A tensor of an absent GPU is an ordinary CPU tensor whose storage has a label, `cuda:N`. Its values are real,
so that a step, an evaluation and a save of any engine run to their ends; `device`, `is_cuda` and what else
Python asks are answered by the label. A dispatch mode gives each result the label of what it was made of,
and writes down what a GPU would have to do: copies between host and device, waits of the host, operations
that mix devices, the first use of each device. `torch.cuda` answers for the rows of a recorded `nvidia-smi`.

FakeTensor would give no values to save or to gather, and holds no parameters of bitsandbytes, which are a
subclass of their own.

Not covered, because CPU kernels compute all of it: kernels of CUDA, Triton, bitsandbytes and flash-attn,
their memory and their speed (`SHAPES` has those whose values are made up); streams and their order;
autocast, which casts by the CPU's list; the allocator's rounding and cache; pinned memory, whose tensors are
copies. What C++ makes for itself lies on the device only within a backward pass and within DDP's reducer
(`made_inside`).
"""

from __future__ import annotations

import contextlib
import csv
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before torch.cuda is replaced: it looks for private parts of a real one
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[2]
ATEN = torch.ops.aten
MIB = 2**20

WAITS = {
    ATEN._local_scalar_dense.default, ATEN.nonzero.default, ATEN.masked_select.default, ATEN.equal.default,
    ATEN._unique2.default, ATEN.unique_dim.default, ATEN.unique_consecutive.default,
    ATEN.repeat_interleave.Tensor, ATEN.bincount.default,
}  # fmt: skip
"""Operations whose result, or whose shape, the host waits for."""
INDEXING = {ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default, ATEN._index_put_impl_.default}
MIXES = {*INDEXING, ATEN.copy_.default, ATEN._to_copy.default, ATEN.set_.source_Tensor}
"""Operations that take tensors of host and device together."""


def _flash_forward(query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    total, heads = query.shape[:2]
    return (
        query.clone(),
        query.new_zeros((heads, total), dtype=torch.float),
        query.new_zeros(2, dtype=torch.uint64),
    )


def _flash_backward(grad: torch.Tensor, *tensors: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch.full_like(tensor, 1e-3) for tensor in tensors[:3])


SHAPES = {
    "torch_attn::_varlen_attn": _flash_forward,
    "torch_attn::_varlen_attn_backward": _flash_backward,
}
"""Kernels that no CPU has: the results have shapes and dtypes, and no meaning."""


class Record:
    """What a rank did, in order."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.where: Callable[[], tuple[str, int]] = lambda: ("import", 0)
        """The phase of the run, and the steps that have ended."""

    def add(self, kind: str, **what: Any) -> None:
        phase, step = self.where()
        self.events.append({"kind": kind, "phase": phase, "step": step, "by": caller(), **what})


BETWEEN = (
    "/torch/", "/contract/absent_", "/typing_extensions.py", "/contextlib.py", "/functools.py",
    "accelerate/utils/operations.py", "deepspeed/utils/nvtx.py", "deepspeed/comm/", "cuda_accelerator.py",
)  # fmt: skip
"""Files of what is called by those who want something."""


def caller() -> str:
    """`file:function` of the innermost frame outside torch and these stubs; ours begin with `launcher/`."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith("<") and not any(part in name for part in BETWEEN):
            short = name.partition("site-packages/")[2] or name.removeprefix(f"{ROOT}/")
            return f"{short}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "torch"


class Gpus(TorchDispatchMode):
    """The dispatch mode, and the state of the absent GPUs."""

    def __init__(self, record: Record, smi: Path, visible: list[int]) -> None:
        """smi: rows of a recorded nvidia-smi. visible: their numbers that this process sees, in order."""
        super().__init__()
        self.record = record
        with smi.open(encoding="utf-8") as file:
            rows = [[field.strip() for field in row] for row in csv.reader(file)]
        self.rows = [rows[number] for number in visible]
        self.current = 0
        self.is_set = False
        self.initialized = False
        self.used: set[int] = set()
        self.pinned: set[int] = set()
        self.made_inside = 0
        """Above 0 while C++ makes tensors that lie on the device."""
        self.collective: Any = None
        """Answers for the collectives."""
        self.computing = False
        """Whether a kernel runs, perhaps one written in Python, for which everything lies on the host."""
        self._known: dict[Any, Callable[..., Any]] = {}
        self._labels: dict[int, int] = {}
        self.held: dict[int, int] = {}
        self.peak: dict[int, int] = {}
        """Bytes of the storages of each GPU."""

    # --- labels -----------------------------------------------------------------------------------

    def of(self, tensor: Any) -> int | None:
        """The GPU that a tensor's storage lies on; None for the host."""
        if self.computing:
            return None
        try:
            return self._labels.get(STORAGE(tensor)._cdata)
        except (NotImplementedError, RuntimeError):
            return None

    def put(self, tensor: torch.Tensor, gpu: int) -> torch.Tensor:
        storage = STORAGE(tensor)
        key = storage._cdata
        if key not in self._labels:
            self._labels[key] = gpu
            size = storage.nbytes()
            self.held[gpu] = self.held.get(gpu, 0) + size
            self.peak[gpu] = max(self.peak.get(gpu, 0), self.held[gpu])
            weakref.finalize(storage, self._freed, key, gpu, size)
            self.open(gpu)
        return tensor

    def _freed(self, key: int, gpu: int, size: int) -> None:
        self._labels.pop(key, None)
        self.held[gpu] -= size

    def open(self, gpu: int) -> None:
        """A process uses a GPU: its context is made there the first time."""
        self.initialized = True
        if gpu not in self.used:
            self.used.add(gpu)
            self.record.add("context", gpu=gpu, was_set=self.is_set, current=self.current)

    def number(self, device: Any) -> int | None:
        """The GPU of a torch.device, a string or a number; None for another device."""
        if device is None:
            return None
        if isinstance(device, bool | int):
            return int(device)
        if isinstance(device, str):
            device = torch.device(device)
        if device.type != "cuda":
            return None
        index = self.current if device.index is None else device.index
        if index >= len(self.rows):
            raise RuntimeError("CUDA error: invalid device ordinal")
        return int(index)

    # --- operations -------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # first it becomes operations on what this rank holds
        kwargs = dict(kwargs or {})
        compute = self._known.get(func)
        if compute is None:
            compute = self._known[func] = self._way(func)
        if compute is self.collective:
            return self.collective(func, args, kwargs)
        found = [leaf for leaf in _leaves(args, kwargs) if isinstance(leaf, torch.Tensor)]
        places = [self.of(tensor) for tensor in found]
        here = next((place for place in places if place is not None), None)
        asked = kwargs.get("device")
        if asked == CPU and func is ATEN._to_copy.default and here is not None:
            asked = None  # C++ asks for a dtype alone; what Python asks for is `Tensor.to`
        elif (asked is None and self.made_inside and not found) or (
            asked == CPU and (self.made_inside or _in_backward())
        ):
            asked, here = None, self.current if here is None else here
        target = self.number(asked) if asked is not None else None
        if asked is not None and torch.device(asked).type == "cuda":
            kwargs["device"] = torch.device("cpu")
        if kwargs.pop("pin_memory", None):
            self.record.add("allocator", what="pinned")
        self._note(func, args, kwargs, found, places, here, target, asked)
        if func is ATEN.record_stream.default:
            return None
        before, self.computing = self.computing, True
        try:
            out = compute(*args, **kwargs)
        finally:
            self.computing = before
        gpu = target if asked is not None else here
        if gpu is not None and func is not ATEN._local_scalar_dense.default:
            for leaf in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
                if isinstance(leaf, torch.Tensor) and not (func in MIXES and leaf is args[0]):
                    self.put(leaf, gpu)
        return out

    def _way(self, func: Any) -> Callable[..., Any]:
        """What computes an operation: itself, what stands in for its kernel, or the collectives."""
        if self.collective is not None and self.collective.answers(func):
            return self.collective
        stands_in: Callable[..., Any] = SHAPES.get(func.name().partition(".")[0], func)
        return stands_in

    def _note(
        self, func: Any, args: Any, kwargs: Any, found: Any, places: Any, here: Any, target: Any, asked: Any
    ) -> None:
        """Write down what the host waits for, and what mixes devices."""
        add = self.record.add
        if func is ATEN._to_copy.default and asked is not None and target != places[0]:
            self.moved(places[0], target, kwargs.get("non_blocking", False))
        elif func is ATEN.copy_.default and places[0] != places[-1]:
            self.moved(places[-1], places[0], len(args) > 2 and bool(args[2]))
        elif here is None:
            return
        elif func in WAITS:
            add("wait", what=func.name().removeprefix("aten::"))
        elif func in INDEXING and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
            for index in args[1]
            if index is not None
        ):
            add("wait", what="index by a mask")
        if here is not None and None in places and func not in MIXES:
            odd = [t for t, place in zip(found, places, strict=True) if place != here and t.dim() > 0]
            if odd:
                add("mixed", what=func.name(), gpus=[place for place in places])

    def moved(self, source: int | None, target: int | None, non_blocking: bool) -> None:
        """A copy between devices; the host waits for it unless it is told not to."""
        if source is None and target is None:
            return
        names = ["host" if place is None else "device" for place in (source, target)]
        if not non_blocking:
            self.record.add("wait", what=f"copy from {names[0]} to {names[1]}")

    def allocator(self, what: str, gpu: int | None = None) -> None:
        self.record.add("allocator", what=what, gpu=self.current if gpu is None else gpu)


def _in_backward() -> bool:
    """Whether C++ is working backward, and no hook of Python's."""
    frame = sys._getframe(2)
    while "/torch/_dynamo/" in frame.f_code.co_filename or frame.f_code.co_filename.endswith(
        "/torch/_compile.py"
    ):
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_code.co_name == "_engine_run_backward"


def _leaves(args: Any, kwargs: Any) -> list[Any]:
    flat = []
    for value in (*args, *kwargs.values()):
        flat.extend(value) if isinstance(value, list | tuple) else flat.append(value)
    return flat


STORAGE = torch.Tensor.untyped_storage
DEVICE = torch.device
CPU = DEVICE("cpu")


# --- what Python asks a tensor ------------------------------------------------------------------------


def answer_for_tensors(gpus: Gpus) -> None:  # noqa: C901 - a table of short answers
    """Tensors and storages answer by their labels."""
    tensor, base = torch.Tensor, torch._C.TensorBase
    plain = {
        name: getattr(tensor, name)
        for name in (
            "to",
            "cpu",
            "tolist",
            "numpy",
            "type",
            "get_device",
            "pin_memory",
            "is_pinned",
            "__deepcopy__",
        )
    }
    device_of = base.device.__get__

    def device(self: torch.Tensor) -> torch.device:
        real = device_of(self)
        if real.type != "cpu":
            return real
        gpu = gpus.of(self)
        return real if gpu is None else torch.device("cuda", gpu)

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        target, rest, more = _destination(args, kwargs)
        if target is None or device_of(self).type != "cpu":
            return plain["to"](self, *args, **kwargs)
        own, gpu = gpus.of(self), gpus.number(target)
        if gpu == own and torch.device(target).type != "meta":
            return plain["to"](self, *rest, **more)
        if torch.device(target).type == "meta":
            return plain["to"](self, *args, **kwargs)
        gpus.moved(own, gpu, bool(more.get("non_blocking", False)))
        with _quiet(gpus):
            copied = plain["to"](self, *rest, **{**more, "copy": True})
        return gpus.put(copied, gpu) if gpu is not None else _off(gpus, copied)

    def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> torch.Tensor:
        return to(self, torch.device("cuda", gpus.current) if device is None else device_named(device),
                  non_blocking=non_blocking)  # fmt: skip

    def cpu(self: torch.Tensor, **_: Any) -> torch.Tensor:
        return to(self, torch.device("cpu"))

    def tolist(self: torch.Tensor) -> Any:
        if gpus.of(self) is not None:
            gpus.record.add("wait", what="tolist")
        return plain["tolist"](self)

    def numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if gpus.of(self) is not None:
            raise TypeError("can't convert cuda device type tensor to numpy. Use Tensor.cpu() first")
        return plain["numpy"](self, *args, **kwargs)

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name = plain["type"](self)
            return name if gpus.of(self) is None else name.replace("torch.", "torch.cuda.", 1)
        return plain["type"](self, dtype, *args, **kwargs)

    def get_device(self: torch.Tensor) -> int:
        gpu = gpus.of(self)
        return -1 if gpu is None else gpu

    def pin_memory(self: torch.Tensor, *_: Any) -> torch.Tensor:
        gpus.allocator("pinned")
        copied = self.clone()
        gpus.pinned.add(key := STORAGE(copied)._cdata)
        weakref.finalize(STORAGE(copied), gpus.pinned.discard, key)
        return copied

    def is_pinned(self: torch.Tensor, *_: Any) -> bool:
        return STORAGE(self)._cdata in gpus.pinned

    named = {
        "to": to,
        "cuda": cuda,
        "cpu": cpu,
        "tolist": tolist,
        "numpy": numpy,
        "type": type_,
        "get_device": get_device,
        "pin_memory": pin_memory,
        "is_pinned": is_pinned,
        "record_stream": lambda self, stream: None,
    }
    for name, function in named.items():
        setattr(tensor, name, function)
    tensor.device = property(device)
    tensor.is_cuda = property(lambda self: self.device.type == "cuda")
    tensor.is_cpu = property(lambda self: self.device.type == "cpu")
    torch.device = _Device("device", (), {"__module__": "torch", "__qualname__": "device"})
    for name in FACTORIES:
        setattr(torch, name, _numbered(getattr(torch, name)))
    storage = torch.UntypedStorage

    def storage_device(self: Any) -> torch.device:
        gpu = gpus._labels.get(self._cdata)
        return torch.device("cpu") if gpu is None else torch.device("cuda", gpu)

    storage.device = property(storage_device)
    storage.is_cuda = property(lambda self: self.device.type == "cuda")


FACTORIES = ("empty", "empty_like", "zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "arange",
             "rand", "randn", "randint", "empty_strided")  # fmt: skip


def _numbered(factory: Callable[..., Any]) -> Callable[..., Any]:
    """A factory whose device may be a number alone."""

    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        if type(kwargs.get("device")) is int:
            kwargs["device"] = DEVICE("cuda", kwargs["device"])
        return factory(*args, **kwargs)

    return made


class _Device(type):
    """torch.device, which knows what a number alone means only where C++ has an accelerator."""

    def __instancecheck__(cls, found: Any) -> bool:
        return isinstance(found, DEVICE)

    def __call__(cls, device: Any, *index: Any, **named: Any) -> torch.device:
        if isinstance(device, int) and not index:
            return DEVICE("cuda", device)
        return DEVICE(device, *index, **named)


def device_named(device: Any) -> torch.device:
    return DEVICE("cuda", device) if isinstance(device, int) else DEVICE(device)


def _destination(args: Any, kwargs: Any) -> tuple[Any, list[Any], dict[str, Any]]:
    """The device that Tensor.to is asked for, and its other arguments."""
    rest, more = list(args), dict(kwargs)
    other = more.pop("other", None)
    target = more.pop("device", None)
    if rest and isinstance(rest[0], torch.Tensor):
        other = rest.pop(0)
    if other is not None:
        target = other.device
        more.setdefault("dtype", other.dtype)
    elif rest and isinstance(rest[0], str | int | torch.device) and not isinstance(rest[0], bool):
        target = rest.pop(0)
        for name in ("dtype", "non_blocking", "copy"):
            if rest:
                more.setdefault(name, rest.pop(0))
    elif rest and rest[0] is None:
        rest.pop(0)
        for name in ("dtype", "non_blocking", "copy"):
            if rest:
                more.setdefault(name, rest.pop(0))
    return (
        (device_named(target) if target is not None else None),
        rest,
        {k: v for k, v in more.items() if v is not None},
    )


@contextlib.contextmanager
def _quiet(gpus: Gpus) -> Iterator[None]:
    """Operations within are part of one that is written down."""
    before, gpus.record.events = gpus.record.events, []
    try:
        yield
    finally:
        gpus.record.events = before


def _off(gpus: Gpus, tensor: torch.Tensor) -> torch.Tensor:
    gpus._labels.pop(STORAGE(tensor)._cdata, None)
    return tensor


# --- torch.cuda -----------------------------------------------------------------------------------------


class Stream:
    """A queue of a GPU; everything is done at once."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.priority = device, priority
        self.cuda_stream = self.stream_id = 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        GPUS[0].record.add("wait", what="Stream.synchronize")


class Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        GPUS[0].record.add("wait", what="Event.elapsed_time")
        return 0.0

    def synchronize(self) -> None:
        GPUS[0].record.add("wait", what="Event.synchronize")


GPUS: list[Gpus] = []
"""The one of this process."""


class Device:
    """torch.cuda.device: another current GPU within a block."""

    def __init__(self, device: Any) -> None:
        self.idx = GPUS[0].number(device) if not isinstance(device, int) else device

    def __enter__(self) -> None:
        self.before = GPUS[0].current
        if self.idx is not None and self.idx >= 0:
            GPUS[0].current = self.idx

    def __exit__(self, *_: object) -> None:
        GPUS[0].current = self.before


def answer_for_cuda(gpus: Gpus) -> None:  # noqa: C901 - a table of short answers
    """torch.cuda, torch.accelerator and what asks whether there is CUDA."""
    GPUS[:] = [gpus]
    cuda, stream = torch.cuda, Stream()

    def number(device: Any) -> int:
        found = gpus.number(device)
        return gpus.current if found is None else found

    def set_device(device: Any) -> None:
        gpus.current, gpus.is_set = number(device), True
        gpus.record.add("set_device", gpu=gpus.current)

    def properties(device: Any = None) -> Any:
        row = gpus.rows[number(device)]
        major, minor = map(int, row[5].split("."))
        return types.SimpleNamespace(
            name=row[2], total_memory=int(row[3]) * MIB, major=major, minor=minor, multi_processor_count=132,
            uuid=row[1].removeprefix("GPU-"), warp_size=32, gcnArchName="", is_integrated=False,
            max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, L2_cache_size=50 * MIB,
            shared_memory_per_block_optin=232448, shared_memory_per_block=49152,
        )  # fmt: skip

    def memory(device: Any = None) -> tuple[int, int]:
        gpus.open(number(device))
        row = gpus.rows[number(device)]
        return (int(row[3]) - int(row[4])) * MIB, int(row[3]) * MIB

    def wait(what: str) -> Callable[..., None]:
        return lambda *_, **__: gpus.record.add("wait", what=what)

    def asked(what: str, answer: Any = None) -> Callable[..., Any]:
        def call(device: Any = None, *_: Any, **__: Any) -> Any:
            gpu = number(device) if isinstance(device, int | str | torch.device) else gpus.current
            gpus.allocator(what, gpu)
            return answer(gpu) if answer is not None else None

        return call

    def initialize(*_: Any) -> None:
        gpus.initialized = True

    def draws(name: str) -> Callable[..., Any]:
        def call(*args: Any, **_: Any) -> Any:
            if name == "get":
                return torch.zeros(16, dtype=torch.uint8)
            if name == "get_all":
                return [torch.zeros(16, dtype=torch.uint8) for _ in gpus.rows]
            return None

        return call

    answers: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: len(gpus.rows), "set_device": set_device,
        "current_device": lambda: gpus.current, "get_device_properties": properties, "device": Device,
        "get_device_name": lambda device=None: properties(device).name, "init": initialize,
        "get_device_capability": lambda device=None: (properties(device).major, properties(device).minor),
        "_lazy_init": initialize, "is_initialized": lambda: gpus.initialized, "Stream": Stream,
        "Event": Event, "current_stream": lambda device=None: stream, "default_stream": lambda d=None: stream,
        "stream": lambda s: contextlib.nullcontext() if s is None else s, "set_stream": lambda s: None,
        "synchronize": wait("synchronize"), "mem_get_info": memory, "get_arch_list": lambda: ["sm_90"],
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "can_device_access_peer": lambda a, b: True, "get_rng_state": draws("get"),
        "get_rng_state_all": draws("get_all"), "set_rng_state": draws("set"),
        "set_rng_state_all": draws("set"),
        "manual_seed": draws("set"), "manual_seed_all": draws("set"), "ipc_collect": lambda: None,
        "_is_compiled": lambda: True, "_lazy_call": lambda call, **_: None, "is_tf32_supported": lambda: True,
        **{name: asked(name, lambda gpu: gpus.held.get(gpu, 0)) for name in (
            "memory_allocated", "memory_reserved", "memory_cached",
        )},
        **{name: asked(name, lambda gpu: gpus.peak.get(gpu, 0)) for name in (
            "max_memory_allocated", "max_memory_reserved", "max_memory_cached",
        )},
        "memory_stats": asked("memory_stats", lambda gpu: {}),
        **{name: asked(name) for name in (
            "empty_cache", "reset_peak_memory_stats", "reset_max_memory_allocated",
            "reset_max_memory_cached", "reset_accumulated_memory_stats", "set_per_process_memory_fraction",
        )},
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(cuda, name, answer)
        for module in (cuda.memory, cuda.random, cuda.streams):
            if hasattr(module, name):
                setattr(module, name, answer)
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        setattr(cuda.nvtx, name, lambda *_, **__: 0)
    cuda.nccl.version = lambda: (2, 27, 5)
    torch.version.cuda = "13.0"
    everywhere = torch.accelerator
    everywhere.is_available = lambda: True
    everywhere.current_accelerator = lambda check_available=False: torch.device("cuda")
    everywhere.device_count = cuda.device_count
    everywhere.current_device_index = everywhere.current_device_idx = cuda.current_device
    everywhere.set_device_index = everywhere.set_device_idx = set_device
    everywhere.synchronize, everywhere.current_stream = cuda.synchronize, cuda.current_stream
    everywhere.empty_cache = cuda.empty_cache
    torch._C._cuda_isCurrentStreamCapturing = lambda: False
    torch._C._get_accelerator = lambda *_: torch.device("cuda")
    _autocast_as_cuda()
    _made_of_values(gpus)
    torch._C._ensureCUDADeviceGuardSet()


def _default_device() -> torch.device:
    """Of the innermost `with torch.device(...)`; torch.get_default_device makes a tensor to find out."""
    modes = torch.overrides._get_current_function_mode_stack()
    found = [mode.device for mode in modes if isinstance(mode, DeviceContext)]
    return found[-1] if found else torch.device("cpu")


def _made_of_values(gpus: Gpus) -> None:
    """torch.tensor and torch.as_tensor open CUDA in C++: the values are copied as `Tensor.to` copies."""
    for name in ("tensor", "as_tensor"):
        plain = getattr(torch, name)

        def made(
            data: Any, *, dtype: Any = None, device: Any = None, _plain: Any = plain, **more: Any
        ) -> Any:
            target = device_named(device) if device is not None else _default_device()
            if isinstance(data, torch.Tensor) and device is None:
                target = data.device
            if target.type != "cuda":
                return _plain(data, dtype=dtype, device=target, **more)
            needs = more.pop("requires_grad", False)
            found = _plain(
                data, dtype=dtype, **more, **({} if isinstance(data, torch.Tensor) else {"device": "cpu"})
            )
            return found.to(target).requires_grad_(needs)

        setattr(torch, name, made)


def _autocast_as_cuda() -> None:
    """Autocast of CUDA is the CPU's here, whose kernels compute."""
    begin = torch.autocast.__init__

    @functools.wraps(begin)
    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        begin(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    torch.autocast.__init__ = init  # type: ignore[method-assign]
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        ask = getattr(torch, name)

        def asked(device: Any = "cuda", *args: Any, _ask: Any = ask) -> Any:
            return _ask("cpu" if device == "cuda" else device, *args)

        setattr(torch, name, asked)


@contextlib.contextmanager
def on_device(gpus: Gpus) -> Iterator[None]:
    """What C++ makes within, without being asked for a device by Python, lies on the current GPU."""
    gpus.made_inside += 1
    try:
        yield
    finally:
        gpus.made_inside -= 1
