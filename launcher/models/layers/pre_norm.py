"""The layers that most families change a part of: Llama's, and those with LayerNorms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from launcher.models.layers.attention import attended, mix, project, rotate
from launcher.models.layers.feed_forward import feed_forward, softmax_route, with_shared_block
from launcher.models.layers.layout import Block, Layout, Linear, Sizes, linears_below
from launcher.models.layers.operations import (
    add,
    dropout,
    layer_norm,
    liger_norm,
    rms_norm,
    wide_norm,
)
from launcher.models.layers.tape import Tape, Value

LAYER = "model.layers.{}."


@dataclass(frozen=True)
class PreNorm(Layout):
    """Llama's layer: attention and feed-forward block each read a norm of the stream, and are added to it."""

    qk_norm: bool = False
    """Norms on each head of queries and keys."""
    wide_norms: bool = False
    """RMSNorms multiply by their weight in float32, before the result is narrowed."""
    output_norms: bool = False
    """What attention and feed-forward block make is normed before it is added."""

    @classmethod
    def of(
        cls, s: Sizes, linears: tuple[Linear, ...], extra: int = 0, *, norms: int = 2, **more: Any
    ) -> Self:
        """Layers with RMSNorms. extra: parameters of a layer besides norms."""
        params = norms * s.hidden + (2 * s.head_dim if more.get("qk_norm") else 0)
        return cls(linears, params + extra, s.hidden, s.hidden, **{"active_inner": s.inner, **more})

    @classmethod
    def with_experts(
        cls,
        s: Sizes,
        linears: tuple[Linear, ...],
        count: int,
        width: int,
        active: int,
        extra: int = 0,
        **more: Any,
    ) -> Self:
        """`count` experts of this width, of which each token uses `active`, and a router.

        extra: parameters of a layer besides norms, router and experts.
        """
        if count < active:
            raise ValueError(f"num_experts_per_tok {active} is more than the {count} experts")
        experts, router = count * 3 * s.hidden * width, count * s.hidden
        more |= {"experts": experts, "num_experts": count, "active_inner": active * width}
        return cls.of(s, linears, experts + router + extra, **more)

    def run(self, tape: Tape, block: Block, x: Value) -> Value:
        x = self.join(tape, block, x, self.attention(tape, block, self.norm(tape, block, x, block.hidden)))
        made = self.feed_forward(tape, block, self.norm(tape, block, x, block.hidden))
        return self.join(tape, block, x, made)

    def norm(self, tape: Tape, block: Block, x: Value, width: int) -> Value:
        if block.liger:
            return liger_norm(tape, x, width, in_place=not self.output_norms)
        return (wide_norm if self.wide_norms else rms_norm)(tape, block, x, width)

    def join(self, tape: Tape, block: Block, x: Value, made: Value) -> Value:
        """The stream `x` with what attention or feed-forward block made."""
        if self.output_norms:
            made = self.norm(tape, block, made, block.hidden)
        return add(tape, dropout(tape, made, self.dropout > 0, block.dtypes.on_cpu), x)

    def attention(self, tape: Tape, block: Block, x: Value) -> Value:
        """Attention of `x` over itself."""
        queries, keys, values = self.project(tape, block, x)
        queries, keys = self.place(tape, block, queries, keys)
        return attended(tape, block, x, self.mix(tape, block, queries, keys, values))

    def project(self, tape: Tape, block: Block, x: Value) -> tuple[Value, Value, Value]:
        """Queries, keys and values."""
        return project(tape, block, x)

    def place(self, tape: Tape, block: Block, queries: Value, keys: Value) -> tuple[Value, Value]:
        """Queries and keys as attention reads them: normed, and rotated by their positions."""
        if self.qk_norm:
            queries, keys = self.norm_heads(tape, block, queries, keys)
        if self.positions or not self.rotary_share:
            return queries, keys
        return rotate(tape, block, queries), rotate(tape, block, keys)

    def norm_heads(self, tape: Tape, block: Block, queries: Value, keys: Value) -> tuple[Value, Value]:
        """Norms on each head."""
        width = block.head_dim
        return self.norm(tape, block, queries, width), self.norm(tape, block, keys, width)

    def mix(self, tape: Tape, block: Block, q: Value, k: Value, v: Value) -> Value:
        """What attention makes of queries, keys and values."""
        return mix(tape, block, q, k, v)

    def feed_forward(self, tape: Tape, block: Block, x: Value) -> Value:
        """The feed-forward block, or experts in its place."""
        return with_shared_block(tape, block, x) if self.experts else feed_forward(tape, block, x)

    def route(self, tape: Tape, block: Block, x: Value) -> Value:
        return softmax_route(tape, block, x)


