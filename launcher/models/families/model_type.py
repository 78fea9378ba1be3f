"""What a plan has to know about a `model_type` of transformers besides its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.models.layers.layout import Layout
from launcher.models.layers.linears import Sizes
from launcher.tasks.task import Architecture, HeadKind

Window = Callable[[Mapping[str, Any], int], tuple[int, tuple[int, ...]]]
"""From configuration and number of layers: positions of the window, 0: there is none; indices of the layers
that have it."""
ONLY_LANGUAGE: tuple[HeadKind, ...] = ("classifier", "token-classifier")
"""What a type lacks for which transformers has a causal language model alone."""


def _no_window(config: Mapping[str, Any], layers: int) -> tuple[int, tuple[int, ...]]:
    return 0, ()


@dataclass(frozen=True)
class ModelType:
    """One `model_type`; a family is a module with those whose layers are alike."""

    name: str
    layout: Callable[[Sizes], Layout]
    """Its layers; KeyError, TypeError or ValueError where the configuration is wrong."""
    kind: Architecture = "decoder"
    sizes: Callable[[Sizes], Sizes] = lambda s: s
    """Sizes that its configuration tells in its own way."""
    window: Window = _no_window
    """Of layers that differ in the window alone."""
    lacks: tuple[HeadKind, ...] = ()
    """Heads that transformers has no class for."""
    token_head: str = "score"
    """Name of a token classifier's head: `classifier` in a class of its own, not the generic one."""
    needs: tuple[str, ...] = ()
    """Keys without which its class fails."""
    has_dense: bool = False
    """Its configuration may do without experts."""
    peft_targets: tuple[str, ...] = ()
    """peft's default target modules."""
    liger: bool = False
    """liger-kernel 0.8 replaces its norms, positions, gates and loss."""
    liger_experts: bool = False
    """And its experts."""
    only_eager: bool = False
    """transformers 5.23 refuses sdpa for it at load (`_supports_sdpa`)."""
    scales_embeddings: bool = False
    """AutoTP cannot split its embedding (VocabParallelEmbedding.validate_embedding)."""
