"""What DeepSpeed's config knows: the shipped table, written by `make tables`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent / "tables" / "deepspeed.json"
Row = Mapping[str, Any]


@cache
def table() -> dict[str, Any]:
    """`version`, `keys`, `removed`, `optimizers`, `schedulers` and `auto`.

    A row of `keys` has `types`; maybe `choices` (in `any_case`), bounds (`above`, `at_least`, `below`,
    `at_most`), `deprecated` (what to write instead), `other_name`. A section's has `keys` and `strict`:
    whether DeepSpeed refuses an unknown one; `open_below` are names that may stand anywhere in it.
    """
    found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def version() -> str:
    """The DeepSpeed that the table was generated from."""
    return str(table()["version"])


def keys() -> dict[str, Row]:
    """The keys of the top level."""
    found: dict[str, Row] = table()["keys"]
    return found


def names(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Every spelling that a section takes -> its row."""
    other = {row["other_name"]: row for row in rows.values() if "other_name" in row}
    return {**other, **rows}


def homes(name: str) -> list[str]:
    """Sections in which a key of this name is known."""
    return [path for path, rows in _sections("", keys()) if name in names(rows)]


def _sections(path: str, rows: Mapping[str, Row]) -> Iterator[tuple[str, Mapping[str, Row]]]:
    yield path, rows
    for key, row in rows.items():
        if "keys" in row and key != "bfloat16":
            yield from _sections(f"{path}.{key}" if path else key, row["keys"])
