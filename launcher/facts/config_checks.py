"""Whether the sizes of a model configuration can be those of a model. Pure.

Run on a configuration with the class defaults filled in, under the first spelling of each size
(`facts/model.py`), so that no number is computed from a size that no model has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.errors import Problem, RecipeError

_LARGEST = {
    "hidden_size": 10**6,
    "intermediate_size": 10**7,
    "num_hidden_layers": 10**4,
    "num_decoder_layers": 10**4,
    "num_attention_heads": 10**5,
    "num_key_value_heads": 10**5,
    "head_dim": 10**5,
    "vocab_size": 10**8,
    "max_position_embeddings": 10**9,
    "num_local_experts": 10**5,
    "num_experts": 10**5,
    "num_experts_per_tok": 10**5,
    "moe_intermediate_size": 10**7,
    "word_embed_proj_dim": 10**6,
    "relative_attention_num_buckets": 10**6,
    "type_vocab_size": 10**6,
    "num_channels": 10**4,
    "num_labels": 10**8,
}
"""Whole numbers of at least 1, up to some hundred times of what any published model has."""
_SHARES = (
    "attn_pdrop", "attention_probs_dropout_prob", "dropout", "dropout_rate", "hidden_dropout",
    "hidden_dropout_prob", "resid_pdrop", "residual_dropout",
)  # fmt: skip
_PICTURE_SIZES = ("image_size", "patch_size")


def check_config(name: str, config: Mapping[str, Any]) -> None:
    """RecipeError `bad-model-config` with all that is wrong with the sizes of model `name`."""
    wrong = [*_wrong_values(config)]
    wrong = wrong or [*_wrong_relations(config)]
    if wrong:
        raise RecipeError([config_problem(name, message) for message in wrong])


def config_problem(name: str, message: str) -> Problem:
    return Problem(
        "bad-model-config",
        f"the configuration of {name!r} is incomplete or wrong: {message}",
        path="model.config",
        hint="compare its config.json with the published one",
    )


def _wrong_values(config: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(config.get("text_config"), Mapping):
        yield (
            f"its sizes stand in text_config, which a model of type {config.get('model_type')} does not read"
        )
    for key, largest in _LARGEST.items():
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            yield f"{key} is {value!r}, expected a whole number"
        elif not 1 <= value <= largest:
            yield f"{key} is {value}, expected 1 to {largest}"
    yield from _wrong_shares(config)
    for key in _PICTURE_SIZES:
        value = config.get(key)
        parts = value if isinstance(value, list | tuple) else [value]
        if value is not None and (
            len(parts) not in (1, 2) or any(type(part) is not int or not 1 <= part <= 10**5 for part in parts)
        ):
            yield f"{key} is {value!r}, expected one or two whole numbers of pixels"
    for key, value in config.items():
        if isinstance(value, float) and not math.isfinite(value) and key not in _SHARES:
            yield f"{key} is {value}, expected a finite number"


def _wrong_shares(config: Mapping[str, Any]) -> Iterator[str]:
    for key in _SHARES:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            yield f"{key} is {value!r}, expected a number"
        elif not 0 <= value <= 1:  # also for NaN
            yield f"{key} is {value}, expected 0 to 1"


def _wrong_relations(config: Mapping[str, Any]) -> Iterator[str]:
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"):
        if config.get(key) is None:
            yield f"{key} is missing"
            return
    if config.get("vocab_size") is None and "image_size" not in config:
        yield "vocab_size is missing"
    assert isinstance(hidden, int), "checked above"
    assert isinstance(heads, int), "checked above"
    if config.get("head_dim") is None and hidden % heads:
        yield f"hidden_size {hidden} does not divide among {heads} attention heads"
    groups = config.get("num_key_value_heads") or heads
    if groups > heads:
        yield f"num_key_value_heads {groups} is more than num_attention_heads {heads}"
    elif heads % groups:
        yield f"num_attention_heads {heads} does not divide among {groups} key-value heads"
    count = config.get("num_experts") or config.get("num_local_experts")
    chosen = config.get("num_experts_per_tok")
    if count and chosen and chosen > count:
        yield f"num_experts_per_tok {chosen} is more than the {count} experts"
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        yield "layers with and without experts take turns, which is not counted yet"
    picture, patch = (_smallest(config.get(key)) for key in _PICTURE_SIZES)
    if picture and patch and patch > picture:
        yield f"patch_size {patch} is larger than image_size {picture}"


def _smallest(value: Any) -> int:
    """Of a side, or of both; 0 where there is none."""
    return int(min(value)) if isinstance(value, list | tuple) else int(value or 0)
