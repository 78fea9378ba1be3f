"""ModernBERT: rotary positions in float32, windows on both sides, a block of its own before a classifier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from launcher.models.families.model_type import ModelType
from launcher.models.families.windows import listed_layers
from launcher.models.layers.attention import rotate
from launcher.models.layers.feed_forward import feed_forward
from launcher.models.layers.layout import Block, LayerTape, Layout, of_kinds
from launcher.models.layers.linears import LAYER, Sizes, linears_below
from launcher.models.layers.pre_norm import LayerNorms
from launcher.models.layers.tape import Value
from launcher.tasks.task import HeadKind


@dataclass(frozen=True)
class _ModernBert(LayerNorms):
    norm_bias: bool = False
    first: bool = False
    """The first layer: the embeddings are normed already."""
    mlp_dropout: float = 0.0

    def run(self, tape: LayerTape, x: Value) -> Value:
        """The function has what attention made as a variable until it returns."""
        made = self.attention(tape, x if self.first else self.norm(tape, x, tape.block.hidden))
        made = tape.dropout(made, self.attention_dropout > 0)
        x, attended = self.join(tape, x, made), made
        x = self.join(tape, x, self.feed_forward(tape, self.norm(tape, x, tape.block.hidden)))
        tape.reads(attended)
        return x

    def place(self, tape: LayerTape, queries: Value, keys: Value) -> tuple[Value, Value]:
        queries = rotate(tape, queries, wide=True, narrow=True)
        return queries, rotate(tape, keys, wide=True, narrow=True)

    def feed_forward(self, tape: LayerTape, x: Value) -> Value:
        return feed_forward(tape, x, drops=self.mlp_dropout > 0)

    def norm_params(self, width: int) -> int:
        return width * (2 if self.norm_bias else 1)

    def embedded(self, block: Block) -> int:
        return block.tokens * block.hidden * block.dtypes.residual if block.grad else 0

    def with_head(self, sizes: Sizes, head: HeadKind) -> Self:
        """Before a classifier a product, an activation and a norm."""
        if head == "none":
            return self
        rows = (("dense", sizes.hidden, sizes.hidden, "head"),)
        linears = self.linears + linears_below("head.", 1, bool(sizes.config["classifier_bias"]), *rows)
        return replace(self, linears=linears, model_extra=self.model_extra + self.norm_params(sizes.hidden))


def _layers(s: Sizes) -> Layout:
    c, h = s.config, s.hidden
    norm, dropped = h * (2 if c["norm_bias"] else 1), float(c.get("attention_dropout", 0.0))

    def make(s: Sizes, kind: str) -> Layout:
        attention = (("attn.Wqkv", h, 3 * h, "norm1"), ("attn.Wo", h, h, "attn"))
        mlp = (("mlp.Wi", h, 2 * s.inner, "norm2"), ("mlp.Wo", s.inner, h, "act"))
        return _ModernBert.of(
            s,
            linears_below(LAYER, s.layers, bool(c["attention_bias"]), *attention)
            + linears_below(LAYER, s.layers, bool(c["mlp_bias"]), *mlp),
            layer_extra=norm if kind == "first" else 2 * norm,
            # The norm of the embeddings and the final one.
            model_extra=2 * norm,
            embed_paths=("model.embeddings.tok_embeddings",),
            activation=str(c.get("hidden_activation", "gelu")),
            attention_dropout=dropped,
            causal=False,
            norm_bias=bool(c["norm_bias"]),
            first=kind == "first",
            mlp_dropout=float(c["mlp_dropout"]),
        )

    return of_kinds(s, ["first", *["others"] * (s.layers - 1)], make)


def _window(config: Mapping[str, Any], layers: int) -> tuple[int, tuple[int, ...]]:
    """`local_attention` counts both sides; a row shorter than one side needs no mask."""
    step = int(config.get("global_attn_every_n_layers") or 3)
    listed = listed_layers(config, [i for i in range(layers) if i % step])
    return int(config.get("local_attention", 128)) // 2, listed


TYPES = (ModelType("modernbert", _layers, "encoder", window=_window, token_head="classifier"),)
