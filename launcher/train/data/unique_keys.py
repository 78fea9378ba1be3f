"""JSON of data files, of which nothing may vanish: a key twice in an object, rows under several keys."""

from __future__ import annotations

import json
from typing import Any

TWICE_HINT = "which of the two values is meant? remove the other one"


class KeyTwiceError(ValueError):
    """An object has a key twice, of which Python's json keeps the last."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise KeyTwiceError(f"an object has the key {twice!r} twice")
    return found


ROWS = json.JSONDecoder(object_pairs_hook=_object)
"""Raises KeyTwiceError, JSONDecodeError and RecursionError."""


def keys_alike(value: Any, rows: list[Any]) -> list[str]:
    """Keys of an object that hold rows with a column of `rows`, those of `rows` included."""
    return [
        key
        for key, other in (value.items() if isinstance(value, dict) else ())
        if isinstance(other, list)
        and any(isinstance(row, dict) and row.keys() & rows[0].keys() for row in other[:1])
    ]
