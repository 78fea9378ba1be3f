"""`model.rope_parameters`: rotary positions stretched beyond those that a checkpoint was trained with.

The kinds are those of transformers 5.23 (modeling_rope_utils.py) that change frequencies by a factor. What a
checkpoint's own configuration says of its base and its rotated share stays.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.files.shipped import facts_file

PLACE = "model.rope_parameters"
_OF_ALL = frozenset({"rope_type", "factor", "rope_theta"})
_ORIGINAL = "original_max_position_embeddings"
_YARN = {_ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
_WAVES = frozenset({"low_freq_factor", "high_freq_factor"})
FIELDS: Mapping[str, frozenset[str]] = {
    "linear": _OF_ALL,
    "dynamic": _OF_ALL,
    "yarn": _OF_ALL | _YARN,
    "llama3": _OF_ALL | _WAVES | {_ORIGINAL},
}
"""`rope_type` -> its fields."""
_KEPT = ("rope_theta", "partial_rotary_factor")


@functools.cache
def stretchable_types() -> frozenset[str]:
    """Causal model types whose layers all have the same rotary positions, by a rule that can be chosen."""
    return frozenset(json.loads(facts_file("module_names.json").read_text("utf-8"))["rotary"])


def wrong_rope(asked: Mapping[str, Any]) -> Iterator[Problem]:
    """What is wrong with the key's value, whatever the model."""
    kind = asked.get("rope_type")
    fields = FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        message = f"rope_type is {kind!r}, expected one of {', '.join(FIELDS)}"
        yield Problem("rope-parameters", message, path=f"{PLACE}.rope_type")
        return
    for name in sorted(asked.keys() - fields):
        message = f"{kind} has no such field; it has {', '.join(sorted(fields))}"
        yield Problem("rope-parameters", message, path=f"{PLACE}.{name}")
    for name in ("factor", *(sorted(_WAVES) if kind == "llama3" else ())):
        if not _is_number(asked.get(name)):
            message = f"{kind} needs {name}, a number; it is {asked.get(name)!r}"
            yield Problem("rope-parameters", message, path=f"{PLACE}.{name}")
    if _is_number(asked.get("factor")) and asked["factor"] < 1:
        yield Problem("rope-parameters", "a factor below 1 shortens the context", path=f"{PLACE}.factor")
    waves = [asked.get(name) for name in ("low_freq_factor", "high_freq_factor")]
    if kind == "llama3" and all(map(_is_number, waves)) and waves[0] >= waves[1]:  # type: ignore[operator]
        message = "high_freq_factor has to be larger than low_freq_factor"
        yield Problem("rope-parameters", message, path=f"{PLACE}.high_freq_factor")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def stretched(config: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """A language model's configuration with these positions; of one that has them already, the same.

    RecipeError where its class has no such positions, or others were stretched before.
    """
    kind, rope = str(config.get("model_type")), _rope_of(config)
    if kind not in stretchable_types() or any(isinstance(part, Mapping) for part in rope.values()):
        message = f"{kind} has no rotary positions that are the same in all layers"
        hint = "take the key out, and a data.max_length within the model's positions"
        raise RecipeError(Problem("rope-type", message, path=PLACE, hint=hint))
    old = rope.get("rope_type", rope.get("type", "default"))
    if old not in ("default", asked["rope_type"]):
        message = f"{asked['rope_type']} would replace {old}, by which the checkpoint is stretched already"
        hint = f"rope_type: {old} with a larger factor than {rope.get('factor')}"
        raise RecipeError(Problem("rope-type", message, path=f"{PLACE}.rope_type", hint=hint))
    native = _native(config, rope, asked)
    new = {name: rope[name] for name in _KEPT if name in rope} | dict(asked)
    if asked["rope_type"] in ("yarn", "llama3"):
        new[_ORIGINAL] = native
    longest = int(native * asked["factor"])
    # The frequencies of `dynamic` are relative to this length, and grow with that of a row.
    positions = native if asked["rope_type"] == "dynamic" else longest
    rest = {name: value for name, value in config.items() if name not in ("rope_scaling", _ORIGINAL)}
    return {**rest, "rope_parameters": new, "max_position_embeddings": positions}


def longest_row(config: Mapping[str, Any], positions: int) -> int:
    """Tokens that a row may have, of a model with so many positions."""
    rope = _rope_of(config)
    dynamic = rope.get("rope_type", rope.get("type")) == "dynamic"
    return int(positions * rope["factor"]) if dynamic else positions


def _rope_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _native(config: Mapping[str, Any], rope: Mapping[str, Any], asked: Mapping[str, Any]) -> int:
    """The positions before any stretching."""
    for place in (asked, rope, config):
        if isinstance(place.get(_ORIGINAL), int):
            return int(place[_ORIGINAL])
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int):
        message = "the configuration does not say how many positions the model has"
        raise RecipeError(Problem("rope-type", message, path="model.name_or_path"))
    return round(positions / rope["factor"]) if rope.get("rope_type") == "linear" else positions
