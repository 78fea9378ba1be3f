"""What each model type was shown to do by running it: packed documents, the chunked loss, compiled layers.

benchmarks/coverage.py tries every type on its default configuration, and again with each switch changed;
`make tables` writes models/data/model_types.json from the record. A type that is not there was not tried, or
passed nothing. Each function gives the reason against, empty where there is none.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.files.shipped import facts_file

SAME_MASK = {"flex_attention": "eager"}
"""Kernels that no CPU trains with -> the one whose mask transformers makes from the same function."""
CHUNKED = "chunked"


@dataclass(frozen=True, slots=True)
class RecordedType:
    """What passed for one type."""

    apart: frozenset[str] = frozenset()
    """Kernels under which documents in one row have the logits that each has alone."""
    chunked: bool = False
    """The chunked loss has the value and the gradients of the full one."""
    compiled: bool = False
    """Compiled layers have the loss and the gradients of plain ones."""
    needs: Mapping[str, Mapping[str, list[Any]]] = field(default_factory=dict)
    """Kernel or `chunked` -> dotted key of the configuration -> the values with which it passed."""


@functools.cache
def _found() -> Mapping[str, RecordedType]:
    types = json.loads(facts_file("model_types.json").read_text("utf-8"))["types"]
    return {kind: RecordedType(**{**row, "apart": frozenset(row["apart"])}) for kind, row in types.items()}


def found(model_type: str) -> RecordedType:
    return _found().get(model_type, RecordedType())


def why_not_apart(config: Mapping[str, Any], kernel: str) -> str:
    """Why documents of a model in one row may see each other under an attention kernel."""
    kind, tried = str(config.get("model_type")), SAME_MASK.get(kernel, kernel)
    if tried not in found(kind).apart:
        return f"samples of {kind} in one row were not shown to stay apart under {kernel}"
    other = _untried(config, found(kind).needs.get(tried, {}))
    return f"samples of {kind} in one row were not shown to stay apart with {other}" if other else ""


def why_not_chunked(config: Mapping[str, Any]) -> str:
    """Why the loss needs more of a model than its head's matrix."""
    kind = str(config.get("model_type"))
    if not found(kind).chunked:
        return f"{kind} does more to its logits or its loss than multiply by the head, or was not tried"
    other = _untried(config, found(kind).needs.get(CHUNKED, {}))
    return f"{kind} was not shown to do no more than multiply by the head with {other}" if other else ""


def why_not_compiled(model_type: str) -> str:
    return (
        "" if found(model_type).compiled else f"layers of {model_type} were not tried compiled, or differed"
    )


def _untried(config: Mapping[str, Any], needs: Mapping[str, list[Any]]) -> str:
    """The first `key: value` of a configuration that is not among those that passed."""
    for name, passed in needs.items():
        for value in _values(config, name):
            if not _is_among(value, passed):
                return f"{name}: {json.dumps(value)}"
    return ""


def _values(config: Mapping[str, Any], name: str) -> list[Any]:
    """What a configuration has at a dotted key; none where it leaves the default of its class."""
    *path, last = name.split(".")
    for part in path:
        config = config.get(part) or {}
    value = config.get(last, [])
    return value if isinstance(value, list) else [value]


def _is_among(value: Any, passed: list[Any]) -> bool:
    """null is what the class makes of it, or a switch that is off."""
    if value is None:
        return passed != [True]
    return any(one == value and type(one) is type(value) for one in passed)
