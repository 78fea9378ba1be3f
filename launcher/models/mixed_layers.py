"""Layouts of decoders whose layers are of several kinds: linear attention, state space, with experts.

Names and shapes follow transformers 5.23; tests/contract/test_param_counts.py compares them with the classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from launcher.models.architectures import (
    Layout,
    Linear,
    Sizes,
    attention_linears,
    decoder_layout,
    gated_mlp,
    linears_below,
    of_kinds,
    rotary_share,
    sparse_layers,
    with_experts,
    without_adapters,
)
from launcher.models.gemma4_layers import gemma4

LAYER = "model.layers.{}."
_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
"""Older names of layer types (transformers' `remap_legacy_layer_types`)."""


def _layer_types(s: Sizes, derived: Sequence[str]) -> list[str]:
    """Of each layer; `derived`: what the class makes of a configuration without them."""
    given = s.config.get("layer_types") or s.config.get("layers_block_type") or derived
    if len(given) != s.layers:
        raise ValueError(f"layer_types has {len(given)} entries for {s.layers} layers")
    return [_TYPES.get(str(one), str(one)) for one in given]


def _every(s: Sizes, interval: int, often: str, last: str) -> list[str]:
    """`last` in every `interval`th layer, `often` in the others."""
    return [often if (i + 1) % interval else last for i in range(s.layers)]


def _shared(s: Sizes, name: str, width: int, *, adapts: bool) -> tuple[Linear, ...]:
    """The feed-forward block that all tokens pass through beside the experts."""
    base, h = f"{LAYER}{name}.", s.hidden
    rows = (("gate_proj", h, width, "shared"), ("up_proj", h, width, "shared"))
    found = linears_below(base, s.layers, False, *rows, ("down_proj", width, h, "shared_act"))
    return found if adapts else without_adapters(found)


def _gated_shared(s: Sizes, width: int, *, adapts: bool) -> tuple[Linear, ...]:
    """Qwen's, whose output is multiplied by a gate of one number for each token."""
    gate = ("shared_expert_gate", s.hidden, 1, "shared_gate")
    gates = linears_below(LAYER + "mlp.", s.layers, False, gate)
    return _shared(s, "mlp.shared_expert", width, adapts=adapts) + gates


# Qwen: gated attention, every fourth layer, and gated delta rule.


def _turned(s: Sizes, default: float) -> dict[str, Any]:
    """Rotary embeddings on a share of each head, cut out and joined where it is a part."""
    share = rotary_share(s, default)
    return {"rotary_share": share, "rotary_joined": 0 < share < 1}


def _gated_attention(s: Sizes) -> tuple[Linear, ...]:
    """Attention whose queries bring a gate of their width for its output."""
    bias = bool(s.config["attention_bias"])
    query, *others = attention_linears(s, qkv_bias=bias, out_bias=bias)
    return (replace(query, out_features=2 * s.query_width), *others)


def _delta_rule(s: Sizes, names: Callable[[int, int, int], dict[str, int]]) -> tuple[tuple[Linear, ...], int]:
    """Linear attention, and its parameters outside of linears: convolution, decay and a gated norm."""
    c, h = s.config, s.hidden
    heads = int(c["linear_num_value_heads"])
    keys = int(c["linear_num_key_heads"]) * int(c["linear_key_head_dim"])
    values = heads * int(c["linear_value_head_dim"])
    inputs = ((name, h, width, "norm1") for name, width in names(keys, values, heads).items())
    output = ("out_proj", values, h, "mixed")
    linears = linears_below(LAYER + "linear_attn.", s.layers, False, *inputs, output)
    convolution = (2 * keys + values) * int(c["linear_conv_kernel_dim"])
    return linears, convolution + 2 * heads + int(c["linear_value_head_dim"])


_DELTA_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip


def _next_names(keys: int, values: int, heads: int) -> dict[str, int]:
    return {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads}


def _3_5_names(keys: int, values: int, heads: int) -> dict[str, int]:
    return {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}


def _qwen_hybrid(s: Sizes, names: Callable[[int, int, int], dict[str, int]], mlps: Sequence[str]) -> Layout:
    """`mlps`: of each layer, "dense" or "sparse"."""
    interval = int(s.config.get("full_attention_interval") or 4)
    mixers = _layer_types(s, _every(s, interval, "linear_attention", "full_attention"))
    turned = _turned(s, 0.25)
    # peft takes names of Qwen3-Next's linears for those of its experts; Qwen3.5 is not in its table.
    adapts = s.config["model_type"] != "qwen3_next"

    def make(s: Sizes, kind: str) -> Layout:
        mixer, mlp = kind.split()
        more: dict[str, Any] = {**turned, "wide_norm_weight": True}
        if mixer == "full_attention":
            linears, extra, more["qk_norm"] = _gated_attention(s), 0, True
        else:
            linears, extra = _delta_rule(s, names)
            more |= {"mixer": "delta", "mixer_sizes": tuple(int(s.config[key]) for key in _DELTA_SIZES)}
        if mlp == "dense":
            dense = gated_mlp(s)
            return decoder_layout(s, linears + (dense if adapts else without_adapters(dense)), extra, **more)
        c, width = s.config, int(s.config["shared_expert_intermediate_size"])
        linears += _gated_shared(s, width, adapts=adapts)
        active = int(c["num_experts_per_tok"])
        sizes = (int(c["num_experts"]), int(c["moe_intermediate_size"]), active)
        return with_experts(s, linears, *sizes, extra, expert_adapters=not adapts, **more)

    return of_kinds(s, [f"{mixer} {mlp}" for mixer, mlp in zip(mixers, mlps, strict=True)], make)


def _qwen3_next(s: Sizes) -> Layout:
    return _qwen_hybrid(s, _next_names, sparse_layers(s, int(s.config["num_experts"])))


def _qwen2_moe(s: Sizes) -> Layout:
    c, bias = s.config, bool(s.config["qkv_bias"])

    def make(s: Sizes, kind: str) -> Layout:
        linears = attention_linears(s, qkv_bias=bias)
        if kind == "dense":
            return decoder_layout(s, linears + gated_mlp(s))
        linears += _gated_shared(s, int(c["shared_expert_intermediate_size"]), adapts=True)
        sizes = (int(c["num_experts"]), int(c["moe_intermediate_size"]), int(c["num_experts_per_tok"]))
        return with_experts(s, linears, *sizes, expert_adapters=False)

    return of_kinds(s, sparse_layers(s, int(c["num_experts"])), make)


# Granite 4: attention or Mamba-2, experts and a shared block, or that block alone.


def _granite_hybrid(s: Sizes) -> Layout:
    c, h = s.config, s.hidden
    count, width = int(c.get("num_local_experts") or 0), int(c["shared_intermediate_size"])
    rope = c.get("position_embedding_type") == "rope"

    def make(s: Sizes, kind: str) -> Layout:
        more: dict[str, Any] = {
            "expert_adapters": False,
            "rotary_share": float(rope),
            "scaled_stream": True,
            "scaled_logits": True,
        }
        if kind == "linear_attention":
            linears, extra = _mamba(s)
            heads = int(c["mamba_n_heads"])
            others = (int(c[key]) for key in _MAMBA_SIZES)
            more |= {"mixer": "mamba", "mixer_sizes": (heads, int(c["mamba_expand"]) * h // heads, *others)}
        else:
            bias = bool(c["attention_bias"])
            linears, extra = attention_linears(s, qkv_bias=bias, out_bias=bias), 0
        rows = (("input_linear", h, 2 * width, "shared"), ("output_linear", width, h, "shared_act"))
        if not count:
            rows = (("input_linear", h, 2 * width, "norm2"), ("output_linear", width, h, "act"))
        linears += linears_below(LAYER + "shared_mlp.", s.layers, False, *rows)
        if not count:
            return decoder_layout(s, linears, extra, **{**more, "active_inner": width})
        return with_experts(s, linears, count, s.inner, int(c["num_experts_per_tok"]), extra, **more)

    return of_kinds(s, _layer_types(s, ["linear_attention"] * s.layers), make)


_MAMBA_SIZES = ("mamba_d_state", "mamba_n_groups", "mamba_d_conv", "mamba_chunk_size")


def _mamba(s: Sizes) -> tuple[tuple[Linear, ...], int]:
    """Mamba-2, and its parameters outside of linears: convolution, decay, skip, step and a gated norm."""
    c, h = s.config, s.hidden
    inner, heads = int(c["mamba_expand"]) * h, int(c["mamba_n_heads"])
    convolved = inner + 2 * int(c["mamba_n_groups"]) * int(c["mamba_d_state"])
    rows = (("in_proj", h, inner + convolved + heads, "norm1"), ("out_proj", inner, h, "mixed"))
    linears = linears_below(LAYER + "mamba.", s.layers, bool(c["mamba_proj_bias"]), *rows)
    convolution = convolved * (int(c["mamba_d_conv"]) + int(bool(c["mamba_conv_bias"])))
    return linears, convolution + 3 * heads + inner


def _granite_moe(s: Sizes) -> Layout:
    c, bias = s.config, bool(s.config["attention_bias"])
    linears = attention_linears(s, qkv_bias=bias, out_bias=bias)
    sizes = (int(c["num_local_experts"]), s.inner, int(c["num_experts_per_tok"]))
    return with_experts(s, linears, *sizes, expert_adapters=False, scaled_stream=True, scaled_logits=True)


# DeepSeek-V3 and GLM-4.5: the first layers are dense.


def _dense_first(s: Sizes, mix: Callable[[Sizes], tuple[Linear, ...]], extra: int, **more: Any) -> Layout:
    c = s.config
    dense, width = int(c["first_k_dense_replace"]), int(c["moe_intermediate_size"])

    def make(s: Sizes, kind: str) -> Layout:
        linears = mix(s)
        if kind == "dense":
            return decoder_layout(s, linears + without_adapters(gated_mlp(s)), extra, **more)
        shared = int(c["n_shared_experts"]) * width
        linears += _shared(s, "mlp.shared_experts", shared, adapts=False)
        sizes = (int(c["num_experts"]), width, int(c["num_experts_per_tok"]))
        return with_experts(s, linears, *sizes, extra, router="sigmoid", **more)

    return of_kinds(s, ["dense" if i < dense else "sparse" for i in range(s.layers)], make)


def _deepseek_v3(s: Sizes) -> Layout:
    c, h = s.config, s.hidden
    low, latent = c.get("q_lora_rank"), int(c["kv_lora_rank"])
    plain, rotated, values = (int(c[k]) for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    queries, bias = s.heads * (plain + rotated), bool(c["attention_bias"])

    def mix(s: Sizes) -> tuple[Linear, ...]:
        base, n = LAYER + "self_attn.", s.layers
        first = (("q_proj", h, queries, "norm1"),)
        if low is not None:
            first = (("q_a_proj", h, int(low), "norm1"),)
        down = ("kv_a_proj_with_mqa", h, latent + rotated, "norm1")
        up = (("q_b_proj", int(low), queries, "query"),) if low is not None else ()
        return (
            *linears_below(base, n, bias and low is not None, *first),
            *linears_below(base, n, False, *up),
            *linears_below(base, n, bias, down),
            *linears_below(base, n, False, ("kv_b_proj", latent, s.heads * (plain + values), "latent")),
            *linears_below(base, n, bias, ("o_proj", s.heads * values, h, "attn")),
        )

    more = {"mixer": "latent", "mixer_sizes": (plain, rotated, values), "rotary_joined": True}
    return _dense_first(s, mix, int(low or 0) + latent, **more)


def _glm4_moe(s: Sizes) -> Layout:
    c = s.config
    bias, norm = bool(c["attention_bias"]), bool(c.get("use_qk_norm", False))
    return _dense_first(s, lambda s: attention_linears(s, qkv_bias=bias), 0, qk_norm=norm, **_turned(s, 0.5))


def _llama4(s: Sizes) -> Layout:
    c, h = s.config, s.hidden
    bias, step = bool(c["attention_bias"]), int(c.get("interleave_moe_layer_step") or 1)
    given = c.get("moe_layers")
    moe = set(range(step - 1, s.layers, step) if given is None else given)
    interval = int(c.get("no_rope_layer_interval") or 4)
    turns = c.get("no_rope_layers") or [(i + 1) % interval for i in range(s.layers)]
    mlps = ["sparse" if i in moe else "dense" for i in range(s.layers)]
    kinds = [f"{'rope' if turns[i] else 'plain'} {mlps[i]}" for i in range(s.layers)]

    def make(s: Sizes, kind: str) -> Layout:
        turned, mlp = kind.split()
        more: dict[str, Any] = {"rotary_share": float(turned == "rope"), "rotary_kind": "complex"}
        if turned == "rope":
            more |= {"qk_norm_plain": bool(c["use_qk_norm"]), "window": int(c["attention_chunk_size"] or 0)}
        else:
            more["scaled_queries"] = bool(c["attn_temperature_tuning"])
        linears = attention_linears(s, qkv_bias=bias, out_bias=bias)

        def below(path: str, *rows: tuple[str, int, int, str]) -> tuple[Linear, ...]:
            return linears_below(f"{LAYER}feed_forward.{path}", s.layers, False, *rows)

        def block(path: str, width: int, reads: str, out: str) -> tuple[Linear, ...]:
            inputs = (("gate_proj", h, width, reads), ("up_proj", h, width, reads))
            return below(path, *inputs, ("down_proj", width, h, out))

        if mlp == "dense":
            width = int(c["intermediate_size_mlp"])
            linears += block("", width, "norm2", "act")
            return decoder_layout(s, linears, **{**more, "active_inner": width})
        count, active = int(c["num_local_experts"]), int(c["num_experts_per_tok"])
        # Its class returns two tensors, so that no adapter goes around it (`not_adaptable`).
        linears += without_adapters(below("", ("router", h, count, "router")))
        linears += block("shared_expert.", s.inner, "shared", "shared_act")
        # The router is a linear here, and every expert computes every token.
        more |= {"router": "all", "expert_adapters": False, "masks": 2}
        experts = with_experts(s, linears, count, s.inner, active, -count * h, **more)
        return replace(experts, active_inner=count * s.inner)

    return of_kinds(s, kinds, make)


def _gpt_oss(s: Sizes) -> Layout:
    c, bias = s.config, bool(s.config["attention_bias"])
    count = int(c["num_local_experts"])
    # A sink for each head, biases of the router and of both products of each expert.
    extra = s.heads + count * (1 + 2 * s.inner + s.hidden)
    linears = attention_linears(s, qkv_bias=bias, out_bias=bias)
    active = int(c["num_experts_per_tok"])
    more = {"expert_adapters": False, "expert_bias": True, "router": "chosen"}
    more |= {"wide_norm_weight": True, "sinks": True, "masks": 2, "rotary_kind": "halves"}
    return with_experts(s, linears, count, s.inner, active, extra, **more)


MIXED_FAMILIES: dict[str, Callable[[Sizes], Layout]] = {
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": lambda s: _qwen_hybrid(s, _3_5_names, ["dense"] * s.layers),
    "qwen3_5_moe_text": lambda s: _qwen_hybrid(s, _3_5_names, ["sparse"] * s.layers),
    "qwen2_moe": _qwen2_moe,
    "granitemoehybrid": _granite_hybrid,
    "granitemoe": _granite_moe,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "llama4_text": _llama4,
    "gpt_oss": _gpt_oss,
    "gemma4_text": gemma4,
}
