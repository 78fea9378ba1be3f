"""StarCoder2: Llama's attention, LayerNorms and a feed-forward block without gate."""

from __future__ import annotations

from launcher.models.families.model_type import ModelType
from launcher.models.families.windows import in_every_layer
from launcher.models.layers.layout import Layout, Sizes, linears_below
from launcher.models.layers.pre_norm import LAYER, LayerNorms, attention_linears


def _layers(s: Sizes) -> Layout:
    bias = bool(s.config["use_bias"])
    rows = (("c_fc", s.hidden, s.inner, "norm2"), ("c_proj", s.inner, s.hidden, "act"))
    linears = attention_linears(s, qkv_bias=bias, out_bias=bias)
    linears += linears_below(LAYER + "mlp.", s.layers, bias, *rows)
    return LayerNorms.of(s, linears, dropout=float(s.config["residual_dropout"]))


TYPES = (ModelType("starcoder2", _layers, window=in_every_layer(None)),)
