"""Values of a record, each of which may be missing or of any type, and their texts. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.report.tables import BYTES, amount, gib
from launcher.report.tables import duration as long_duration
from launcher.report.tables import parameters as plain_parameters

_LARGEST = 1e100
"""Beyond every float32: larger values, or values smaller than its reciprocal, cannot be placed on an axis."""
NONE = "\N{EN DASH}"
"""Shown where there is no value."""


def at(value: Any, *keys: str) -> Any:
    """The value under nested keys; None where one of them is missing."""
    for key in keys:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def objects(value: Any) -> list[Mapping[str, Any]]:
    """The objects of a list."""
    return [item for item in listed(value) if isinstance(item, Mapping)]


def number(value: Any) -> float | None:
    """A finite number of a plausible magnitude; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    if not abs(found) < _LARGEST:  # also NaN
        return None
    return found if abs(found) > 1 / _LARGEST else 0.0


def is_number(value: Any) -> bool:
    """Whether it is a number, also one that is not finite."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def amount_of(value: Any) -> float | None:
    """A finite number that is not negative, such as a size."""
    found = number(value)
    return None if found is None or found < 0 else found


def size(value: Any) -> str:
    """Bytes as GiB, and to three digits in a smaller unit below one."""
    found = amount_of(value)
    if found is None:
        return NONE
    return gib(found) if found >= 2**30 else amount(found, BYTES)


def gibibytes(value: Any) -> str:
    """Bytes as a number of GiB, with as many places as five characters hold."""
    found = (number(value) or 0.0) / 2**30
    return f"{found:.0f}" if found >= 1000 else f"{found:.1f}" if found >= 100 else f"{found:.2f}"


def count(value: Any) -> str:
    """A whole number with thousands separators."""
    found = number(value)
    return NONE if found is None else f"{found:,.0f}"


def several(how_many: int, noun: str) -> str:
    """`1 restart`, `2 restarts`."""
    return f"{how_many:,} {noun}{'' if how_many == 1 else 's'}"


def figure(value: Any) -> str:
    """A number to four digits."""
    found = number(value)
    if found is None:
        return "not finite" if is_number(value) else NONE
    return f"{found:,.0f}" if abs(found) >= 10_000 else f"{found:.4g}"


def rate(value: Any) -> str:
    """Tokens or samples per second."""
    found = number(value)
    return NONE if found is None else f"{found:,.0f}" if found >= 100 else f"{found:.1f}"


def parameters(value: Any) -> str:
    """A number of parameters: `135 M`."""
    found = amount_of(value)
    return NONE if found is None else plain_parameters(found)


def duration(value: Any) -> str:
    """Seconds: `3.25 s`, from a minute on `3 min 20 s`."""
    found = amount_of(value)
    if found is None:
        return NONE
    return f"{found:.3g} s" if found < 59.5 else long_duration(found)


def share(value: Any) -> str:
    """A share of 1: `3.1 %`."""
    found = number(value)
    return NONE if found is None else f"{found:.1%}".replace("%", "\N{NO-BREAK SPACE}%")


def apart(predicted: Any, measured: Any) -> str:
    """The difference of a measurement to its prediction: `+3.1 %`."""
    before, after = amount_of(predicted), amount_of(measured)
    if not before or after is None:
        return NONE
    found = after / before - 1
    return f"{found:+.1%}".replace("%", "\N{NO-BREAK SPACE}%").replace("-", "\N{MINUS SIGN}")


def shown(value: Any) -> str:
    """A setting's value as a recipe would have it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def cut(text: str, most: int) -> str:
    """The text, with an ellipsis where it is longer than `most` characters."""
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"
