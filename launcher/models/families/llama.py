"""Llama, and types that differ from it in biases, windows, norms, activation or fused products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.models.families.model_type import ONLY_LANGUAGE, ModelType
from launcher.models.families.windows import in_every_layer, in_most_layers, listed_layers, window_size
from launcher.models.layers.layout import LayerTape, Layout
from launcher.models.layers.linears import (
    LAYER,
    Sizes,
    attention_linears,
    biased_attention,
    gated_mlp,
    linears_below,
    rotary_share,
    ungated_mlp,
)
from launcher.models.layers.pre_norm import LayerNorms, PreNorm
from launcher.models.layers.tape import Value

QUERY_VALUE = ("q_proj", "v_proj")


class _ScaledQueries(PreNorm):
    """Ministral 3: queries are multiplied by a factor of their position."""

    def place(self, tape: LayerTape, queries: Value, keys: Value) -> tuple[Value, Value]:
        queries, keys = super().place(tape, queries, keys)
        return tape.step([queries], queries.elements, queries.width), keys


def _llama(s: Sizes) -> Layout:
    return PreNorm.of(s, biased_attention(s) + gated_mlp(s, bool(s.config.get("mlp_bias", False))))


def _qwen2(s: Sizes) -> Layout:
    return PreNorm.of(s, attention_linears(s, qkv_bias=True) + gated_mlp(s))


def _qwen3(s: Sizes) -> Layout:
    return PreNorm.of(s, biased_attention(s) + gated_mlp(s), qk_norm=True)


def _ministral(s: Sizes) -> Layout:
    return PreNorm.of(s, attention_linears(s) + gated_mlp(s))


def _ministral3(s: Sizes) -> Layout:
    return _ScaledQueries.of(s, attention_linears(s) + gated_mlp(s))


def _arcee(s: Sizes) -> Layout:
    linears = biased_attention(s) + ungated_mlp(s, bool(s.config["mlp_bias"]))
    return PreNorm.of(s, linears, activation=str(s.config["hidden_act"]))


def _apertus(s: Sizes) -> Layout:
    activation = str(s.config["hidden_act"])
    extra = 2 if activation == "xielu" else 0  # the two parameters of the activation
    linears = biased_attention(s) + ungated_mlp(s, False)
    return PreNorm.of(s, linears, extra, activation=activation, qk_norm=True)


def _starcoder2(s: Sizes) -> Layout:
    bias = bool(s.config["use_bias"])
    rows = (("c_fc", s.hidden, s.inner, "norm2"), ("c_proj", s.inner, s.hidden, "act"))
    linears = attention_linears(s, qkv_bias=bias, out_bias=bias)
    linears += linears_below(LAYER + "mlp.", s.layers, bias, *rows)
    return LayerNorms.of(s, linears, dropout=float(s.config["residual_dropout"]))


def _glm(s: Sizes, **more: Any) -> Layout:
    rows = (("gate_up_proj", s.hidden, 2 * s.inner, "norm2"), ("down_proj", s.inner, s.hidden, "act"))
    linears = attention_linears(s, qkv_bias=bool(s.config["attention_bias"]))
    linears += linears_below(LAYER + "mlp.", s.layers, False, *rows)
    return PreNorm.of(s, linears, rotary_joined=True, rotary_share=rotary_share(s, 0.5), **more)


def _qwen_window(config: Mapping[str, Any], layers: int) -> tuple[int, tuple[int, ...]]:
    if not config.get("use_sliding_window"):
        return 0, ()
    first = int(config.get("max_window_layers", 28))
    return window_size(config), listed_layers(config, range(first, layers))


def _smollm3_window(config: Mapping[str, Any], layers: int) -> tuple[int, tuple[int, ...]]:
    """In the layers without rotary positions."""
    if not config.get("use_sliding_window"):
        return 0, ()
    interval = int(config.get("no_rope_layer_interval") or 4)
    turns = config.get("no_rope_layers") or [(i + 1) % interval for i in range(layers)]
    return window_size(config, None), listed_layers(config, [i for i in range(layers) if not turns[i]])


TYPES = (
    ModelType("llama", _llama, peft_targets=QUERY_VALUE, liger=True),
    ModelType("mistral", _llama, window=in_every_layer(4096), peft_targets=QUERY_VALUE, liger=True),
    ModelType("qwen2", _qwen2, window=_qwen_window, peft_targets=QUERY_VALUE, liger=True),
    ModelType("qwen3", _qwen3, window=_qwen_window, peft_targets=QUERY_VALUE, liger=True),
    ModelType("smollm3", _llama, window=_smollm3_window),
    ModelType("arcee", _arcee),
    ModelType("apertus", _apertus, lacks=ONLY_LANGUAGE),
    ModelType("starcoder2", _starcoder2, window=in_every_layer(None)),
    ModelType("glm", _glm),
    ModelType("glm4", lambda s: _glm(s, norms=4, output_norms=True)),
    ModelType("ministral", _ministral, window=in_most_layers(0), needs=("head_dim",)),
    ModelType("ministral3", _ministral3, window=in_every_layer(None)),
)
