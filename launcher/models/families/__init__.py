"""The model families that have a closed form: one module each, for one `model_type` or several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.models.families import (
    bert,
    deepseek,
    gemma,
    gemma4,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    llama,
    llama4,
    mixtral,
    modernbert,
    olmo,
    opt,
    phi3,
    qwen_hybrid,
    t5,
    vit,
)
from launcher.models.families.model_type import ModelType
from launcher.models.layers.pre_norm import PreNorm

FAMILIES: tuple[tuple[ModelType, ...], ...] = (
    llama.TYPES, gemma.TYPES, phi3.TYPES, gpt2.TYPES, gpt_neox.TYPES, opt.TYPES,
    mixtral.TYPES, granite.TYPES, olmo.TYPES, qwen_hybrid.TYPES, deepseek.TYPES,
    llama4.TYPES, gpt_oss.TYPES, gemma4.TYPES, bert.TYPES, vit.TYPES, t5.TYPES, modernbert.TYPES,
)  # fmt: skip
MODEL_TYPES: Mapping[str, ModelType] = {one.name: one for family in FAMILIES for one in family}
_UNKNOWN = ModelType("", lambda s: PreNorm.of(s, ()))


def type_of(name: str) -> ModelType:
    """The type of this name; one without anything special where it is not known."""
    return MODEL_TYPES.get(name, _UNKNOWN)


def sliding_window(name: str, config: Mapping[str, Any], layers: int) -> tuple[int, tuple[int, ...]]:
    """(positions of the window, 0: there is none; indices of the layers that have it)."""
    return type_of(name).window(config, layers)
