"""HTML elements that escape every text. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from launcher.report.outcome import harmless

_VOID = frozenset({"meta", "link", "br", "wbr", "img", "input"})
_INLINE = frozenset({"pre", "p", "th", "td", "span", "mark", "code", "b", "li", "dt", "dd", "h1", "h2", "h3"})
"""Elements between whose parts a line end would be visible, or enlarge the file."""
# XML allows no other control characters, and no half of a surrogate pair.
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


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


_SEAMS = re.compile(r"(?<=[._/=:,-])(?=[^\W\d])")
"""Where an identifier or a path may be broken."""


def code(text: object) -> Markup:
    """An identifier or a path; a line that is too narrow for it ends behind a separator."""
    first, *others = _SEAMS.split(str(text))
    return tag("code", first, *(piece for part in others for piece in (tag("wbr"), part)))
