"""What CUDA does otherwise than a CPU, on fake CPU tensors: attention, dropout, autocast, quantised linears.

Fake tensors on the device "cuda" need a driver when the backward pass starts, so a trace runs on "cpu", and
what differs there is replaced for the time of the trace. What a step over quantised linears keeps and
allocates follows bitsandbytes 0.50 (autograd/_functions.py) and peft 0.21 (tuners/lora/bnb.py); the bytes of
the packed weights are the closed form's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear

from launcher.train.model.experts import Unpacked, expert_parameters, read_unpacked
from launcher.train.upstream.torch_seams import (
    autocast_kernels,
    efficient_attention,
    efficient_backward,
    efficient_forward,
    flash_attention,
    without_cpu_autocast,
)

_ATEN = torch.ops.aten
# Operations that autocast runs in float32 on CUDA and leaves alone on a CPU: torch 2.13,
# aten/src/ATen/autocast_mode.h, the lists AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE.
_FLOAT32_ON_CUDA = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "reciprocal",
    "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus",
    "layer_norm", "native_layer_norm", "group_norm", "softmax.int", "log_softmax.int", "cumsum",
    "cumprod", "sum", "sum.dim_IntList", "logsumexp", "norm.Scalar", "norm.ScalarOpt_dim",
    "binary_cross_entropy_with_logits", "l1_loss", "smooth_l1_loss", "huber_loss",
)  # fmt: skip


@contextlib.contextmanager
def imitating_cuda(capability: tuple[int, int] | None, length: int | None = None) -> Iterator[None]:
    """Replace what a CUDA device of this compute capability does otherwise than a CPU.

    length: rows stand for longer ones of this length: kernels pad theirs by as many positions as those.
    """
    functional = torch.nn.functional
    upstream = functional.scaled_dot_product_attention, functional.dropout, functional.log_softmax
    flash = capability is not None and capability >= (8, 0)
    functional.scaled_dot_product_attention, functional.dropout = _attention(flash, length), _dropout
    functional.log_softmax = _log_softmax(functional.log_softmax)
    try:
        with autocast_kernels({name: _in_float32(_overload(name)) for name in _FLOAT32_ON_CUDA}):
            yield
    finally:
        functional.scaled_dot_product_attention, functional.dropout, functional.log_softmax = upstream


@contextlib.contextmanager
def documents_one_by_one(length: int) -> Iterator[None]:
    """Attention varlen over documents of this length: bounds are values, which fake tensors do not have."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from launcher.train.model.attention import NAME, one_by_one, register_varlen

    def attend(
        _module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_mask: None,
        dropout: float = 0.0, scaling: float | None = None, **_others: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        lengths = [length] * (query.shape[2] // length)
        return one_by_one(query, key, value, lengths, None, scaling, dropout), None

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lambda **_: None)
    try:
        yield
    finally:
        register_varlen()


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(_ATEN, packet), overload or "default")


def _in_float32(operation: Any) -> Callable[..., Any]:
    """The operation on float32 copies of its 16-bit inputs, as autocast wraps it on CUDA.

    A dtype that the caller asks for stays (autocast_mode.h, `set_opt_dtype`).
    """

    def widen(value: Any) -> Any:
        narrow = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        return value.float() if narrow else value

    def call(*args: Any, **kwargs: Any) -> Any:
        with without_cpu_autocast():
            if any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
                return operation(*args, **kwargs)
            return operation(*(widen(value) for value in args), **kwargs)

    return call


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """CUDA's fused kernel, which keeps a mask of booleans."""
    if p == 0.0 or not training:
        return input
    return torch.native_dropout(input, p, True)[0]


def _log_softmax(upstream: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """CUDA's kernel widens 16 bits on the way, where a CPU makes a wide copy first."""

    def log_softmax(input: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        if dtype in (None, input.dtype) or torch.is_grad_enabled():
            return upstream(input, *args, dtype=dtype, **kwargs)
        return torch.empty_like(input, dtype=dtype)

    return log_softmax


def _attention(flash: bool, length: int | None) -> Callable[..., torch.Tensor]:
    """scaled_dot_product_attention as CUDA dispatches it: flash, else memory-efficient, else plain math."""

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            narrow = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(narrow), key.to(narrow), value.to(narrow)
        width = query.shape[-1]
        scale = scale or 1 / math.sqrt(width)
        half = query.dtype in (torch.bfloat16, torch.float16)
        same = width == value.shape[-1]
        if flash and half and attn_mask is None and width <= 256 and same:
            query, key, value = (_padded(x, 8) for x in (query, key, value))
            out = flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
            return out[..., :width] if out.shape[-1] != width else out
        if enable_gqa and key.shape[1] != query.shape[1]:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale, length)

    return attend


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    length: int | None,
) -> torch.Tensor:
    """The memory-efficient kernel; a mask of booleans becomes numbers, its rows aligned to 16."""
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask, 0)
        if missing := -(length or mask.shape[-1]) % 16:
            mask = torch.nn.functional.pad(mask, (0, missing))[..., : mask.shape[-1]]
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    needs_sums = any(x.requires_grad for x in (query, key, value))
    if length is not None:
        out: torch.Tensor = _Efficient.apply(
            query, key, value, mask, needs_sums, dropout_p, is_causal, scale, length
        )
        return out
    return efficient_attention(query, key, value, mask, needs_sums, dropout_p, is_causal, scale=scale)


