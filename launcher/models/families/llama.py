"""Llama, and types that differ from it in biases, windows, norms of heads or their activation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.models.families.model_type import ModelType
from launcher.models.families.windows import in_every_layer, in_most_layers, listed_layers, window_size
from launcher.models.layers.layout import Block, Layout, Sizes
from launcher.models.layers.pre_norm import (
    PreNorm,
    attention_linears,
    biased_attention,
    gated_mlp,
    ungated_mlp,
)
from launcher.models.layers.tape import Tape, Value

QUERY_VALUE = ("q_proj", "v_proj")


@dataclass(frozen=True)
class _ScaledQueries(PreNorm):
    """Ministral 3: queries are multiplied by a factor of their position."""

    def place(self, tape: Tape, block: Block, queries: Value, keys: Value) -> tuple[Value, Value]:
        queries, keys = super().place(tape, block, queries, keys)
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
    ModelType("ministral", _ministral, window=in_most_layers(0), needs=("head_dim",)),
    ModelType("ministral3", _ministral3, window=in_every_layer(None)),
)
