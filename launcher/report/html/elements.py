"""HTML elements that escape every text, and values of any type as text. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from launcher.report.outcome import harmless
from launcher.report.tables import BYTES, amount, gib
from launcher.report.tables import duration as long_duration
from launcher.report.tables import parameters as plain_parameters

_VOID = frozenset({"meta", "link", "br", "wbr", "img", "input"})
_INLINE = frozenset({"pre", "p", "th", "td", "span", "mark", "code", "b", "li", "dt", "dd", "h1", "h2", "h3"})
"""Elements between whose parts a line end would be visible, or enlarge the file."""
# XML allows no other control characters, and no half of a surrogate pair.
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LARGEST = 1e100
"""Beyond every float32: larger values, or values smaller than its reciprocal, cannot be placed on an axis."""
NONE = "\N{EN DASH}"
"""Shown where there is no value."""


class Markup(str):
    """Text that is markup already: `tag` escapes all other text."""

    __slots__ = ()


def escaped(text: object) -> Markup:
    """The text for elements and attributes; control and bidirectional characters become visible escapes."""
    return Markup(escape(_NOT_XML.sub("\N{REPLACEMENT CHARACTER}", harmless(str(text)))))


def tag(name: str, /, *inside: object, **attributes: object) -> Markup:
    """One element. A name loses its trailing `_`, an inner `_` becomes `-`; None is skipped."""
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(_short(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{pairs}/>")
    between = "" if name in _INLINE else "\n"
    parts = [part if isinstance(part, Markup) else escaped(part) for part in inside if part is not None]
    return Markup(f"<{name}{pairs}>{between.join(parts)}</{name}>")


def _short(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def joined(parts: Iterable[Markup], between: str = "\n") -> Markup:
    return Markup(between.join(parts))


def table(
    name: str, head: Sequence[object], rows: Iterable[Sequence[object]], kind: str | None = None
) -> Markup:
    """A table that scrolls inside the page where it is wider; its first cells are row headings.

    name: for screen readers. kind: its class; `numbers` aligns all but the first column to the right.
    """
    top = tag("tr", *(tag("th", cell, scope="col") for cell in head))
    body = [
        tag("tr", tag("th", first, scope="row"), *(tag("td", cell) for cell in rest)) for first, *rest in rows
    ]
    caption = tag("caption", tag("span", name, class_="hidden"))
    inside = tag("table", caption, tag("thead", top), tag("tbody", *body), class_=kind)
    return tag("div", inside, class_="wide", role="region", aria_label=name, tabindex="0")


def pairs(rows: Iterable[tuple[str, object]]) -> Markup:
    """Names with their values."""
    cells = [part for name, value in rows for part in (tag("dt", name), tag("dd", value))]
    return tag("dl", *cells, class_="pairs")


def bullets(items: Iterable[object], kind: str = "plain") -> Markup:
    return tag("ul", *(tag("li", item) for item in items), class_=kind)


def details(summary: str, *inside: object, note: str = "") -> Markup:
    """A part that is opened on request, and always printed."""
    head = tag("summary", summary, tag("span", note, class_="soft") if note else None)
    return tag("details", head, *inside)


_SEAMS = re.compile(r"(?<=[._/=:,-])(?=[^\W\d])")
"""Where an identifier or a path may be broken."""


def code(text: object) -> Markup:
    """An identifier or a path; a line that is too narrow for it ends behind a separator."""
    first, *others = _SEAMS.split(str(text))
    return tag("code", first, *(piece for part in others for piece in (tag("wbr"), part)))


def block(text: object, name: str) -> Markup:
    """Preformatted lines, wrapped at the page's width."""
    return tag("pre", tag("code", text), tabindex="0", role="region", aria_label=name)


# --- values of a record: each may be missing, or of any type


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
        return NONE
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


def apart(predicted: Any, measured: Any) -> str:
    """The difference of a measurement to its prediction: `+3.1 %`."""
    before, after = amount_of(predicted), amount_of(measured)
    if not before or after is None:
        return NONE
    share = after / before - 1
    return f"{share:+.1%}".replace("%", "\N{NO-BREAK SPACE}%").replace("-", "\N{MINUS SIGN}")


def shown(value: Any) -> str:
    """A setting's value as a recipe would have it."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def cut(text: str, most: int) -> str:
    """The text, with an ellipsis where it is longer than `most` characters."""
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"
