"""How peft matches the names and patterns of an adapter's fields with a model's modules. Pure.

As read in peft 0.21 (tuners/tuners_utils.py `check_target_module_exists`; utils/other.py `get_pattern_key`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.errors import Problem


def matching(target: str | Sequence[str], names: Sequence[str]) -> bool:
    """Whether a pattern, or one of the listed names, matches one of the modules."""
    return any(matches(target, name) for name in names)


def matches(target: str | Sequence[str], path: str) -> bool:
    """Whether a pattern matches the whole path, or one of the listed names is the path or its end."""
    if isinstance(target, str):
        return re.fullmatch(target, path) is not None
    return any(path == name or path.endswith("." + name) for name in target)


def named_by(key: str, name: str) -> bool:
    """peft's `get_pattern_key`."""
    return re.match(rf"(.*\.)?({key})$", name) is not None


def layer_of(name: str, patterns: Sequence[str]) -> int | None:
    """The index of the layer that a module lies in, by the first of the patterns that has one."""
    prefix = r"(?:^|.*?\.)" if patterns else r".*?\."
    for pattern in patterns or (r"[^.]*",):
        if match := re.match(rf"{prefix}{pattern}\.(?P<index>\d+)\.", name):
            return int(match["index"])
    return None


def in_layers(name: str, fields: Mapping[str, Any]) -> bool:
    """Whether a module lies in the layers that are chosen; all are, where none are named."""
    layers, patterns = fields.get("layers_to_transform"), fields.get("layers_pattern") or ()
    if layers in (None, []):
        return True
    index = layer_of(name, [patterns] if isinstance(patterns, str) else patterns)
    return index is not None and index in ([layers] if isinstance(layers, int) else layers)


def idle_pattern(field: str, key: str) -> Problem:
    """A key of rank_pattern or alpha_pattern that no adapted module has."""
    message = f"{key!r} matches no module that is adapted, and peft would ignore it"
    return Problem("target-modules-missing", message, path=f"adapter.{field}")


def idle_choices(names: Sequence[str], fields: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(field, value) of each exclusion, layer and pattern of layers that no module of these names has."""
    excluded, layers, given = (
        fields.get(field) for field in ("exclude_modules", "layers_to_transform", "layers_pattern")
    )
    every = [excluded] if isinstance(excluded, str) else excluded or ()
    idle: list[tuple[str, Any]] = [
        ("exclude_modules", one)
        for one in every
        if not matching(one if isinstance(excluded, str) else [one], [name for name in names if name])
    ]
    chosen = [layers] if isinstance(layers, int) else layers or ()
    if not chosen:
        return idle
    patterns = [given] if isinstance(given, str) else given or ()
    found = {one: {i for name in names if (i := layer_of(name, [one])) is not None} for one in patterns}
    there = set().union(*found.values()) if patterns else {layer_of(name, ()) for name in names}
    idle += [("layers_pattern", one) for one, indices in found.items() if not indices]
    return idle + [("layers_to_transform", layer) for layer in chosen if layer not in there]


def idle_choice(field: str, value: Any) -> Problem:
    """An exclusion, a layer or a pattern of layers that the model does not have."""
    what = {"exclude_modules": "no module", "layers_to_transform": "no layer", "layers_pattern": "no layers"}
    message = f"{value!r} matches {what[field]} of the model, and peft would ignore it"
    return Problem("target-modules-missing", message, path=f"adapter.{field}")
