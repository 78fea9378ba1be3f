"""BERT: each sum is normed, embeddings too; segments; a pooler before a classifier."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from launcher.models.families.model_type import ModelType
from launcher.models.layers.layout import Block, LayerTape, Layout
from launcher.models.layers.linears import Sizes, linears_below
from launcher.models.layers.pre_norm import LayerNorms, post_norm
from launcher.models.layers.tape import Value
from launcher.tasks.task import HeadKind


class _Bert(LayerNorms):
    drops_embeddings = True

    def run(self, tape: LayerTape, x: Value) -> Value:
        return post_norm(self, tape, x)

    def last(self, tape: LayerTape, x: Value) -> Value:
        return x

    def embedded(self, block: Block) -> int:
        return block.tokens * block.hidden * block.dtypes.residual if block.grad else 0

    def with_head(self, sizes: Sizes, head: HeadKind) -> Self:
        if head == "classifier":
            return self
        # Without the pooler (add_pooling_layer=False).
        return replace(self, linears=tuple(one for one in self.linears if one.path != "bert.pooler.dense"))


def _layers(s: Sizes) -> Layout:
    h, types = s.hidden, int(s.config["type_vocab_size"])
    linears = linears_below(
        "bert.encoder.layer.{}.", s.layers, True,
        *((f"attention.self.{name}", h, h, "norm1") for name in ("query", "key", "value")),
        ("attention.output.dense", h, h, "attn"),
        ("intermediate.dense", h, s.inner, "norm2"),
        ("output.dense", s.inner, h, "act"),
    )  # fmt: skip
    return _Bert.of(
        s,
        linears + linears_below("bert.", 1, True, ("pooler.dense", h, h, "")),
        # Segment embeddings and the embeddings' norm.
        model_extra=types * h + 2 * h,
        positions=s.positions,
        embed_paths=tuple(f"bert.embeddings.{x}_embeddings" for x in ("word", "position", "token_type")),
        embed_sizes=((s.positions, h), (types, h)),
        dropout=float(s.config["hidden_dropout_prob"]),
        attention_dropout=float(s.config["attention_probs_dropout_prob"]),
        float_softmax=False,
        causal=False,
    )


TYPES = (ModelType("bert", _layers, "encoder", token_head="classifier", peft_targets=("query", "value")),)
