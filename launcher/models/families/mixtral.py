"""Llama with experts in place of the feed-forward block: Mixtral, Qwen2-MoE and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.models.families.model_type import ModelType
from launcher.models.families.windows import in_every_layer, listed_layers, window_size
from launcher.models.layers.feed_forward import softmax_route
from launcher.models.layers.layout import LayerTape, Layout, of_kinds
from launcher.models.layers.linears import (
    LAYER,
    Linear,
    Sizes,
    attention_linears,
    biased_attention,
    gated_mlp,
    linears_below,
    shared_mlp,
    sparse_layers,
    without_adapters,
)
from launcher.models.layers.pre_norm import PreNorm
from launcher.models.layers.tape import Value


class _Mixtral(PreNorm):
    def route(self, tape: LayerTape, x: Value) -> Value:
        return softmax_route(tape, x, wide=True)


def _mixtral(s: Sizes) -> Layout:
    count, active = int(s.config["num_local_experts"]), int(s.config["num_experts_per_tok"])
    return _Mixtral.with_experts(s, attention_linears(s), (count, s.inner, active))


def _qwen3_moe(s: Sizes) -> Layout:
    c = s.config
    count, active = int(c.get("num_experts") or c["num_local_experts"]), int(c["num_experts_per_tok"])

    def make(s: Sizes, kind: str) -> Layout:
        linears = biased_attention(s)
        if kind == "dense":
            return PreNorm.of(s, linears + without_adapters(gated_mlp(s)), qk_norm=True)
        sizes = (count, int(c["moe_intermediate_size"]), active)
        return PreNorm.with_experts(s, linears, sizes, qk_norm=True)

    return of_kinds(s, sparse_layers(s, count), make)


def _qwen2_moe(s: Sizes) -> Layout:
    c, bias = s.config, bool(s.config["qkv_bias"])

    def make(s: Sizes, kind: str) -> Layout:
        linears = attention_linears(s, qkv_bias=bias)
        if kind == "dense":
            return PreNorm.of(s, linears + gated_mlp(s))
        linears += gated_shared_mlp(s)
        sizes = (int(c["num_experts"]), int(c["moe_intermediate_size"]), int(c["num_experts_per_tok"]))
        return PreNorm.with_experts(s, linears, sizes, expert_adapters=False)

    return of_kinds(s, sparse_layers(s, int(c["num_experts"])), make)


def gated_shared_mlp(s: Sizes) -> tuple[Linear, ...]:
    """Qwen's block beside its experts, whose output is multiplied by a gate of one number for each token."""
    gate = ("shared_expert_gate", s.hidden, 1, "shared_gate")
    block = shared_mlp(s, "mlp.shared_expert", int(s.config["shared_expert_intermediate_size"]))
    return block + linears_below(LAYER + "mlp.", s.layers, False, gate)


def _qwen3_window(config: Mapping[str, Any], layers: int) -> tuple[int, tuple[int, ...]]:
    on = config.get("use_sliding_window")
    return (window_size(config), listed_layers(config, range(layers))) if on else (0, ())


TYPES = (
    ModelType(
        "mixtral",
        _mixtral,
        window=in_every_layer(None),
        peft_targets=("q_proj", "v_proj"),
        liger=True,
        liger_experts=True,
    ),
    ModelType("qwen3_moe", _qwen3_moe, window=_qwen3_window, has_dense=True, liger=True, liger_experts=True),
    ModelType("qwen2_moe", _qwen2_moe, has_dense=True),
)