class _Efficient(torch.autograd.Function):
    """The kernel for rows that stand for longer ones: it sums its rows in whole blocks of 32 positions."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, sums: bool, dropout: float,
                causal: bool, scale: float, length: int) -> torch.Tensor:  # fmt: skip
        out, found, seed, offset = efficient_forward(
            query, key, value, mask, sums, dropout, causal, scale=scale
        )
        rows = found.new_empty(*found.shape[:2], query.shape[2] + -length % 32) if sums else found
        ctx.save_for_backward(query, key, value, mask, out, rows, seed, offset)
        ctx.given = dropout, causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        dropout, causal, scale = ctx.given
        query, key, value, mask, *others = ctx.saved_tensors
        needs = [*ctx.needs_input_grad[:3], False]
        found = efficient_backward(
            gradient, query, key, value, mask, *others, dropout, needs, causal, scale=scale
        )
        return (*found[:3], *(None,) * 6)


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    short = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, short)) if short else tensor


class _Int8(torch.autograd.Function):
    """Keeps its input itself, out of reach of checkpointing, and unpacks the weight to go backwards."""

    @staticmethod
    def forward(
        ctx: Any, source: torch.Tensor, weight: torch.Tensor, bias: Any, on_cpu: bool
    ) -> torch.Tensor:
        ctx.source = source
        ctx.save_for_backward(weight)
        if on_cpu:
            return torch.nn.functional.linear(source, weight.to(source.dtype, copy=True), bias)
        rows = source.reshape(-1, source.shape[-1])
        _packed = torch.empty_like(rows.to(torch.float16), dtype=torch.int8)
        return source.new_empty((*source.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        unpacked = weight.to(ctx.source.dtype, copy=True)
        return gradient.to(ctx.source.dtype) @ unpacked, None, None, None


class _FourBit(torch.autograd.Function):
    """Keeps nothing, and unpacks the weight to go backwards."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return source.new_empty((*source.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return gradient @ weight.clone().to(gradient.dtype), None


class _Grouped(torch.autograd.Function):
    """Each expert's product with its rows: keeps the rows for the weights' gradient, the weights for theirs
    (torch 2.13, derivatives.yaml, `_grouped_mm`)."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        of_rows, of_weights = ctx.needs_input_grad
        ctx.save_for_backward(rows if of_weights else None, weights if of_rows else None)
        ctx.made = weights.shape, weights.stride()
        return rows.new_empty(rows.shape[0], weights.shape[2])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        of_rows, of_weights = ctx.needs_input_grad
        (_, width, _), _ = ctx.made
        return (
            gradient.new_empty(gradient.shape[0], width) if of_rows else None,
            gradient.new_empty_strided(*ctx.made) if of_weights else None,
        )


def multiply_groups(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What torch's grouped product keeps and allocates, of any dtype."""
    out: torch.Tensor = _Grouped.apply(rows, weights)
    return out


class Quantized(torch.nn.Linear):
    """A frozen linear; `stand_in` sets the kind."""

    kind: str
    on_cpu: bool
    compute_dtype: torch.dtype

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        if self.kind == "int8":
            bias = None if self.bias is None else self.bias.to(source.dtype)
            out: torch.Tensor = _Int8.apply(source, self.weight, bias, self.on_cpu)
            return out
        out = _FourBit.apply(source.to(self.compute_dtype), self.weight)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.to(source.dtype)


class StandIn(Unpacked):
    """Of experts, which have new memory whenever they are unpacked."""

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=packed.device)


class QuantizedLora(LoraLinear):
    """peft's layers over quantised weights leave casts to autocast where CUDA's is on."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        base = self.get_base_layer()
        result = base(x)
        if base.kind != "int8":
            result = result.clone()
        for name in self.active_adapters:
            converts = base.on_cpu or not torch.is_autocast_enabled("cpu")
            source = x.to(self.lora_A[name].weight.dtype) if converts else x
            inner = self.lora_A[name](self.lora_dropout[name](source))
            update = self.lora_B[name](inner) * self.scaling[name]
            result = result + (update.to(result.dtype) if converts else update)
        return result


def stand_in(model: Any, kind: str, compute: str, *, on_cpu: bool) -> list[torch.nn.Parameter]:
    """Freeze the model, and let its linears (but the head's) and its experts compute like quantised ones.

    What is not quantised becomes float32, as peft's prepare_model_for_kbit_training does; returned.
    """
    head = model.get_output_embeddings()
    packed = set()
    if kind != "int8":
        for _, module, name in list(expert_parameters(model)):
            weight = getattr(module, name)
            bytes_ = torch.empty((weight.numel() + 1) // 2, 1, dtype=torch.uint8, device=weight.device)
            how = StandIn(weight.shape, getattr(torch, compute))
            read_unpacked(module, name, torch.nn.Parameter(bytes_, requires_grad=False), how)
    for module in list(model.modules()):
        if isinstance(module, torch.nn.Linear) and module is not head:
            module.__class__ = Quantized
            module.kind, module.on_cpu, module.compute_dtype = kind, on_cpu, getattr(torch, compute)
            packed.add(id(module.weight))
    widened = []
    for parameter in model.parameters():
        parameter.requires_grad = False
        if id(parameter) not in packed and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
            widened.append(parameter)
    return widened


def adapters_over_quantized(model: Any) -> None:
    """Let plain LoRA layers over stand-ins compute like peft's over quantised weights."""
    for module in model.modules():
        if type(module) is LoraLinear and isinstance(module.get_base_layer(), Quantized):
            plain = all(name not in module.lora_variant for name in module.active_adapters)
            module.__class__ = QuantizedLora if plain else LoraLinear
