"""OLMo 2 and 3: what attention and feed-forward block make is normed, what they read is not."""

from __future__ import annotations

from launcher.models.families.model_type import ModelType
from launcher.models.families.windows import in_most_layers
from launcher.models.layers.attention import rotate
from launcher.models.layers.layout import LayerTape, Layout
from launcher.models.layers.linears import Sizes, biased_attention, gated_mlp
from launcher.models.layers.pre_norm import PreNorm
from launcher.models.layers.tape import Value


class _Olmo(PreNorm):
    def run(self, tape: LayerTape, x: Value) -> Value:
        x = self.join(tape, x, self.attention(tape, x))
        return self.join(tape, x, self.feed_forward(tape, x))

    def place(self, tape: LayerTape, queries: Value, keys: Value) -> tuple[Value, Value]:
        """Norms over all heads at once; what is rotated keeps its dtype."""
        block = tape.block
        queries = self.norm(tape, queries, block.heads * block.head_dim)
        keys = self.norm(tape, keys, block.kv_heads * block.head_dim)
        return rotate(tape, queries, narrow=True), rotate(tape, keys, narrow=True)


def _layers(s: Sizes) -> Layout:
    linears, norms = biased_attention(s) + gated_mlp(s), s.query_width + s.kv_width
    return _Olmo.of(s, linears, norms, wide_norms=True, output_norms=True)


TYPES = (
    ModelType("olmo2", _layers, lacks=("token-classifier",)),
    ModelType("olmo3", _layers, window=in_most_layers(4), lacks=("token-classifier",)),
)
