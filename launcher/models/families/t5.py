"""T5 and mT5: an encoder and a decoder, learned biases of distances in place of positions."""

from __future__ import annotations

from dataclasses import replace

from launcher.models.families.model_type import ModelType
from launcher.models.layers.attention import attended
from launcher.models.layers.feed_forward import feed_forward
from launcher.models.layers.layout import Block, LayerTape, Layout
from launcher.models.layers.linears import Linear, Sizes
from launcher.models.layers.pre_norm import PreNorm
from launcher.models.layers.tape import Value


class _T5(PreNorm):
    """Layers of the encoder; those of the decoder are causal, and attend to the encoder's output as well."""

    drops_embeddings = True
    biases_scores = True

    @property
    def attentions(self) -> int:
        return 2 if self.causal else 1

    def run(self, tape: LayerTape, x: Value) -> Value:
        block = tape.block
        h = block.hidden
        if not self.causal:
            return super().run(tape, x)
        encoder = tape.source(block.tokens * h, block.dtypes.residual, counted=False)
        x = self.join(tape, x, self.attention(tape, self.norm(tape, x, h)))
        normed = self.norm(tape, x, h)
        first = self.reading("norm_cross", "encoder")
        reads = (normed, encoder, encoder)
        q, k, v = (tape.product(y, one) for y, one in zip(reads, first, strict=True))
        made = attended(tape, normed, self.mix(tape, q, k, v), "attn_cross")
        x = self.join(tape, x, made)
        return self.join(tape, x, self.feed_forward(tape, self.norm(tape, x, h)))

    def norm(self, tape: LayerTape, x: Value, width: int) -> Value:
        return tape.rms_norm(x, width, scales_input=True)

    def feed_forward(self, tape: LayerTape, x: Value) -> Value:
        return feed_forward(tape, x, drops=self.dropout > 0)

    def last(self, tape: LayerTape, x: Value) -> Value:
        return tape.dropout(super().last(tape, x), self.dropout > 0)

    def shared(self, block: Block, grad: bool) -> int:
        """With biases and the numbers of their distances, the same for all samples and layers."""
        return super().shared(block, grad) + block.length**2 * (4 * block.heads + 8)


def _layers(s: Sizes) -> Layout:
    """The encoder, with its `decoder`; both share the token embedding."""
    layers = int(s.config.get("num_decoder_layers") or s.layers)
    return _stack(s, "encoder", s.layers, decoder=_stack(s, "decoder", layers))


def _stack(s: Sizes, stack: str, n: int, decoder: Layout | None = None) -> Layout:
    base, h, inner, width = f"{stack}.block.{{}}.layer.", s.hidden, s.inner, s.query_width
    crossed = stack == "decoder"
    kind, _, activation = str(s.config["feed_forward_proj"]).rpartition("-")

    def attention(path: str, norm: str, read: str, out: str) -> tuple[Linear, ...]:
        reads = {"q": norm, "k": read, "v": read}
        return (
            *(Linear(x, h, width, n, f"{base}{path}.{x}", False, reads[x]) for x in reads),
            Linear("o", width, h, n, f"{base}{path}.o", False, out),
        )

    linears = attention("0.SelfAttention", "norm1", "norm1", "attn")
    if crossed:
        linears += attention("1.EncDecAttention", "norm_cross", "encoder", "attn_cross")
    block = f"{base}{2 if crossed else 1}.DenseReluDense."
    names = ("wi_0", "wi_1") if kind == "gated" else ("wi",)
    linears += tuple(Linear(x, h, inner, n, block + x, False, "norm2") for x in names)
    linears += (Linear("wo", inner, h, n, block + "wo", False, "act"),)
    dropped = float(s.config["dropout_rate"])
    return _T5(
        linears,
        layer_extra=(3 if crossed else 2) * h,
        # The final norm, and the relative-position biases, which only the first layer has.
        model_extra=h + int(s.config["relative_attention_num_buckets"]) * s.heads,
        embed_width=h,
        embed_paths=("shared",),
        dropout=dropped,
        attention_dropout=dropped,
        float_softmax=False,
        rotary_share=0.0,
        # T5's gated-gelu means gelu_new.
        activation="gelu_new" if (kind, activation) == ("gated", "gelu") else activation,
        active_inner=inner,
        causal=crossed,
        decoder=decoder,
    )


TYPES = tuple(
    # Positions are relative: n_positions is no limit.
    ModelType(name, _layers, "encoder-decoder", lambda s: replace(s, positions=0), peft_targets=("q", "v"))
    for name in ("t5", "mt5")
)
