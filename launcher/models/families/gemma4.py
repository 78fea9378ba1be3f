"""Gemma 4's text model: heads of two sizes, shared keys and values, an own input of each layer.

As read in transformers 5.23 (models/gemma4): `project_per_layer_inputs` runs before the first layer and
outside its checkpoint; `KVSharingDict` passes keys and values on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from launcher.models.families.model_type import ONLY_LANGUAGE, ModelType
from launcher.models.layers.attention import attended, rotate
from launcher.models.layers.feed_forward import chosen_rows, chosen_shares, feed_forward, run_experts
from launcher.models.layers.layout import STORED, Block, LayerTape, Layout, of_kinds
from launcher.models.layers.linears import LAYER, Linear, Sizes, biased_attention, gated_mlp, linears_below
from launcher.models.layers.pre_norm import PreNorm
from launcher.models.layers.tape import Storage, Tape, Value


@dataclass(frozen=True)
class _Gemma4(PreNorm):
    head_dim: int = 0
    kv_heads: int = 0
    reads_keys: bool = False
    caps_logits: bool = False

    def fit(self, block: Block) -> Block:
        return replace(block, head_dim=self.head_dim, kv_heads=self.kv_heads)

    @property
    def layer_table(self) -> tuple[int, int]:
        return self.embed_sizes[0] if self.embed_sizes else (0, 0)

    @property
    def shared_by(self) -> int:
        return self.window

    def run(self, tape: LayerTape, x: Value) -> Value:
        h, own = tape.block.hidden, self._own_input(tape) if self.layer_table[1] else None
        x = self.join(tape, x, self.attention(tape, self.norm(tape, x, h)))
        made = feed_forward(tape, self.norm(tape, x, h))
        if self.experts:  # beside the feed-forward block
            made, weight = self.norm(tape, made, h), self.route(tape, x)
            routed = run_experts(tape, self.norm(tape, x, h), weight)
            made = tape.add(made, self.norm(tape, routed, h))
        x = self.join(tape, x, made)
        if own is not None:  # gated by the stream
            gate = tape.activate(tape.product(x, self.linear("per_layer_input_gate")))
            back = tape.product(tape.times(gate, own), self.linear("per_layer_projection"))
            x = tape.add(self.norm(tape, back, h), x)
        # Multiplied, in place, by a stored number.
        return tape.step([x], x.elements, x.width, saves=[STORED], view=x.storage)

    def _own_input(self, tape: LayerTape) -> Value:
        """A slice of the layers' own inputs, whose gradient is written into zeros of those of all layers."""
        block = tape.block
        elements, width = block.tokens * self.layer_table[1], block.dtypes.residual
        every = tape.source(elements, width, grad=block.inputs_grad, counted=False)
        own = block.tokens * self.linear("per_layer_projection").in_features
        return tape.step([every], own, width, view=every.storage)

    def project(self, tape: LayerTape, x: Value) -> tuple[Value, Value, Value]:
        """Values are normed without a weight; full attention may have one product for them and the keys."""
        block = tape.block
        first = self.reading("norm1")
        if self.reads_keys:  # of an earlier layer, which keeps them
            elements, width = block.tokens * self.kv_heads * self.head_dim, block.dtypes.residual
            keys, values = (tape.source(elements, width, grad=block.grad, counted=False) for _ in range(2))
            return tape.product(x, first[0]), keys, values
        queries, keys, *own = (tape.product(x, one) for one in first)
        return queries, keys, own[0] if own else keys

    def attention(self, tape: LayerTape, x: Value) -> Value:
        queries, keys, values = self.project(tape, x)
        if self.reads_keys:
            queries = rotate(tape, self.norm(tape, queries, self.head_dim))
        else:
            queries, keys = self.place(tape, queries, keys)
            values = tape.plain_norm(values, self.head_dim)
        return attended(tape, x, self.mix(tape, queries, keys, values))

    def route(self, tape: LayerTape, x: Value) -> Value:
        """A norm without a weight, factors of its input and of the experts."""
        block = tape.block
        count, chosen, full = self.num_experts, chosen_rows(block), block.full
        normed, weight = tape.plain_norm(x, block.hidden), block.dtypes.weight
        params = block.hidden if full else 0
        scaled = tape.step(
            [normed], x.elements, max(normed.width, weight), saves=[normed.storage] if full else [],
            temporary=normed.size if full else 0, params=params, fresh=weight * params,
        )  # fmt: skip
        scaled = tape.step([scaled], scaled.elements, scaled.width)
        scores = tape.product(scaled, self.reading("router")[0])
        share = chosen_shares(tape, tape.cast(scores, 4))
        params = count if full else 0
        ids = Storage(8 * chosen)
        factors = tape.step([], chosen, weight, saves=[ids], params=params, fresh=weight * params)
        return tape.times(share, factors)

    def own_inputs(self, block: Block) -> tuple[Tape, Value] | None:
        """From the embedded tokens and an embedding of their own."""
        if not self.layer_table[1]:
            return None
        tape = LayerTape(block)
        x = tape.source(block.tokens * block.hidden, block.dtypes.residual, grad=block.grad, counted=False)
        made = tape.product(x, self.linear("per_layer_model_projection"))
        made = tape.step([made], made.elements, made.width)
        made = self.norm(tape, made, self.linear("per_layer_projection").in_features)
        trained = block.full or bool({*(block.adapted or ()), *block.whole} & set(self.embed_paths[1:]))
        found = tape.source(made.elements, block.dtypes.residual, grad=trained, counted=False)
        total = tape.add(made, found)
        return tape, tape.step([total], total.elements, total.width)

    def own_keys(self, block: Block) -> tuple[Tape, Value, Value]:
        """With the norm before them."""
        tape = LayerTape(block)
        x = tape.source(block.tokens * block.hidden, block.dtypes.residual, grad=block.grad, counted=False)
        x = self.norm(tape, x, block.hidden)
        _, keys, values = self.project(tape, x)
        keys = rotate(tape, self.norm(tape, keys, self.head_dim))
        return tape, keys, tape.plain_norm(values, self.head_dim)


