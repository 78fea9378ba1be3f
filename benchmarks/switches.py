"""Which values of a configuration the findings of coverage.py about its model type depend on.

The coverage tries the default configuration of a class; a published one may have another kind of layer, a
window, or logits that are scaled. What can be changed is changed here, one key at a time, and tried again.
What no rule changes is recorded with the value that was tried.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Check = Callable[[Mapping[str, Any]], object]
"""Raises where a configuration does not pass."""
HARMLESS = re.compile(
    r"_token_id$|_token_index$|_ids?$|_size$|_dim$|_rank$|_heads$|_groups?$|dtype$|act$|activation|_tokens$"
    r"|^rope|rope_|^use_cache$|^tie_|_bias$|^bias$|_range$|_std$|_eps$|^model_type$|^architectures$|label"
    r"|^output_(?!router)|^return_dict|^problem_type$|^chunk_size_feed|^tokenizer|^pretraining_tp$|^init_"
    r"|^attn_implementation|^keys_to_ignore|^vision_|^audio_|^quantization|^transformers|^_|^num_|^n_|^max_"
    r"|intermediate|^is_encoder_decoder$|^summary_|^mlp_|^mtp_|expert|top_?k|moe_|^no_rope_layers$|_fp32"
)
"""Keys of sizes, of rounding, of experts (which take tokens one by one), of rotations (positions start again
with each document), and of what a training step does not use."""
ACTING: Mapping[str, list[Any]] = {
    "window": [5], "chunk": [8], "cap": [5.0], "clip": [0.5], "scal": [0.3], "use_": [True, "vision"],
}  # fmt: skip
"""Part of a key without a value by default -> values under which it acts."""
KINDS = ("full_attention", "sliding_attention")
TOGETHER: Mapping[str, Mapping[str, Any]] = {
    "enable_moe_block": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "layer_types": {"sliding_window": 5, "use_sliding_window": True},
    "use_sliding_window": {"sliding_window": 5},
}
"""What else a key needs to act."""


def switches(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, list[Any], list[Any]]]:
    """(Dotted key, the values that the configuration has, other values to try.)"""
    for key, value in config.items():
        name = prefix + key
        if HARMLESS.search(key):
            continue
        if isinstance(value, Mapping):
            yield from switches(value, name + ".")
        elif isinstance(value, bool):
            yield name, [value], [not value]
        elif isinstance(value, str):
            yield name, [value], []
        elif value is None:
            yield name, [None], next((acting for part, acting in ACTING.items() if part in key), [])
        elif isinstance(value, list) and value and all(isinstance(one, str) for one in value):
            kinds = [kind for kind in KINDS if key == "layer_types" and kind not in value]
            yield name, sorted(set(value)), kinds


def needs(config: Mapping[str, Any], check: Check) -> dict[str, list[Any]]:
    """Dotted key -> the values with which the check passes, of keys with which it may not pass.

    Of a list of names, such as the kinds of layers: the names that it may hold.
    """
    found = {}
    for name, values, others in switches(config):
        passed = [other for other in others if _passes(_with(config, name, other), check)]
        is_list = isinstance(_at(config, name), list)
        if is_list or not others or passed != others:
            found[name] = values + passed
    return found


def _passes(config: Mapping[str, Any], check: Check) -> bool:
    try:
        check(config)
    except Exception:  # a model's code may raise anything
        return False
    return True


def _at(config: Mapping[str, Any], name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = value[part]
    return value


def _with(config: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The configuration with another value; of a list, as its last entry."""
    changed = copy.deepcopy(dict(config))
    path, _, last = name.rpartition(".")
    inside = _at(changed, path) if path else changed
    more = TOGETHER.get(last, {})
    inside.update({key: value for key, value in more.items() if key in inside and not inside[key]})
    inside[last] = [*inside[last][:-1], value] if isinstance(inside[last], list) else value
    return changed
