"""Which layers of a decoder have sliding-window attention.

Source: configuration classes and `create_causal_mask` calls of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.models.families.model_type import Window


def in_every_layer(default: int | None) -> Window:
    """`default`: of the configuration class for `sliding_window`."""
    return lambda config, layers: (window_size(config, default), tuple(range(layers)))


def in_most_layers(step: int) -> Window:
    """In all layers but every `step`-th, 0: in all; `layer_types` of the configuration comes first."""

    def window(config: Mapping[str, Any], layers: int) -> tuple[int, tuple[int, ...]]:
        n = int(config.get("sliding_window_pattern") or step)
        derived = [i for i in range(layers) if not n or (i + 1) % n]
        return window_size(config, 4096), listed_layers(config, derived)

    return window


def window_size(config: Mapping[str, Any], default: int | None = 4096) -> int:
    return int(config.get("sliding_window", default) or 0)


def listed_layers(config: Mapping[str, Any], derived: Sequence[int]) -> tuple[int, ...]:
    """The layers with a window; `derived`: what the class makes of a configuration that lists none."""
    given = config.get("layer_types")
    return tuple(derived if given is None else [i for i, one in enumerate(given) if "sliding" in str(one)])
