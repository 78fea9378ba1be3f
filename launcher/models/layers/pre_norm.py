"""The layers that most families change a part of: Llama's, and those with LayerNorms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from launcher.models.layers.attention import attended, cap, eager, kernel, rotate, split
from launcher.models.layers.feed_forward import feed_forward, softmax_route, with_shared_block
from launcher.models.layers.layout import LayerTape, Layout
from launcher.models.layers.linears import Linear, Sizes
from launcher.models.layers.tape import Value


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
    def of(cls, s: Sizes, linears: tuple[Linear, ...], extra: int = 0, norms: int = 2, **more: Any) -> Self:
        """Layers with RMSNorms. extra: parameters of a layer besides norms."""
        params = norms * s.hidden + (2 * s.head_dim if more.get("qk_norm") else 0)
        return cls(linears, params + extra, s.hidden, s.hidden, **{"active_inner": s.inner, **more})

    @classmethod
    def with_experts(
        cls, s: Sizes, linears: tuple[Linear, ...], sizes: tuple[int, int, int], extra: int = 0, **more: Any
    ) -> Self:
        """Experts and a router. sizes: how many experts, their width, how many of them each token uses.

        extra: parameters of a layer besides norms, router and experts.
        """
        count, width, active = sizes
        if count < active:
            raise ValueError(f"num_experts_per_tok {active} is more than the {count} experts")
        experts, router = count * 3 * s.hidden * width, count * s.hidden
        more |= {"experts": experts, "num_experts": count, "active_inner": active * width}
        return cls.of(s, linears, experts + router + extra, **more)

    def run(self, tape: LayerTape, x: Value) -> Value:
        x = self.join(tape, x, self.attention(tape, self.norm(tape, x, tape.block.hidden)))
        made = self.feed_forward(tape, self.norm(tape, x, tape.block.hidden))
        return self.join(tape, x, made)

    def norm(self, tape: LayerTape, x: Value, width: int) -> Value:
        if tape.block.liger:
            return tape.liger_norm(x, width, in_place=not self.output_norms)
        return tape.wide_norm(x, width) if self.wide_norms else tape.rms_norm(x, width)

    def join(self, tape: LayerTape, x: Value, made: Value) -> Value:
        """The stream `x` with what attention or feed-forward block made."""
        if self.output_norms:
            made = self.norm(tape, made, tape.block.hidden)
        return tape.add(tape.dropout(made, self.dropout > 0), x)

    def attention(self, tape: LayerTape, x: Value) -> Value:
        """Attention of `x` over itself."""
        queries, keys, values = self.project(tape, x)
        queries, keys = self.place(tape, queries, keys)
        return attended(tape, x, self.mix(tape, queries, keys, values))

    def project(self, tape: LayerTape, x: Value) -> tuple[Value, Value, Value]:
        """Queries, keys and values of `x`: three products, or views of one."""
        first = self.reading("norm1")
        if len(first) == 1:
            return split(tape, tape.product(x, first[0]))
        q, k, v = (tape.product(x, one) for one in first)
        return q, k, v

    def place(self, tape: LayerTape, queries: Value, keys: Value) -> tuple[Value, Value]:
        """Queries and keys as attention reads them: normed, and rotated by their positions."""
        if self.qk_norm:
            queries, keys = (self.norm(tape, one, tape.block.head_dim) for one in (queries, keys))
        if self.positions or not self.rotary_share:
            return queries, keys
        return rotate(tape, queries), rotate(tape, keys)

    def mix(self, tape: LayerTape, q: Value, k: Value, v: Value) -> Value:
        """What attention makes of queries, keys and values, laid out as the last product reads it."""
        return eager(tape, q, k, v) if tape.block.attention == "eager" else kernel(tape, q, k, v)

    def feed_forward(self, tape: LayerTape, x: Value) -> Value:
        """The feed-forward block, or experts in its place."""
        return with_shared_block(tape, x) if self.experts else feed_forward(tape, x)

    def route(self, tape: LayerTape, x: Value) -> Value:
        return softmax_route(tape, x)

    def logits(self, tape: LayerTape, logits: Value) -> Value:
        return cap(tape, logits) if self.caps_logits else logits


class LayerNorms(PreNorm):
    """Biased LayerNorms, and a feed-forward block without gate."""

    rms_norm = False

    @classmethod
    def of(cls, s: Sizes, linears: tuple[Linear, ...], extra: int = 0, norms: int = 2, **more: Any) -> Self:
        """extra: parameters of a layer besides norms."""
        facts: dict[str, Any] = {
            "layer_extra": norms * 2 * s.hidden + extra,
            "model_extra": 2 * s.hidden,
            "embed_width": s.hidden,
            "activation": str(s.config.get("activation_function") or s.config.get("hidden_act")),
            "active_inner": s.inner,
        }
        return cls(linears, **(facts | more))

    def norm(self, tape: LayerTape, x: Value, width: int) -> Value:
        return tape.layer_norm(x, width)

    def norm_params(self, width: int) -> int:
        return 2 * width


def post_norm(layout: PreNorm, tape: LayerTape, x: Value) -> Value:
    """A layer in which each sum is normed."""
    x = layout.norm(tape, layout.join(tape, x, layout.attention(tape, x)), tape.block.hidden)
    made = layout.feed_forward(tape, x)
    return layout.norm(tape, layout.join(tape, x, made), tape.block.hidden)
