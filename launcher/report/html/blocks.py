"""Sections as HTML elements: every text is escaped, and shortened where it would fill a page. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.report import sections
from launcher.report.html import charts
from launcher.report.html.elements import Markup, code, escaped, joined, tag
from launcher.report.sections import Block, Cell, Code, Figure, Inline, Part, Row, Section, line
from launcher.report.values import cut

_CELL, _LISTING = 4000, 40_000
"""Characters shown of a cell, of a file."""
_NOTES = 50
_CHARTS = {
    "loss": "Loss",
    "eval_loss": "Held-out loss",
    "learning_rate": "Learning rate",
    "tokens_per_second": "Tokens per second",
    "grad_norm": "Gradient norm",
}


def drawn(section: Section) -> Markup:
    """The section with its heading."""
    heading, name = tag("h2", section.title, id=f"{section.id}-heading"), f"{section.id}-heading"
    return tag("section", heading, *map(drawn_block, section.blocks), id=section.id, aria_labelledby=name)


def drawn_block(given: Block) -> Markup:
    match given:
        case sections.Rows():
            cells = [
                part for row in given.rows for part in (tag("dt", row.name), tag("dd", _inline(row.parts)))
            ]
            return tag("dl", *cells, class_="pairs")
        case sections.Table():
            return joined([*_heading(given.heading), _table(given)])
        case sections.Notes():
            items = (tag("li", _inline(item)) for item in given.items[:_NOTES])
            return tag("ul", *items, class_="plain small")
        case sections.Text():
            kind = {"soft": "soft small", "": None}.get(given.kind, given.kind)
            text = _inline(given.parts)
            return tag("h3", text) if given.kind == "heading" else tag("p", text, class_=kind)
        case sections.Listing():
            text = tag("code", cut(given.text, _LISTING))
            return tag("pre", text, tabindex="0", role="region", aria_label=given.name)
        case sections.Folded():
            note = tag("span", given.note, class_="soft") if given.note else None
            return tag("details", tag("summary", given.summary, note), drawn_block(given.block))
        case sections.Group():
            parts = [drawn_block(one) for one in given.blocks]
            is_card = given.kind == "card bad"
            return tag("div", *(part if is_card else tag("div", part) for part in parts), class_=given.kind)
        case sections.Sample():
            return _sample(given)
        case sections.Curves() | sections.Bars():
            return _curves(given) if isinstance(given, sections.Curves) else _bars(given)
        case sections.Controls():
            return Markup(given.markup)


def tiles(rows: Sequence[Row]) -> Markup:
    """The most important rows, large."""
    found = []
    for row in rows:
        if row.is_main:
            name, note = row.name[:1].upper() + row.name[1:], line(row.note)
            parts = [
                tag("dt", name),
                tag("dd", line(row.value)),
                tag("dd", note, class_="note") if note else None,
            ]
            found.append(tag("div", *parts))
    return tag("dl", *found, class_="tiles")


def _inline(parts: Inline) -> Markup:
    return joined(map(_atom, parts), "")


def _atom(part: str | Figure) -> Markup:
    text = cut(str(part), _CELL)
    return (
        code(text)
        if isinstance(part, Code)
        else charts.swatched(part)
        if isinstance(part, Part)
        else escaped(text)
    )


def _cell(cell: Cell) -> Markup:
    if isinstance(cell, str | Figure):
        return _atom(cell)
    first, *others = [_inline(parts) for parts in cell if parts]
    return joined([first, *(tag("span", each, class_="soft small") for each in others)], tag("br"))


def _table(given: sections.Table) -> Markup:
    """A table that scrolls inside the page where it is wider; its first cells are row headings."""
    top = tag("tr", *(tag("th", cell, scope="col") for cell in given.head))
    body = [
        tag("tr", tag("th", _cell(first), scope="row"), *(tag("td", _cell(cell)) for cell in rest))
        for first, *rest in given.rows
    ]
    caption = tag("caption", tag("span", given.name, class_="hidden"))
    inside = tag("table", caption, tag("thead", top), tag("tbody", *body), class_=given.kind or None)
    return tag("div", inside, class_="wide", role="region", aria_label=given.name, tabindex="0")


def _heading(text: str) -> list[Markup]:
    return [tag("h3", text)] if text else []


def _sample(given: sections.Sample) -> Markup:
    caption = tag(
        "figcaption", tag("span", given.name, class_="head"), tag("span", given.about, class_="soft small")
    )
    pieces = (tag("mark" if is_target else "span", text) for text, is_target in given.pieces)
    text = tag("pre", *pieces, class_="sample", tabindex="0", role="region", aria_label=given.name)
    images = [
        tag("li", tag("img", src=source, alt=about.partition(",")[0]) if source else None, tag("span", about))
        for source, about in given.images
    ]
    return tag("figure", caption, tag("ul", *images, class_="thumbs") if images else None, text)


def _curves(given: sections.Curves) -> Markup:
    """One chart per column of the metrics; without values only that of the loss."""
    parts = []
    for column, title in _CHARTS.items():
        lines: Sequence[sections.Curve] = given.lines.get(column, ())
        if column == "loss" or any(line.found for line in lines):
            is_amount = column in ("learning_rate", "tokens_per_second")
            figure = charts.curves(
                title, lines, from_zero=is_amount, spread=not is_amount, events=given.events
            )
            parts.append(tag("div", figure, class_="first") if column == "loss" else figure)
    return tag("div", *parts, class_="charts")


def _bars(given: sections.Bars) -> Markup:
    chart = charts.stacked_bars(given.title, given.bars, unit=given.unit, limit=given.limit, mark=given.mark)
    legend = [charts.legend(given.bars)] if given.legend else []
    return joined([*_heading(given.heading), chart, *legend])
