"""Which layers of a decoder have sliding-window attention.

Source: configuration classes and `create_causal_mask` calls of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EVERY = {"mistral": 4096, "mixtral": None, "phi3": None, "starcoder2": None, "ministral3": None}
"""Families with the window in every layer -> the configuration class's default for `sliding_window`."""
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "olmo3": 4, "ministral": 0}
"""Families with the window (default 4096) in all layers but every n-th -> n; 0: in all layers.
`layer_types` of the configuration comes first."""
_TWO_SIDED = {"modernbert": (128, 3)}
"""Families whose window has both sides -> the defaults of `local_attention` (positions of both together) and
of `global_attn_every_n_layers`. A row shorter than one side needs no mask."""
_SWITCHED = ("qwen2", "qwen3", "qwen3_moe", "smollm3")
"""Families that have the window only with `use_sliding_window`."""


def sliding_window(model_type: str, config: Mapping[str, Any], layers: int) -> tuple[int, tuple[int, ...]]:
    """(positions of the window, 0: there is none; indices of the layers that have it)."""
    every = tuple(range(layers))
    if model_type in _EVERY:
        return _size(config, _EVERY[model_type]), every
    if model_type in _PATTERNS:
        step = int(config.get("sliding_window_pattern") or _PATTERNS[model_type])
        derived = [i for i in every if not step or (i + 1) % step]
        return _size(config, 4096), _listed(config, derived)
    if model_type in _TWO_SIDED:
        positions, step = _TWO_SIDED[model_type]
        step = int(config.get("global_attn_every_n_layers") or step)
        size = int(config.get("local_attention", positions)) // 2
        return size, _listed(config, [i for i in every if i % step])
    if model_type in _SWITCHED and config.get("use_sliding_window"):
        size = _size(config, None if model_type == "smollm3" else 4096)
        return size, _listed(config, _switched(model_type, config, every))
    return 0, ()


def _size(config: Mapping[str, Any], default: int | None) -> int:
    return int(config.get("sliding_window", default) or 0)


def _listed(config: Mapping[str, Any], derived: list[int]) -> tuple[int, ...]:
    given = config.get("layer_types")
    return tuple(derived if given is None else [i for i, one in enumerate(given) if "sliding" in str(one)])


def _switched(model_type: str, config: Mapping[str, Any], every: tuple[int, ...]) -> list[int]:
    if model_type == "smollm3":  # in the layers without rotary positions
        interval = int(config.get("no_rope_layer_interval") or 4)
        turns = config.get("no_rope_layers") or [(i + 1) % interval for i in every]
        return [i for i in every if not turns[i]]
    first = 0 if model_type == "qwen3_moe" else int(config.get("max_window_layers", 28))
    return [i for i in every if i >= first]
