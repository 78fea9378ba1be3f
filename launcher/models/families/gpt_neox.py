"""GPT-NeoX (Pythia): attention and feed-forward block both read the layer's input."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.models.families.model_type import ModelType
from launcher.models.layers.layout import LayerTape, Layout
from launcher.models.layers.linears import Sizes, linears_below
from launcher.models.layers.pre_norm import LayerNorms
from launcher.models.layers.tape import Value


@dataclass(frozen=True)
class _GptNeoX(LayerNorms):
    drops_embeddings = True
    parallel: bool = True

    def run(self, tape: LayerTape, x: Value) -> Value:
        if not self.parallel:
            return super().run(tape, x)
        p, h = self.dropout > 0, tape.block.hidden
        first = tape.dropout(self.attention(tape, self.norm(tape, x, h)), p)
        second = tape.dropout(self.feed_forward(tape, self.norm(tape, x, h)), p)
        return tape.add(tape.add(second, first), x)


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
