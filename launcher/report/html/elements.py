"""Markup that cannot be broken out of: every text that is put into an element is escaped. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launcher.report.outcome import harmless
from launcher.report.svg import text_of

_VOID = frozenset({"meta", "br"})
_ALONE = frozenset({"pre", "p", "th", "td", "span", "mark", "code", "b", "li", "dt", "dd", "h1", "h2", "h3"})
"""Elements whose parts stand side by side: a line end between them would be seen, or grow the file."""


class Markup(str):
    """Text that is markup already: `tag` escapes all other text."""

    __slots__ = ()


def words(text: object) -> Markup:
    """Any text, escaped for elements and attributes; what would act on a reader's screen is an escape."""
    return Markup(text_of(harmless(str(text))))


def tag(name: str, /, *inside: object, **attributes: object) -> Markup:
    """One element. A name loses its trailing `_`, an inner `_` becomes `-`; None is skipped, of both."""
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{words(_short(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{pairs}/>")
    between = "" if name in _ALONE else "\n"
    parts = [part if isinstance(part, Markup) else words(part) for part in inside if part is not None]
    return Markup(f"<{name}{pairs}>{between.join(parts)}</{name}>")


def _short(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def joined(parts: Iterable[Markup], between: str = "\n") -> Markup:
    return Markup(between.join(parts))


def table(
    name: str, head: Sequence[object], rows: Iterable[Sequence[object]], kind: str | None = None
) -> Markup:
    """A table that scrolls inside the page where it is wider; its first cells head their rows.

    name: said to those who do not see where the table stands. kind: its class; `numbers` aligns all but
    the first column to the right.
    """
    top = tag("tr", *(tag("th", cell, scope="col") for cell in head))
    body = [
        tag("tr", tag("th", first, scope="row"), *(tag("td", cell) for cell in rest)) for first, *rest in rows
    ]
    caption = tag("caption", tag("span", name, class_="hidden"))
    inside = tag("table", caption, tag("thead", top), tag("tbody", *body), class_=kind)
    return tag("div", inside, class_="wide", role="region", aria_label=name, tabindex="0")


def details(summary: str, *inside: object, note: str = "") -> Markup:
    """What is shown when asked for; a printed page shows it."""
    head = tag("summary", summary, tag("span", note, class_="soft") if note else None)
    return tag("details", head, *inside)


def code(text: object) -> Markup:
    return tag("code", text)


def block(text: object, name: str) -> Markup:
    """Lines as they are, wrapped where they are longer than the page."""
    return tag("pre", tag("code", text), tabindex="0", role="region", aria_label=name)
