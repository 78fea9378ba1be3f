"""Layout of Gemma 4's text model: heads of two sizes, shared keys and values, an own input of each layer.

Names and shapes follow transformers 5.23 (models/gemma4); tests/contract/test_param_counts.py compares them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from launcher.models.architectures import (
    Layout,
    Linear,
    Sizes,
    attention_linears,
    gated_mlp,
    linears_below,
    of_kinds,
)


def gemma4(s: Sizes) -> Layout:
    """The kinds of layers, and the embedding and projection of the layers' own inputs."""
    width = int(s.config["hidden_size_per_layer_input"] or 0)
    kinds = [_kind(s, i) for i in range(s.layers)]
    if {kind[0] for kind in kinds if kind[1]} - {kind[0] for kind in kinds if not kind[1]}:
        raise ValueError("no layer before the num_kv_shared_layers last ones has keys of their layer type")
    named = dict(zip(map(str, kinds), kinds, strict=True))
    layout = of_kinds(s, list(map(str, kinds)), lambda s, name: _layers(s, width, *named[name]))
    if not width:
        return layout
    projection = ("per_layer_model_projection", s.hidden, s.layers * width, "inputs")
    return replace(
        layout,
        linears=layout.linears + linears_below("model.", 1, False, projection),
        layer_table=(int(s.config["vocab_size_per_layer_input"]), s.layers * width),
        embed_paths=("model.embed_tokens", "model.embed_tokens_per_layer"),
    )


def _kind(s: Sizes, i: int) -> tuple[bool, bool, int, int]:
    """Of layer `i`: full attention, shared keys and values, width of a head, key-value heads.

    Saved configurations have the last two layer by layer; the last layer always attends fully.
    """
    c = s.config
    types = c.get("layer_types") or ["full_attention" if (i + 1) % 6 == 0 else "" for i in range(s.layers)]
    if len(types) != s.layers:
        raise ValueError(f"layer_types has {len(types)} entries for {s.layers} layers")
    full = types[i] == "full_attention" or i == s.layers - 1
    shared = i >= s.layers - int(c["num_kv_shared_layers"])
    own = c.get("per_layer_config")
    if own is None and full:
        kv_heads = c.get("num_global_key_value_heads") if c["attention_k_eq_v"] else None
        return full, shared, int(c.get("global_head_dim") or 512), int(kv_heads or s.kv_heads)
    own = (own or {}).get(str(i), (own or {}).get(i)) or {}
    return full, shared, int(own.get("head_dim", s.head_dim)), int(own.get("num_key_value_heads", s.kv_heads))


def _layers(s: Sizes, width: int, full: bool, shared: bool, head_dim: int, kv_heads: int) -> Layout:
    c = s.config
    inner = s.inner * (2 if shared and c["use_double_wide_mlp"] else 1)
    s = replace(s, head_dim=head_dim, kv_heads=kv_heads, inner=inner)
    bias = bool(c["attention_bias"])
    absent = ("k_proj", "v_proj") if shared else ("v_proj",) if full and c["attention_k_eq_v"] else ()
    attention = attention_linears(s, qkv_bias=bias, out_bias=bias)
    linears = tuple(one for one in attention if one.name not in absent) + gated_mlp(s)
    if width:
        gate, back = ("per_layer_input_gate", s.hidden, width), ("per_layer_projection", width, s.hidden)
        linears += linears_below("model.layers.{}.", s.layers, False, (*gate, "stream"), (*back, "gated"))
    extra = (5 if width else 4) * s.hidden + (1 if shared else 2) * head_dim
    router, outside, more = _experts(s) if c["enable_moe_block"] else ((), 0, {})
    return Layout(
        linears + router,
        layer_extra=extra + outside,
        model_extra=s.hidden + width,
        embed_width=s.hidden,
        norms=4,
        output_norms=True,
        wide_norm_weight=True,
        qk_norm=True,
        head_dim=head_dim,
        kv_heads=kv_heads,
        activation="gelu_pytorch_tanh",
        logit_cap=c.get("final_logit_softcapping") is not None,
        value_norm=not shared,
        shared_keys=shared,
        layer_factor=True,
        window=0 if full else int(c.get("sliding_window") or 0),
        masks=2,
        **{"active_inner": inner, **more},
    )


def _experts(s: Sizes) -> tuple[tuple[Linear, ...], int, dict[str, Any]]:
    """Of experts beside the feed-forward block: router, other parameters, fields of the layout."""
    c, h = s.config, s.hidden
    count, width = int(c["num_experts"]), int(c["moe_intermediate_size"])
    experts, active = count * 3 * h * width, int(c["top_k_experts"])
    if count < active:
        raise ValueError(f"top_k_experts {active} is more than the {count} experts")
    router = linears_below("model.layers.{}.router.", s.layers, False, ("proj", h, count, "router"))
    # Three norms, the router's factors of its input and of the experts.
    more = {
        "experts": experts,
        "num_experts": count,
        "active_inner": active * width,
        "expert_adapters": False,
        "router": "normed",
    }
    return router, experts + 4 * h + count, more
