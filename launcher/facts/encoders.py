"""Layouts of the encoder and encoder-decoder families; architectures.py has the decoders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from launcher.facts.architectures import Layout, Linear, Sizes
from launcher.tasks.task import Architecture


def _bert(s: Sizes) -> Layout:
    base, n, h = "bert.encoder.layer.{}.", s.layers, s.hidden
    linears = (
        *(
            Linear(name, h, h, n, f"{base}attention.self.{name}", True, "norm1")
            for name in ("query", "key", "value")
        ),
        Linear("dense", h, h, n, base + "attention.output.dense", True, "attn"),
        Linear("dense", h, s.inner, n, base + "intermediate.dense", True, "norm2"),
        Linear("dense", s.inner, h, n, base + "output.dense", True, "act"),
        Linear("dense", h, h, 1, "bert.pooler.dense", True),
    )
    types = int(s.config["type_vocab_size"])
    paths = tuple(f"bert.embeddings.{kind}_embeddings" for kind in ("word", "position", "token_type"))
    return _encoder(
        s,
        linears,
        # Segment embeddings, and the norm of the embeddings.
        model_extra=types * h + 2 * h,
        embed_width=h,
        positions=s.positions,
        segments=types,
        embed_paths=paths,
        float_softmax=False,
        post_norm=True,
    )


def _vit(s: Sizes) -> Layout:
    base, n, h, c = "vit.layers.{}.", s.layers, s.hidden, s.config
    qkv_bias = bool(c["qkv_bias"])
    linears = (
        *(
            Linear(name, h, h, n, f"{base}attention.{name}", qkv_bias, "norm1")
            for name in ("q_proj", "k_proj", "v_proj")
        ),
        Linear("o_proj", h, h, n, base + "attention.o_proj", True, "attn"),
        Linear("fc1", h, s.inner, n, base + "mlp.fc1", True, "norm2"),
        Linear("fc2", s.inner, h, n, base + "mlp.fc2", True, "act"),
    )
    (height, width), (down, across) = _pair(c["image_size"]), _pair(c["patch_size"])
    tokens = (height // down) * (width // across) + 1
    # The class token, the convolution that makes patches, and the last norm.
    extra = h + (int(c["num_channels"]) * down * across + 1) * h + 2 * h
    return _encoder(
        s,
        linears,
        model_extra=extra,
        embed_width=0,
        positions=tokens,
        embed_paths=(),
        tokens_per_sample=tokens,
        picture=int(c["num_channels"]) * height * width,
    )


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    """Height and width, which a configuration may give as one number."""
    if isinstance(size, Sequence):
        return int(size[0]), int(size[1])
    return int(size), int(size)


def _encoder(s: Sizes, linears: tuple[Linear, ...], **more: Any) -> Layout:
    """Two biased LayerNorms and a two-product feed-forward block in each layer."""
    return Layout(
        linears,
        layer_extra=4 * s.hidden,
        gated=False,
        rms_norm=False,
        activation=str(s.config["hidden_act"]),
        active_inner=s.inner,
        dropout=float(s.config["hidden_dropout_prob"]),
        attention_dropout=float(s.config["attention_probs_dropout_prob"]),
        causal=False,
        **more,
    )


def _t5(s: Sizes) -> Layout:
    """The encoder; its `decoder` reads the same token embedding."""
    layers = int(s.config.get("num_decoder_layers") or s.layers)
    return _t5_stack(s, "encoder", s.layers, decoder=_t5_stack(s, "decoder", layers))


def _t5_stack(s: Sizes, stack: str, n: int, decoder: Layout | None = None) -> Layout:
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
    dropout = float(s.config["dropout_rate"])
    return Layout(
        linears,
        layer_extra=(3 if crossed else 2) * h,
        # The last norm, and the biases of distances, which the first layer holds for all.
        model_extra=h + int(s.config["relative_attention_num_buckets"]) * s.heads,
        embed_width=h,
        gated=kind == "gated",
        norms=3 if crossed else 2,
        dropout=dropout,
        attention_dropout=dropout,
        inner_dropout=dropout,
        float_softmax=False,
        # T5's own spelling of gated-gelu: the gate goes through gelu_new.
        activation="gelu_new" if (kind, activation) == ("gated", "gelu") else activation,
        active_inner=inner,
        position_bias=True,
        crossed=crossed,
        causal=crossed,
        embed_paths=("shared",),
        decoder=decoder,
    )


ENCODER_FAMILIES: dict[str, Callable[[Sizes], Layout]] = {"bert": _bert, "vit": _vit, "t5": _t5, "mt5": _t5}
ENCODER_KINDS: dict[str, Architecture] = {
    "bert": "encoder", "vit": "image-encoder", "t5": "encoder-decoder", "mt5": "encoder-decoder",
}  # fmt: skip
