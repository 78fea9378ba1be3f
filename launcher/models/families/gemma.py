"""Gemma 1 to 3: norms that multiply in float32; from Gemma 2 on around each block, with capped scores."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.models.families.model_type import ModelType
from launcher.models.families.windows import in_most_layers
from launcher.models.layers.layout import Layout
from launcher.models.layers.linears import Sizes, biased_attention, gated_mlp
from launcher.models.layers.pre_norm import PreNorm

_PEFT = ("q_proj", "v_proj")


@dataclass(frozen=True)
class _Gemma(PreNorm):
    caps_scores: bool = False
    caps_logits: bool = False


def _layers(s: Sizes, norms: int = 2, qk_norm: bool = False, default_cap: float | None = None) -> Layout:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    scores, logits = (s.config.get(key, default_cap) is not None for key in caps)
    return _Gemma.of(
        s,
        biased_attention(s) + gated_mlp(s),
        norms=norms,
        qk_norm=qk_norm,
        output_norms=norms == 4,
        wide_norms=True,
        activation="gelu_pytorch_tanh",
        caps_scores=scores,
        caps_logits=logits,
    )


TYPES = (
    ModelType("gemma", _layers, peft_targets=_PEFT, liger=True, scales_embeddings=True),
    ModelType(
        "gemma2",
        # Gemma2Config's defaults cap both.
        lambda s: _layers(s, norms=4, default_cap=1.0),
        window=in_most_layers(2),
        peft_targets=_PEFT,
        liger=True,
        only_eager=True,
        scales_embeddings=True,
    ),
    ModelType(
        "gemma3_text",
        lambda s: _layers(s, norms=4, qk_norm=True),
        window=in_most_layers(6),
        lacks=("token-classifier",),
        peft_targets=_PEFT,
        liger=True,
    ),
)
