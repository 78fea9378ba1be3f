"""The layers with a sliding window, as planned, are those of transformers' configurations."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.models.families import sliding_window

transformers = pytest.importorskip("transformers")

LAYERS = 8
ON = {"use_sliding_window": True, "sliding_window": 128}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("llama", "mistral", "mixtral", "phi3", "starcoder2", "gemma2", "gemma3_text")),
    *((name, {}) for name in ("olmo3", "ministral", "ministral3", "qwen2", "qwen3", "qwen3_moe", "smollm3")),
    *((name, {"sliding_window": 128}) for name in ("mistral", "phi3", "olmo3", "ministral3", "qwen2")),
    *((name, {"sliding_window": None}) for name in ("mistral", "ministral")),
    *((name, {**ON, "max_window_layers": 3}) for name in ("qwen2", "qwen3")),
    ("qwen3_moe", ON),
    ("smollm3", ON),
    ("smollm3", {**ON, "no_rope_layers": [1, 0, 1, 1, 0, 1, 1, 1]}),
    ("gemma3_text", {"sliding_window_pattern": 4}),
    ("gemma2", {"layer_types": ["full_attention", "sliding_attention"] * 4}),
]


@pytest.mark.parametrize(("model_type", "given"), CASES)
def test_the_layers_with_a_window_are_those_of_transformers(model_type: str, given: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(model_type, num_hidden_layers=LAYERS, **given)
    window = getattr(config, "sliding_window", None) or 0
    types = getattr(config, "layer_types", None)
    layers = [i for i in range(LAYERS) if window and (types is None or types[i] == "sliding_attention")]
    found, indices = sliding_window(model_type, given, LAYERS)
    assert (found if indices else 0) == (window if layers else 0)
    assert (list(indices) if found else []) == layers
