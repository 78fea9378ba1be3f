"""Experts in 4 bits, and LoRA over them.

transformers 5 stores the experts of a layer as 3-dimensional parameters, which its bitsandbytes quantizer
leaves as they are. Here they are packed while they are read, one parameter at a time, and unpacked whenever
their module reads them. What peft 0.21 makes of such parameters (ParamWrapper) is folded in there: its own
way registers a parametrization in each forward pass, and torch's cache would then return the weight of all
but the outermost one without its adapter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from launcher.train.upstream.expert_seams import Packing, fold_adapters_in, quantizing_with

Factors = tuple[torch.Tensor, torch.Tensor, float]
"""`scaling * lhs @ rhs` is added to the weight: (experts, rows, rank), (experts, rank, columns), scaling."""


class Unpacked(nn.Module):
    """The parametrization of packed experts: unpacked in the dtype that is computed in, adapters included."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = torch.Size(shape), dtype
        self.updates: tuple[Factors, ...] = ()

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """The weight without adapters."""
        raise NotImplementedError

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            weight = self.unpack(packed)
        for lhs, rhs, scaling in self.updates:
            with torch.autocast(weight.device.type, enabled=False):
                weight = torch.baddbmm(weight, lhs, rhs, alpha=scaling)
        return weight


class FourBit(Unpacked):
    """Of bitsandbytes' 4-bit weights."""

    def __init__(self, state: Any, dtype: torch.dtype) -> None:
        super().__init__(state.shape, dtype)
        state.dtype = dtype
        self.state = state

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(packed.data, self.state)


def expert_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(dotted name, module, name) of each 3-dimensional parameter of an experts module that is not packed."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3 and _holds_experts(path, module):
                yield f"{path}.{name}", module, name


def flat_experts(model: nn.Module) -> Iterator[str]:
    """Names of matrices of an experts module that hold all experts of a layer as rows: nothing packs them."""
    for path, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) or not _holds_experts(path, module):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 2 and not name.endswith("bias"):
                yield f"{path}.{name}"


def _holds_experts(path: str, module: nn.Module) -> bool:
    """GraniteMoe's classes are named so, most others' attributes."""
    return "expert" in path.rpartition(".")[2].lower() or "expert" in type(module).__name__.lower()


def read_unpacked(module: nn.Module, name: str, packed: nn.Parameter, how: Unpacked) -> None:
    """Replace the parameter by its packed form, which is unpacked at most once in a forward pass."""
    setattr(module, name, packed)
    parametrize.register_parametrization(module, name, how, unsafe=True)
    entered: list[Any] = []

    def enter(_module: Any, _args: Any) -> None:
        entered.append(parametrize.cached())
        entered[-1].__enter__()

    def leave(_module: Any, _args: Any, _out: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    # Recomputation ends in the middle of a forward pass, by an exception.
    module.register_forward_hook(leave, always_call=True)


def packed_experts(model: nn.Module) -> Iterator[tuple[nn.Module, str, Unpacked]]:
    """(module, name, parametrization) of all packed experts."""
    for module in model.modules():
        if parametrize.is_parametrized(module):
            for name, (how, *_) in module.parametrizations.items():
                if isinstance(how, Unpacked):
                    yield module, name, how


def packing_experts(quantization: Any) -> contextlib.AbstractContextManager[None]:
    """Let from_pretrained pack experts while it reads them; `quantization`: the plan's, or None."""
    if quantization in (None, "none") or quantization["type"] == "int8":
        return contextlib.nullcontext()
    dtype = getattr(torch, quantization["compute_dtype"])

    def is_one(model: nn.Module, name: str) -> bool:
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        parameter = getattr(module, last, None)
        return parameter is not None and parameter.ndim == 3 and _holds_experts(path, module)

    def pack(weight: torch.Tensor) -> nn.Parameter:
        from bitsandbytes.nn import Params4bit

        return Params4bit(
            weight,
            requires_grad=False,
            quant_type=quantization["type"],
            compress_statistics=quantization["double_quant"],
            quant_storage=getattr(torch, quantization.get("quant_storage", "uint8")),
        ).to(weight.device)

    def finish(model: nn.Module) -> None:
        from bitsandbytes.nn import Params4bit

        # Of a checkpoint that is stored quantised, only the linear layers are.
        for _, module, name in list(expert_parameters(model)):
            setattr(module, name, pack(getattr(module, name).data))
        for module in list(model.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                if isinstance(parameter, Params4bit) and len(parameter.quant_state.shape) == 3:
                    read_unpacked(module, name, parameter, FourBit(parameter.quant_state, dtype))

    return quantizing_with(Packing(is_one, pack, finish, unpack_experts))


def unpack_experts(model: nn.Module, dtype: torch.dtype) -> None:
    """Turn packed experts into plain frozen parameters of this dtype."""
    for module, name, how in list(packed_experts(model)):
        weight = how.unpack(module.parametrizations[name].original)
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)
        setattr(module, name, nn.Parameter(weight.to(dtype), requires_grad=False))


@contextlib.contextmanager
def seen_as_plain(model: nn.Module) -> Iterator[None]:
    """While peft puts an adapter on it, packed experts are parameters of their shape, without memory.

    So target_modules, target_parameters and ranks mean what they mean on the unquantised model.
    """
    held = []
    for module in {id(module): module for module, _, _ in packed_experts(model)}.values():
        own, lists = type(module), module.parametrizations
        module.__class__ = own.__bases__[0]
        del module.parametrizations
        for name in lists:
            how, device = lists[name][0], lists[name].original.device
            empty = torch.empty((), dtype=how.dtype, device=device).expand(how.shape)
            module.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        held.append((module, own, lists))
    try:
        yield
    finally:
        for module, own, lists in held:
            for name in lists:
                delattr(module, name)
            module.parametrizations, module.__class__ = lists, own
    if held:
        fold_adapters_in(model)
