"""Llama 4: positions as complex numbers in some layers; every expert computes every token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from launcher.models.families.model_type import ONLY_LANGUAGE, ModelType
from launcher.models.layers.feed_forward import FOUR_BITS, expert_width, grouped, shared_block
from launcher.models.layers.layout import Block, LayerTape, Layout, of_kinds
from launcher.models.layers.linears import (
    LAYER,
    Linear,
    Sizes,
    biased_attention,
    linears_below,
    without_adapters,
)
from launcher.models.layers.pre_norm import PreNorm
from launcher.models.layers.tape import Storage, Value


@dataclass(frozen=True)
class _Llama4(PreNorm):
    plain_norms: bool = False
    """Rotated queries and keys are normed, without a weight."""
    scaled_queries: bool = False
    """Queries are multiplied by a factor of their position."""

    def place(self, tape: LayerTape, queries: Value, keys: Value) -> tuple[Value, Value]:
        if self.rotary_share:
            queries, keys = _rotate(tape, queries), _rotate(tape, keys)
        if self.plain_norms:
            queries, keys = (tape.plain_norm(x, tape.block.head_dim) for x in (queries, keys))
        if self.scaled_queries:
            queries = tape.step([queries], queries.elements, queries.width)
        return queries, keys

    def feed_forward(self, tape: LayerTape, x: Value) -> Value:
        """Every expert multiplies every token, which its share has scaled; a shared block is added."""
        block = tape.block
        if not self.experts:
            return super().feed_forward(tape, x)
        tokens, count, entries = block.tokens, self.num_experts, self.experts
        inner = self.active_inner // count
        n, index = count * tokens, Storage(8 * tokens)
        scores = tape.product(x, self.linear("router"))
        top = tape.step([scores], tokens, scores.width, saves=[index])
        spread = tape.cast(tape.step([top], n, top.width, saves=[index]), 4)
        shares = tape.cast(tape.step([spread], n, 4, save_out=True), scores.width)
        shares = tape.step([shares], n, shares.width)
        rows = tape.broadcast(tape.step([x], n * block.hidden, x.width), shares)
        both = _batched(tape, rows, 2 * n * inner, entries * 2 // 3)
        gate, up = tape.views(both, n * inner, n * inner)
        made = tape.times(up, tape.activate(gate))
        made = _batched(tape, made, n * block.hidden, entries // 3)
        shared = shared_block(tape, x)
        total = tape.step([made], x.elements, 4 if block.float_operations else made.width)
        out = tape.step([shared, total], x.elements, shared.width, view=shared.storage, passes=True)
        for one in (rows, made):  # variables of the function
            tape.reads(one)
        return out

    def shared(self, block: Block, grad: bool) -> int:
        """Factors of positions are complex numbers in float32, in all layers."""
        return 4 * block.length * block.head_dim


def _rotate(tape: LayerTape, x: Value) -> Value:
    return tape.cast(tape.step([tape.cast(x, 4)], x.elements, 4), x.width)


def _batched(tape: LayerTape, x: Value, elements: int, entries: int) -> Value:
    """The products of all experts, each with as many rows."""
    block = tape.block
    if block.quantization in FOUR_BITS:
        return grouped(tape, tape.cast(x, expert_width(block)), elements, entries, 0)
    return tape.matrices(x, elements, entries, params=entries if block.full else 0)


def _layers(s: Sizes) -> Layout:
    c, h = s.config, s.hidden
    step = int(c.get("interleave_moe_layer_step") or 1)
    given = c.get("moe_layers")
    moe = set(range(step - 1, s.layers, step) if given is None else given)
    interval = int(c.get("no_rope_layer_interval") or 4)
    turns = c.get("no_rope_layers") or [(i + 1) % interval for i in range(s.layers)]
    mlps = ["sparse" if i in moe else "dense" for i in range(s.layers)]
    kinds = [f"{'rope' if turns[i] else 'plain'} {mlps[i]}" for i in range(s.layers)]

    def make(s: Sizes, kind: str) -> Layout:
        turned, mlp = kind.split()
        more: dict[str, Any] = {"rotary_share": float(turned == "rope")}
        if turned == "rope":
            more["plain_norms"] = bool(c["use_qk_norm"])
            more["window"] = int(c["attention_chunk_size"] or 0)
        else:
            more["scaled_queries"] = bool(c["attn_temperature_tuning"])
        linears = biased_attention(s)

        def below(path: str, *rows: tuple[str, int, int, str]) -> tuple[Linear, ...]:
            return linears_below(f"{LAYER}feed_forward.{path}", s.layers, False, *rows)

        def block(path: str, width: int, reads: str, out: str) -> tuple[Linear, ...]:
            inputs = (("gate_proj", h, width, reads), ("up_proj", h, width, reads))
            return below(path, *inputs, ("down_proj", width, h, out))

        if mlp == "dense":
            width = int(c["intermediate_size_mlp"])
            linears += block("", width, "norm2", "act")
            return _Llama4.of(s, linears, active_inner=width, **more)
        count, active = int(c["num_local_experts"]), int(c["num_experts_per_tok"])
        # Its class returns two tensors, so that no adapter goes around it (`not_adaptable`).
        linears += without_adapters(below("", ("router", h, count, "router")))
        linears += block("shared_expert.", s.inner, "shared", "shared_act")
        # The router is a linear here, and every expert computes every token.
        more |= {"expert_adapters": False, "masks": 2}
        experts = _Llama4.with_experts(s, linears, (count, s.inner, active), -count * h, **more)
        return replace(experts, active_inner=count * s.inner)

    return of_kinds(s, kinds, make)


TYPES = (ModelType("llama4_text", _layers, lacks=ONLY_LANGUAGE),)
