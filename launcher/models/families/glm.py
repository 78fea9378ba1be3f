"""GLM-4: half of each head is rotated; gate and up projection are one product."""

from __future__ import annotations

from typing import Any

from launcher.models.families.model_type import ModelType
from launcher.models.layers.layout import Layout, Sizes, linears_below
from launcher.models.layers.pre_norm import LAYER, PreNorm, attention_linears, rotary_share


def _layers(s: Sizes, **more: Any) -> Layout:
    mlp = linears_below(
        LAYER + "mlp.", s.layers, False,
        ("gate_up_proj", s.hidden, 2 * s.inner, "norm2"),
        ("down_proj", s.inner, s.hidden, "act"),
    )  # fmt: skip
    linears = attention_linears(s, qkv_bias=bool(s.config["attention_bias"])) + mlp
    return PreNorm.of(s, linears, rotary_joined=True, rotary_share=rotary_share(s, 0.5), **more)


TYPES = (
    ModelType("glm", _layers),
    ModelType("glm4", lambda s: _layers(s, norms=4, output_norms=True)),
)
