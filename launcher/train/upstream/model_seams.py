"""Private parts of transformers' models and of peft's layers."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch


def layer_classes(model: Any) -> frozenset[str]:
    """Class names of a model's repeated layers; empty where it does not name them."""
    return frozenset(getattr(model, "_no_split_modules", None) or ())


def leave_embedding_out(model: Any) -> None:
    """No layer class holds the token embedding afterwards, as BertEmbeddings does.

    accelerate 1.15 makes the embedding a unit of its own after the layers, and FSDP2 cannot shard it twice.
    """
    embedding = model.get_input_embeddings()
    holders = {
        type(module).__name__
        for module in model.modules()
        if module is not embedding and any(one is embedding for one in module.modules())
    }
    model._no_split_modules = sorted(layer_classes(model) - holders)


def wrap_checkpoints(model: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Have the layers of `model` be recomputed by wrap(torch's checkpoint), until checkpointing is switched
    on or off again; whether there is such a function."""
    layers = [part for part in model.modules() if hasattr(part, "_gradient_checkpointing_func")]
    for layer in layers:
        layer._gradient_checkpointing_func = wrap(layer._gradient_checkpointing_func)
    return bool(layers)


def names_not_saved(model: Any) -> frozenset[str]:
    """Weights that save_pretrained leaves out, such as the twin of a tied weight."""
    return frozenset(getattr(model, "_keys_to_ignore_on_save", None) or ())


def loads_an_adapter(model: Any) -> bool:
    """Whether from_pretrained found an adapter's folder and attached it to its base model."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def forget_stored_quantization(model: Any) -> None:
    """Save a dequantised model under plain names: how quantised ones were read cannot be turned around."""
    from transformers.integrations.bitsandbytes import Bnb4bitDeserialize, Bnb8bitDeserialize

    reading = (Bnb4bitDeserialize, Bnb8bitDeserialize)
    model._weight_conversions = [
        conversion
        for conversion in getattr(model, "_weight_conversions", None) or ()
        if not any(isinstance(step, reading) for step in getattr(conversion, "operations", ()))
    ]


def save_own_names(model: Any) -> None:
    """Save a text model that was read from a checkpoint for text and images under its own class's names.

    save_pretrained would give weights the names back that they were read by, and the file could then not be
    read without that mapping.
    """
    from transformers.core_model_loading import WeightRenaming

    read = getattr(model, "_weight_conversions", None) or ()
    model._weight_conversions = [one for one in read if not isinstance(one, WeightRenaming)]


@contextlib.contextmanager
def adapters_by_own_names() -> Iterator[None]:
    """Let peft load an adapter whose names are the model's as it is.

    peft renames an adapter's weights as transformers renames those of the model's published checkpoint, for
    adapters of older versions; some of these rules also match the names that peft saves today (`layers.` to
    `language_model.layers.`), and all that was trained would be lost with a warning.
    """
    from peft.utils import transformers_weight_conversion as conversion

    convert = conversion.convert_peft_adapter_state_dict_for_transformers

    def fitting(
        model: Any, peft_config: Any, adapter_state_dict: dict[str, Any], adapter_name: str = "default"
    ) -> dict[str, Any]:
        own = {name.replace(f".{adapter_name}", "") for name, _ in model.named_parameters()}
        adapted = [name for name in adapter_state_dict if ".lora_" in name]
        if all(name in own or f"{name}.weight" in own for name in adapted):  # DoRA's magnitudes
            return adapter_state_dict
        converted: dict[str, Any] = convert(model, peft_config, adapter_state_dict, adapter_name)
        return converted

    conversion.convert_peft_adapter_state_dict_for_transformers = fitting
    try:
        yield
    finally:
        conversion.convert_peft_adapter_state_dict_for_transformers = convert


def attention_of(config: Any) -> str:
    """The attention implementation that a model was loaded with."""
    name: str = config._attn_implementation
    return name


def choose_attention(config: Any, name: str) -> None:
    """The attention implementation of a model that is made from this configuration."""
    config._attn_implementation = name


def has_sdpa(model: Any) -> bool:
    return bool(model._supports_sdpa)


def repeat_keys_for_fused_attention() -> None:
    """Let sdpa repeat grouped keys and values where CUDA's fused kernels take none.

    Only the flash kernels take them: 16 bits, compute capability 8.0. With `enable_gqa` and anything else,
    torch computes plain attention, which keeps the weights of all pairs of tokens.
    """
    from transformers.integrations import sdpa_attention

    upstream = sdpa_attention.use_gqa_in_sdpa
    if hasattr(upstream, "upstream"):
        return

    def use_gqa_in_sdpa(mask: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor) -> bool:
        return bool(upstream(mask, key, value)) and _takes_groups(key)

    use_gqa_in_sdpa.upstream = upstream  # type: ignore[attr-defined]
    sdpa_attention.use_gqa_in_sdpa = use_gqa_in_sdpa


def _takes_groups(key: torch.Tensor) -> bool:
    if key.device.type != "cuda" or torch.version.hip is not None:
        return True
    capability: tuple[int, int] = torch.cuda.get_device_capability(key.device)
    return key.dtype != torch.float32 and capability >= (8, 0)


def leave_casts_to_autocast(model: Any) -> None:
    """Let autocast, where it is on, cast the inputs of adapters; peft would cast before it, which copies.

    Without autocast, as in `generate` of an evaluation, peft's cast stays: a 16-bit input would meet float32
    weights. Its own switch, `cast_input_dtype_enabled`, turns both off.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    def left(upstream: Any) -> Any:
        def cast(x: Any, dtype: torch.dtype) -> Any:
            if x is not None and torch.is_autocast_enabled(x.device.type):
                return x
            return upstream(x, dtype)

        return cast

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module._cast_input_dtype = left(module._cast_input_dtype)


@contextlib.contextmanager
def grouped_products(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Let experts multiply their rows with `product(rows, weights)`.

    Grouped products of fake tensors are checked as if compiled, for bfloat16 alone; upstream's own fallback
    takes every dtype, but keeps its rows, and makes a gradient of the weights, where these are frozen, too.
    """
    from transformers.integrations import moe

    upstream = moe._grouped_mm
    moe._grouped_mm = lambda input, weight, offs: product(input.to(weight.dtype), weight)
    try:
        yield
    finally:
        moe._grouped_mm = upstream


@contextlib.contextmanager
def plain_positions(*, documents: bool) -> Iterator[None]:
    """Let transformers know that each row holds one document, unless rows hold several.

    It looks at the values of the positions, which fake tensors do not have, and assumes several.
    """
    from transformers import masking_utils

    upstream = masking_utils.find_packed_sequence_indices
    if not documents:
        masking_utils.find_packed_sequence_indices = lambda _position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = upstream


@contextlib.contextmanager
def documents_known(several: Callable[[torch.Tensor], bool | None]) -> Iterator[None]:
    """Let transformers ask `several` whether a row of positions [rows, tokens] holds several documents.

    It looks at their values itself, for which the host waits, where the answer is None.
    """
    from transformers import masking_utils

    upstream = masking_utils.find_packed_sequence_indices

    def find(positions: torch.Tensor) -> torch.Tensor | None:
        known = several(positions)
        if known is None:
            return upstream(positions)
        return (positions == 0).cumsum(-1) if known else None

    masking_utils.find_packed_sequence_indices = find
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = upstream


def is_surely_causal(mask_function: Any) -> bool:
    """Whether no mask made of this function shows a later token, whatever the batch: no value is read.

    False for what only its values can tell, as where images see all of themselves.
    """
    from transformers import masking_utils

    parts = set(_parts(mask_function)) if inspect.isfunction(mask_function) else set()
    known = all(part.__module__ == masking_utils.__name__ for part in parts)
    joined = any(part.__qualname__.startswith(masking_utils.or_masks.__name__) for part in parts)
    return masking_utils.causal_mask_function in parts and known and not joined


def _parts(function: Any) -> Iterator[Any]:
    """A function of masks and those that it calls, which its closure holds."""
    yield function
    for cell in function.__closure__ or ():
        held = cell.cell_contents
        for one in held if isinstance(held, tuple) else (held,):
            if inspect.isfunction(one):
                yield from _parts(one)
