"""ViT: patches of an image and a class token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.models.families.model_type import ModelType
from launcher.models.layers.layout import Layout
from launcher.models.layers.linears import Sizes, linears_below
from launcher.models.layers.pre_norm import LayerNorms


@dataclass(frozen=True)
class _ViT(LayerNorms):
    drops_embeddings = True
    tokens_per_sample: int = 0
    image_values: int = 0


def _layers(s: Sizes) -> Layout:
    base, n, h, c = "vit.layers.{}.", s.layers, s.hidden, s.config
    inputs = ((f"attention.{name}", h, h, "norm1") for name in ("q_proj", "k_proj", "v_proj"))
    others = (
        ("attention.o_proj", h, h, "attn"),
        ("mlp.fc1", h, s.inner, "norm2"),
        ("mlp.fc2", s.inner, h, "act"),
    )
    (height, width), (down, across) = _pair(c["image_size"]), _pair(c["patch_size"])
    channels, tokens = int(c["num_channels"]), (height // down) * (width // across) + 1
    return _ViT.of(
        s,
        linears_below(base, n, bool(c["qkv_bias"]), *inputs) + linears_below(base, n, True, *others),
        # The class token, the patch convolution and the final norm.
        model_extra=h + (channels * down * across + 1) * h + 2 * h,
        embed_width=0,
        positions=tokens,
        tokens_per_sample=tokens,
        embed_paths=(),
        dropout=float(c["hidden_dropout_prob"]),
        attention_dropout=float(c["attention_probs_dropout_prob"]),
        causal=False,
        image_values=channels * height * width,
    )


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    """Height and width, also from one number."""
    if isinstance(size, Sequence):
        return int(size[0]), int(size[1])
    return int(size), int(size)


TYPES = (ModelType("vit", _layers, "image-encoder"),)