@dataclass(frozen=True)
class LayerNorms(PreNorm):
    """Biased LayerNorms, and a feed-forward block without gate."""

    rms_norm: ClassVar[bool] = False

    @classmethod
    def of(
        cls, s: Sizes, linears: tuple[Linear, ...], extra: int = 0, *, norms: int = 2, **more: Any
    ) -> Self:
        """extra: parameters of a layer besides norms."""
        facts: dict[str, Any] = {
            "layer_extra": norms * 2 * s.hidden + extra,
            "model_extra": 2 * s.hidden,
            "embed_width": s.hidden,
            "activation": str(s.config.get("activation_function") or s.config.get("hidden_act")),
            "active_inner": s.inner,
        }
        return cls(linears, **(facts | more))

    def norm(self, tape: Tape, block: Block, x: Value, width: int) -> Value:
        return layer_norm(tape, block, x, width)

    def norm_params(self, width: int) -> int:
        return 2 * width


def post_norm(layout: PreNorm, tape: Tape, block: Block, x: Value) -> Value:
    """A layer in which each sum is normed."""
    x = layout.norm(tape, block, layout.join(tape, block, x, layout.attention(tape, block, x)), block.hidden)
    made = layout.feed_forward(tape, block, x)
    return layout.norm(tape, block, layout.join(tape, block, x, made), block.hidden)


def attention_linears(s: Sizes, *, qkv_bias: bool = False, out_bias: bool = False) -> tuple[Linear, ...]:
    base, h, kv = LAYER + "self_attn.", s.hidden, s.kv_width
    inputs = (("q_proj", h, s.query_width, "norm1"), ("k_proj", h, kv, "norm1"), ("v_proj", h, kv, "norm1"))
    output = ("o_proj", s.query_width, h, "attn")
    return linears_below(base, s.layers, qkv_bias, *inputs) + linears_below(base, s.layers, out_bias, output)


def biased_attention(s: Sizes) -> tuple[Linear, ...]:
    """With biases where `attention_bias` is set."""
    bias = bool(s.config.get("attention_bias", False))
    return attention_linears(s, qkv_bias=bias, out_bias=bias)


def gated_mlp(s: Sizes, bias: bool = False) -> tuple[Linear, ...]:
    return linears_below(
        LAYER + "mlp.", s.layers, bias,
        ("gate_proj", s.hidden, s.inner, "norm2"),
        ("up_proj", s.hidden, s.inner, "norm2"),
        ("down_proj", s.inner, s.hidden, "act"),
    )  # fmt: skip


def ungated_mlp(s: Sizes, bias: bool) -> tuple[Linear, ...]:
    rows = (("up_proj", s.hidden, s.inner, "norm2"), ("down_proj", s.inner, s.hidden, "act"))
    return linears_below(LAYER + "mlp.", s.layers, bias, *rows)


def shared_mlp(s: Sizes, name: str, width: int) -> tuple[Linear, ...]:
    """The feed-forward block that all tokens pass through beside the experts."""
    rows = (("gate_proj", s.hidden, width, "shared"), ("up_proj", s.hidden, width, "shared"))
    return linears_below(
        f"{LAYER}{name}.", s.layers, False, *rows, ("down_proj", width, s.hidden, "shared_act")
    )


def rotary_share(s: Sizes, default: float) -> float:
    """The share of each head that is rotated; older configurations have it outside `rope_parameters`."""
    rope = s.config.get("rope_parameters") or s.config.get("rope_scaling")
    given = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
    return float(s.config.get("partial_rotary_factor", default) if given is None else given)


def partly_rotated(s: Sizes, default: float) -> dict[str, Any]:
    """Rotary embeddings on a share of each head, cut out and joined where it is a part."""
    share = rotary_share(s, default)
    return {"rotary_share": share, "rotary_joined": 0 < share < 1}


def sparse_layers(s: Sizes, count: int) -> list[str]:
    """Of each layer, "dense" or "sparse", as Qwen's configurations have it."""
    step, dense = int(s.config.get("decoder_sparse_step") or 1), s.config.get("mlp_only_layers") or ()
    every = ((i + 1) % step == 0 and i not in dense and count > 0 for i in range(s.layers))
    return ["sparse" if one else "dense" for one in every]