def _layers(s: Sizes) -> Layout:
    """The kinds of layers, and the embedding and projection of the layers' own inputs."""
    width = int(s.config["hidden_size_per_layer_input"] or 0)
    kinds = [_kind(s, i) for i in range(s.layers)]
    if {kind[0] for kind in kinds if kind[1]} - {kind[0] for kind in kinds if not kind[1]}:
        raise ValueError("no layer before the num_kv_shared_layers last ones has keys of their layer type")
    more: dict[str, Any] = {}
    if width:
        more["embed_paths"] = ("model.embed_tokens", "model.embed_tokens_per_layer")
        more["embed_sizes"] = ((int(s.config["vocab_size_per_layer_input"]), s.layers * width),)
    named = dict(zip(map(str, kinds), kinds, strict=True))
    layout = of_kinds(s, list(map(str, kinds)), lambda s, name: _of_kind(s, width, *named[name], **more))
    if not width:
        return layout
    projection = ("per_layer_model_projection", s.hidden, s.layers * width, "inputs")
    return replace(layout, linears=layout.linears + linears_below("model.", 1, False, projection))


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


def _of_kind(
    s: Sizes, width: int, full: bool, reads_keys: bool, head_dim: int, kv_heads: int, **more: Any
) -> Layout:
    c = s.config
    inner = s.inner * (2 if reads_keys and c["use_double_wide_mlp"] else 1)
    s = replace(s, head_dim=head_dim, kv_heads=kv_heads, inner=inner)
    absent = ("k_proj", "v_proj") if reads_keys else ("v_proj",) if full and c["attention_k_eq_v"] else ()
    linears = tuple(one for one in biased_attention(s) if one.name not in absent) + gated_mlp(s)
    if width:
        gate, back = ("per_layer_input_gate", s.hidden, width), ("per_layer_projection", width, s.hidden)
        linears += linears_below(LAYER, s.layers, False, (*gate, "stream"), (*back, "gated"))
    extra = (5 if width else 4) * s.hidden + (1 if reads_keys else 2) * head_dim
    router, outside, experts = _experts(s) if c["enable_moe_block"] else ((), 0, {})
    return _Gemma4(
        linears + router,
        layer_extra=extra + outside,
        model_extra=s.hidden + width,
        embed_width=s.hidden,
        output_norms=True,
        wide_norms=True,
        qk_norm=True,
        head_dim=head_dim,
        kv_heads=kv_heads,
        reads_keys=reads_keys,
        activation="gelu_pytorch_tanh",
        caps_logits=c.get("final_logit_softcapping") is not None,
        window=0 if full else int(c.get("sliding_window") or 0),
        masks=2,
        **{"active_inner": inner, **experts, **more},
    )


def _experts(s: Sizes) -> tuple[tuple[Linear, ...], int, dict[str, Any]]:
    """Of experts beside the feed-forward block: router, other parameters, fields of the layout."""
    c, h = s.config, s.hidden
    count, width = int(c["num_experts"]), int(c["moe_intermediate_size"])
    experts, active = count * 3 * h * width, int(c["top_k_experts"])
    if count < active:
        raise ValueError(f"top_k_experts {active} is more than the {count} experts")
    router = linears_below(LAYER + "router.", s.layers, False, ("proj", h, count, "router"))
    more = {
        "experts": experts,
        "num_experts": count,
        "active_inner": active * width,
        "expert_adapters": False,
    }
    # Three norms, the router's factors of its input and of the experts.
    return router, experts + 4 * h + count, more


TYPES = (ModelType("gemma4_text", _layers, lacks=ONLY_LANGUAGE),)
