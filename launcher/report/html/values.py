"""Values of a record that may be missing or of any type, as numbers and as words. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.report.live import duration as words
from launcher.report.svg import BYTES, amount
from launcher.report.tables import gib

_LARGEST = 1e100
"""Beyond every float32: what is larger, or smaller than its reciprocal, leaves an axis no room to compute."""
NONE = "\N{EN DASH}"
"""Stands where there is no value."""


def at(value: Any, *keys: str) -> Any:
    """What lies below these keys; None where one of them is missing."""
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
    """A finite number of a magnitude that a run may have; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    if not abs(found) < _LARGEST:  # not a number, either
        return None
    return found if abs(found) > 1 / _LARGEST else 0.0


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


def count(value: Any) -> str:
    """A whole number with its thousands apart."""
    found = number(value)
    return NONE if found is None else f"{found:,.0f}"


def several(number_of: int, noun: str) -> str:
    """`1 restart`, `2 restarts`."""
    return f"{number_of:,} {noun}{'' if number_of == 1 else 's'}"


def figure(value: Any) -> str:
    """A number to four digits."""
    found = number(value)
    if found is None:
        return NONE
    return f"{found:,.0f}" if abs(found) >= 10_000 else f"{found:.4g}"


def rate(value: Any) -> str:
    """Tokens, or samples, in a second."""
    found = number(value)
    return NONE if found is None else f"{found:,.0f}" if found >= 100 else f"{found:.1f}"


def parameters(value: Any) -> str:
    """How many parameters, in words: `135 M`."""
    found = amount_of(value)
    if found is None:
        return NONE
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if found >= unit:
            return f"{found / unit:.3g} {name}"
    return f"{found:.0f}"


def duration(value: Any) -> str:
    """Seconds in words: `3.25 s`, and above a minute as the line of a run has them."""
    found = amount_of(value)
    if found is None:
        return NONE
    return f"{found:.3g} s" if found < 59.5 else words(found)


def span(low: Any, high: Any) -> str:
    """Two durations in the unit of the longer one: `2.5 to 6.4 h`."""
    first, last = amount_of(low), amount_of(high)
    if first is None or last is None:
        return NONE
    unit, name = next(
        ((s, n) for s, n in ((86400, "days"), (3600, "h"), (60, "min")) if last >= 2 * s), (1, "s")
    )
    ends = [
        f"{value / unit:.2g}" if value / unit < 100 else f"{value / unit:,.0f}" for value in (first, last)
    ]
    return f"{' to '.join(dict.fromkeys(ends))} {name}"


def apart(predicted: Any, measured: Any) -> str:
    """By how much a measurement lies above or below what was predicted: `+3.1 %`."""
    before, after = amount_of(predicted), amount_of(measured)
    if not before or after is None:
        return NONE
    share = after / before - 1
    return f"{share:+.1%}".replace("%", "\N{NO-BREAK SPACE}%").replace("-", "\N{MINUS SIGN}")


def said(value: Any) -> str:
    """A setting's value as a recipe would have it."""
    if value is None:
        return "none"
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
