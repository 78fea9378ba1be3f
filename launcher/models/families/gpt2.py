"""GPT-2, and GPT BigCode (StarCoder), whose heads may share keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from launcher.models.families.model_type import ModelType
from launcher.models.layers.layout import Layout
from launcher.models.layers.linears import Sizes, linears_below
from launcher.models.layers.pre_norm import LayerNorms


@dataclass(frozen=True)
class _Gpt2(LayerNorms):
    drops_embeddings = True
    mask_buffer: int = 0


def _layers(s: Sizes, qkv_width: int, **more: Any) -> Layout:
    h = s.hidden
    linears = linears_below(
        "transformer.h.{}.", s.layers, True,
        ("attn.c_attn", h, qkv_width, "norm1"),
        ("attn.c_proj", h, h, "attn"),
        ("mlp.c_fc", h, s.inner, "norm2"),
        ("mlp.c_proj", s.inner, h, "act"),
    )  # fmt: skip
    return _Gpt2.of(
        s,
        linears,
        positions=s.positions,
        dropout=float(s.config["resid_pdrop"]),
        attention_dropout=float(s.config["attn_pdrop"]),
        embed_paths=("transformer.wte", "transformer.wpe"),
        embed_sizes=((s.positions, h),),
        **more,
    )


def _gpt_bigcode(s: Sizes) -> Layout:
    # One bool per pair of positions.
    return _layers(s, s.hidden + 2 * s.kv_width, mask_buffer=s.positions**2)


def _bigcode_sizes(s: Sizes) -> Sizes:
    return replace(s, kv_heads=1 if s.config["multi_query"] else s.heads)


TYPES = (
    ModelType(
        "gpt_bigcode", _gpt_bigcode, sizes=_bigcode_sizes, token_head="classifier", peft_targets=("c_attn",)
    ),
    ModelType(
        "gpt2",
        lambda s: _layers(s, 3 * s.hidden, float_softmax=False),
        token_head="classifier",
        peft_targets=("c_attn",),
    ),
)
