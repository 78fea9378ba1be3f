"""GPT-NeoX (Pythia): attention and feed-forward block both read the layer's input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from launcher.models.families.model_type import ModelType
from launcher.models.layers.layout import Block, Layout, Sizes, linears_below
from launcher.models.layers.operations import add, dropout
from launcher.models.layers.pre_norm import LayerNorms
from launcher.models.layers.tape import Tape, Value


@dataclass(frozen=True)
class _GptNeoX(LayerNorms):
    drops_embeddings: ClassVar[bool] = True
    parallel: bool = True

    def run(self, tape: Tape, block: Block, x: Value) -> Value:
        if not self.parallel:
            return super().run(tape, block, x)
        p, on_cpu, h = self.dropout > 0, block.dtypes.on_cpu, block.hidden
        first = dropout(tape, self.attention(tape, block, self.norm(tape, block, x, h)), p, on_cpu)
        second = dropout(tape, self.feed_forward(tape, block, self.norm(tape, block, x, h)), p, on_cpu)
        return add(tape, add(tape, second, first), x)


def _layers(s: Sizes) -> Layout:
    base, n, h = "gpt_neox.layers.{}.", s.layers, s.hidden
    bias = bool(s.config["attention_bias"])
    attention = (("attention.query_key_value", h, 3 * h, "norm1"), ("attention.dense", h, h, "attn"))
    mlp = (("mlp.dense_h_to_4h", h, s.inner, "norm2"), ("mlp.dense_4h_to_h", s.inner, h, "act"))
    # Defaults of GPTNeoXConfig; current configurations have the share in rope_parameters.
    rope = s.config.get("rope_parameters") or {}
    return _GptNeoX.of(
        s,
        linears_below(base, n, bias, *attention) + linears_below(base, n, True, *mlp),
        dropout=float(s.config["hidden_dropout"]),
        embed_paths=("gpt_neox.embed_in",),
        parallel=bool(s.config.get("use_parallel_residual", True)),
        rotary_joined=True,
        rotary_share=float(rope.get("partial_rotary_factor", s.config.get("rotary_pct", 0.25))),
    )


TYPES = (ModelType("gpt_neox", _layers, token_head="classifier", peft_targets=("query_key_value",)),)
