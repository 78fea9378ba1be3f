"""Private parts of transformers' bitsandbytes quantizer and of peft's adapters over parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Packing:
    """How parameters that are no linear layer's are quantised."""

    is_one: Callable[[Any, str], bool]
    """Whether the parameter of this dotted name of the model is one."""
    pack: Callable[[torch.Tensor], Any]
    """A weight as read -> the parameter that holds it."""
    finish: Callable[[Any], None]
    """Called with the loaded model."""
    unpack: Callable[[Any, torch.dtype], None]
    """Turns the parameters of a model back, in a dtype."""


@contextlib.contextmanager
def quantizing_with(packing: Packing) -> Iterator[None]:
    """Let from_pretrained with a 4-bit configuration quantise what `packing` takes, as it is read.

    Upstream quantises parameter by parameter and asks the quantizer which ones; its own names linear layers.
    """
    from transformers.core_model_loading import ConversionOps
    from transformers.quantizers import auto
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    class Pack(ConversionOps):
        def __init__(self, linear: Any) -> None:
            self.linear = linear

        def convert(self, input_dict: dict[str, Any], model: Any = None, **more: Any) -> dict[str, Any]:
            made = {}
            for name in list(input_dict):
                value = input_dict.pop(name)
                if packing.is_one(model, name):
                    made[name] = packing.pack(value[0] if isinstance(value, list) else value)
                else:
                    made |= self.linear.convert({name: value}, model=model, **more)
            return made

    class Quantizer(Bnb4BitHfQuantizer):
        def param_needs_quantization(self, model: Any, param_name: str, **more: Any) -> bool:
            linear = super().param_needs_quantization(model, param_name, **more)
            return bool(linear) or packing.is_one(model, param_name)

        def get_quantize_ops(self) -> Any:
            return Pack(super().get_quantize_ops())

        def postprocess_model(self, model: Any, **more: Any) -> Any:
            packing.finish(model)
            return super().postprocess_model(model, **more)

        def dequantize(self, model: Any, dtype: Any = None) -> Any:
            packing.unpack(model, dtype)
            return super().dequantize(model, dtype)

    upstream = auto.AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"]
    auto.AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] = Quantizer
    try:
        yield
    finally:
        auto.AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] = upstream


def fold_adapters_in(model: Any) -> None:
    """Let peft's adapters over parametrised parameters hand their factors to the parametrization.

    Upstream registers one more parametrization in each forward pass, within torch's cache: the inner of two
    adapted parameters of a module is then cached before its adapter is there, and trained without it.
    """
    from peft.tuners.lora.layer import ParamWrapper
    from torch.nn.utils import parametrize

    class Folded(ParamWrapper):
        @property
        def how(self) -> Any:
            return self.get_base_layer().parametrizations[self.parameter_name][0]

        def get_param(self) -> torch.Tensor:
            """A tensor like the weight, without memory: shape, dtype and device are asked."""
            device = self.get_base_layer().parametrizations[self.parameter_name].original.device
            return torch.empty((), dtype=self.how.dtype, device=device).expand(self.how.shape)

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            how = self.how
            names = [] if self.disable_adapters else [n for n in self.active_adapters if n in self.lora_A]
            how.updates = tuple(self.get_delta_factors(name) for name in names)
            try:
                return self.base_layer(x, *args, **kwargs)
            finally:
                how.updates = ()

        def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
            raise NotImplementedError("adapters are merged into unpacked weights, not into 4-bit ones")

    for wrapper in model.modules():
        if type(wrapper) is ParamWrapper and parametrize.is_parametrized(
            wrapper.get_base_layer(), wrapper.parameter_name
        ):
            wrapper.__class__ = Folded
