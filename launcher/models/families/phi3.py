"""Phi-3 and Phi-4-mini: fused products, of which queries, keys and values are slices."""

from __future__ import annotations

from launcher.models.families.model_type import ModelType
from launcher.models.families.windows import in_every_layer
from launcher.models.layers.attention import head_sizes
from launcher.models.layers.layout import LayerTape, Layout
from launcher.models.layers.linears import LAYER, Sizes, linears_below, rotary_share
from launcher.models.layers.pre_norm import PreNorm
from launcher.models.layers.tape import Value


class _Phi3(PreNorm):
    def project(self, tape: LayerTape, x: Value) -> tuple[Value, Value, Value]:
        """Slices: the gradient of each is written into zeros of the whole."""
        fused = tape.product(x, self.linear("qkv_proj"))
        q, k, v = (tape.step([fused], n, fused.width, view=fused.storage) for n in head_sizes(tape.block))
        return q, k, v


def _layers(s: Sizes) -> Layout:
    linears = linears_below(
        LAYER, s.layers, False,
        ("self_attn.qkv_proj", s.hidden, s.query_width + 2 * s.kv_width, "norm1"),
        ("self_attn.o_proj", s.query_width, s.hidden, "attn"),
        ("mlp.gate_up_proj", s.hidden, 2 * s.inner, "norm2"),
        ("mlp.down_proj", s.inner, s.hidden, "act"),
    )  # fmt: skip
    share, dropout = rotary_share(s, 1.0), float(s.config["resid_pdrop"])
    return _Phi3.of(s, linears, dropout=dropout, rotary_joined=True, rotary_share=share)


TYPES = (ModelType("phi3", _layers, window=in_every_layer(None), liger=True),)
