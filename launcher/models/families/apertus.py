"""Apertus: a feed-forward block without gate, whose activation has two parameters."""

from __future__ import annotations

from launcher.models.families.model_type import ONLY_LANGUAGE, ModelType
from launcher.models.layers.layout import Layout, Sizes
from launcher.models.layers.pre_norm import PreNorm, biased_attention, ungated_mlp


def _layers(s: Sizes) -> Layout:
    activation = str(s.config["hidden_act"])
    linears, extra = biased_attention(s) + ungated_mlp(s, False), 2 if activation == "xielu" else 0
    return PreNorm.of(s, linears, extra, activation=activation, qk_norm=True)


TYPES = (ModelType("apertus", _layers, lacks=ONLY_LANGUAGE),)
