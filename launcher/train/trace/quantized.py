"""Linears that compute as bitsandbytes' quantised ones do, on fake tensors that hold their weights unpacked.

What a step keeps and allocates follows bitsandbytes 0.50 (autograd/_functions.py) and peft 0.21
(tuners/lora/bnb.py); the bytes of the packed weights are the closed form's.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear


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


class Quantized(torch.nn.Linear):
    """A frozen linear; which kind, `stand_in` says."""

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


def stand_in(model: Any, kind: str, compute: str, *, on_cpu: bool) -> None:
    """Freeze the model, and let its linears (but the head's) compute like quantised ones.

    What is not quantised becomes float32, as peft's prepare_model_for_kbit_training does.
    """
    head = model.get_output_embeddings()
    packed = set()
    for module in list(model.modules()):
        if isinstance(module, torch.nn.Linear) and module is not head:
            module.__class__ = Quantized
            module.kind, module.on_cpu, module.compute_dtype = kind, on_cpu, getattr(torch, compute)
            packed.add(id(module.weight))
    for parameter in model.parameters():
        parameter.requires_grad = False
        if id(parameter) not in packed and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()


def adapters_over_quantized(model: Any) -> None:
    """Let plain LoRA layers over stand-ins compute like peft's over quantised weights."""
    for module in model.modules():
        if type(module) is LoraLinear and isinstance(module.get_base_layer(), Quantized):
            plain = all(name not in module.lora_variant for name in module.active_adapters)
            module.__class__ = QuantizedLora if plain else LoraLinear
