"""Plots as inline SVG, and the page that holds them: one file, no scripts, nothing loaded. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.report.svg import (
    BYTES,
    COLOURS,
    Scale,
    amount,
    divisor,
    element,
    fitted,
    label,
    log_ticks,
    round_ticks,
    shape,
    svg,
    text_of,
    tooltip,
    width_of,
)

WIDTH = 920.0
ROW = 30.0
LABELS = 210.0
"""Pixels that the names of the rows take."""
_DARK = {COLOURS[0]}
"""Colours on which white text reads better."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of stacked parts, in their order."""

    label: str
    parts: Mapping[str, float]
    """Component -> value; empty where there is nothing to show but `note`."""
    marker: float | None = None
    """Where the row's mark stands, e.g. what was measured."""
    note: str = ""
    """Said behind the total, or in place of it."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Point:
    """One comparison."""

    label: str
    measured: float
    predicted: float
    group: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """One line over the plot's steps; None is a gap."""

    label: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page: heading, paragraphs, pictures of this module, a table with a header row."""

    heading: str
    paragraphs: Sequence[str] = ()
    plots: Sequence[str] = ()
    table: Sequence[Sequence[str]] = field(default=())


def stacked_bars(
    title: str,
    bars: Sequence[Bar],
    *,
    unit: str = BYTES,
    marker: str = "measured",
    limit: tuple[str, float] | None = None,
) -> str:
    """Horizontal bars of components, with totals, and a mark a row.

    marker: the name of what `Bar.marker` shows. limit: name and value of a line through all rows, e.g. the
    device's size.
    """
    _check([*(v for bar in bars for v in bar.parts.values()), *_marks(bars, limit)])
    names = list(dict.fromkeys(name for bar in bars for name in bar.parts))
    ends = [max(bar.total, bar.marker or 0.0) for bar in bars]
    high = max([*ends, limit[1] if limit else 0.0]) or 1.0
    marked = any(bar.marker is not None for bar in bars)
    shown = [n for n in names if any(bar.parts.get(n) for bar in bars)] if len(names) > 1 or marked else []
    legend, top = _legend(names, shown, marker if marked else "")
    bottom = top + ROW * max(1, len(bars))
    scale = Scale(0.0, high, LABELS, WIDTH - 190)
    parts = [*legend, *_value_axis(scale, unit, top, bottom)]
    for index, bar in enumerate(bars):
        parts += _bar(bar, scale, top + ROW * index, names, unit, marker)
    if limit:
        x, name = scale.at(limit[1]), f"{limit[0]} {amount(limit[1], unit)}"
        parts.append(element("line", x1=x, x2=x, y1=top - 4, y2=bottom, class_="limit"))
        parts.append(label(name, x - 5, bottom + 34, anchor="end"))
    if not bars:
        parts.append(label("nothing to show", LABELS, top + 18))
    described = "; ".join(_said(bar, unit, marker) for bar in bars)
    return svg(title, described, WIDTH, bottom + 44, [label(title, 8, 20, kind="head"), *parts])


def _marks(bars: Sequence[Bar], limit: tuple[str, float] | None) -> list[float]:
    return [*(b.marker for b in bars if b.marker is not None), *([limit[1]] if limit else [])]


def _check(values: Iterable[float]) -> None:
    """ValueError for what has no place on an axis of amounts."""
    for value in values:
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{value} cannot be drawn: amounts are finite and not negative")


def _legend(names: Sequence[str], shown: Sequence[str], marker: str) -> tuple[list[str], float]:
    """Its markup, and the y below it; the place in `names` gives the colour."""
    parts, x, y = [], 8.0, 44.0
    for number, name in enumerate([*shown, *([marker] if marker else [])]):
        width = 34 + width_of(name)
        if x + width > WIDTH:
            x, y = 8.0, y + 20
        if number < len(shown):
            colour = COLOURS[names.index(name) % len(COLOURS)]
            parts.append(element("rect", x=x, y=y - 10, width=12, height=12, fill=colour, class_="part"))
        else:
            parts.append(_mark(x + 6, y - 12, y + 4))
        parts.append(label(name, x + 18, y))
        x += width
    return parts, y + 18


def _mark(x: float, top: float, bottom: float, words: str = "") -> str:
    """A vertical line that is seen over any colour."""
    lines = (element("line", x1=x, x2=x, y1=top, y2=bottom, class_=kind) for kind in ("halo", "mark"))
    return element("g", "".join(lines) + (tooltip(words) if words else ""))


def _value_axis(scale: Scale, unit: str, top: float, bottom: float) -> list[str]:
    """Grid lines with their numbers below, and the unit."""
    parts = []
    for value, text in round_ticks(scale.low, scale.high, unit):
        x = scale.at(value)
        parts.append(element("line", x1=x, x2=x, y1=top - 4, y2=bottom, class_="grid"))
        parts.append(label(text, x, bottom + 16, anchor="middle", kind="soft"))
    parts.append(label(divisor(scale.high, unit)[1], scale.end + 12, bottom + 16, kind="soft"))
    return parts


def _bar(bar: Bar, scale: Scale, y: float, names: Sequence[str], unit: str, marker: str) -> list[str]:
    name = element("g", tooltip(bar.label) + label(fitted(bar.label, LABELS - 20), 8, y + 18))
    parts, start = [name], 0.0
    for part, value in bar.parts.items():
        left, width = scale.at(start), scale.at(start + value) - scale.at(start)
        start += value
        if width <= 0:
            continue
        colour = COLOURS[names.index(part) % len(COLOURS)]
        words = f"{bar.label}: {part} {amount(value, unit)}"
        parts.append(
            element("rect", tooltip(words), x=left, y=y + 3, width=width, height=ROW - 8, fill=colour,
                    class_="part")
        )  # fmt: skip
        if len(names) > 1 and width > width_of(part) + 8:
            kind = "on-dark" if colour in _DARK else "on-light"
            parts.append(label(part, left + width / 2, y + 18, anchor="middle", kind=kind))
    if bar.marker is not None:
        words = f"{bar.label}: {marker} {amount(bar.marker, unit)}"
        parts.append(_mark(scale.at(bar.marker), y, y + ROW - 2, words))
    end = scale.at(max(start, bar.marker or 0.0)) + 8
    said = " ".join([*([amount(bar.total, unit)] if bar.parts else []), bar.note]).strip()
    return [*parts, element("g", tooltip(said) + label(fitted(said, WIDTH - end), end, y + 18))]


def _said(bar: Bar, unit: str, marker: str) -> str:
    """A row in words, for those who do not see it."""
    parts = ", ".join(f"{name} {amount(value, unit)}" for name, value in bar.parts.items() if value)
    mark = "" if bar.marker is None else f", {marker} {amount(bar.marker, unit)}"
    total = f"{amount(bar.total, unit)} ({parts})" if bar.parts else "no value"
    return f"{bar.label}: {total}{mark} {bar.note}".rstrip()


def scatter(
    title: str, points: Sequence[Point], *, unit: str = BYTES, band: float | None = None, log: bool = True
) -> str:
    """Predicted over measured, with the line of equality; `band`: a share above and below it, shaded."""
    _check([v for p in points for v in (p.measured, p.predicted)])
    values = [v for p in points for v in (p.measured, p.predicted) if v > 0 or not log]
    if len(values) < 2 * len(points):
        raise ValueError("0 has no place on a logarithmic axis")
    low, high = _range(values, log=log)
    groups = list(dict.fromkeys(p.group for p in points))
    named = [group for group in groups if group]
    left, right, top, bottom = 80.0, 620.0, 40.0, 580.0
    x, y = Scale(low, high, left, right, log), Scale(low, high, bottom, top, log)
    parts = [label(title, 8, 20, kind="head"), *_both_axes(x, y, unit), *_equality(x, y, band)]
    for point in points:
        off = f"{point.predicted / point.measured - 1:+.1%}" if point.measured else "no measurement"
        words = (
            f"{point.label}: measured {amount(point.measured, unit)}, "
            f"predicted {amount(point.predicted, unit)} ({off})"
        )
        number = groups.index(point.group)
        parts.append(shape(number, x.at(point.measured), y.at(point.predicted), 5.0, tooltip(words)))
    for row, group in enumerate(named):
        parts.append(shape(groups.index(group), right + 30, top + 12 + 22 * row))
        parts.append(label(fitted(group, WIDTH - right - 50), right + 42, top + 16 + 22 * row))
    described = "; ".join(
        f"{p.label}: measured {amount(p.measured, unit)}, predicted {amount(p.predicted, unit)}"
        for p in points
    )
    return svg(title, described, WIDTH, bottom + 50, parts)


def _range(values: Sequence[float], *, log: bool) -> tuple[float, float]:
    """Both axes' ends, with some air."""
    low, high = min(values, default=1.0), max(values, default=10.0)
    if log:
        return low / 1.3, high * 1.3
    return 0.0, (high or 1.0) * 1.05


def _both_axes(x: Scale, y: Scale, unit: str) -> list[str]:
    ticks = (log_ticks if x.log else round_ticks)(x.low, x.high, unit)
    parts = []
    for value, text in ticks:
        across, up = x.at(value), y.at(value)
        parts += [
            element("line", x1=across, x2=across, y1=y.start, y2=y.end, class_="grid"),
            element("line", x1=x.start, x2=x.end, y1=up, y2=up, class_="grid"),
            label(text, across, y.start + 16, anchor="middle", kind="soft"),
            label(text, x.start - 8, up + 4, anchor="end", kind="soft"),
        ]
    name = divisor(x.high, unit)[1]
    middle = (x.start + x.end) / 2
    turned = element("g", label(f"predicted, {name}", 0, 0, anchor="middle"),
                     transform=f"translate(20 {(y.start + y.end) / 2:g}) rotate(-90)")  # fmt: skip
    return [*parts, label(f"measured, {name}", middle, y.start + 38, anchor="middle"), turned]


def _equality(x: Scale, y: Scale, band: float | None) -> list[str]:
    line = element("line", x1=x.start, y1=y.start, x2=x.end, y2=y.end, class_="axis")
    if not band:
        return [line]
    count = 40
    steps = [i / count for i in range(count + 1)]
    at = [x.low * (x.high / x.low) ** s if x.log else x.low + (x.high - x.low) * s for s in steps]
    upper = [(x.at(v), y.at(min(v * (1 + band), y.high))) for v in at]
    lower = [(x.at(v), y.at(max(v * (1 - band), y.low))) for v in at]
    corners = " ".join(f"{a:.1f},{b:.1f}" for a, b in [*upper, *reversed(lower)])
    return [element("polygon", tooltip(f"within {band:.0%}"), points=corners, class_="band"), line]


def lines(title: str, steps: Sequence[str], series: Sequence[Series], *, unit: str = "") -> str:
    """One line a series over named steps; each value has its mark, and the line's name stands at its end."""
    values = [v for one in series for v in one.values if v is not None]
    if any(len(one.values) != len(steps) for one in series):
        raise ValueError("a line has one value, or None, for each step")
    if any(not math.isfinite(v) for v in values):
        raise ValueError("a line's values are finite, or None for a gap")
    low, high = min([0.0, *values]), max([0.0, *values])
    left, right, top, bottom = 80.0, WIDTH - 170, 56.0, 304.0
    x = Scale(-0.3, max(1, len(steps) - 1) + 0.3, left, right)
    y = Scale(low, high if high > low else low + 1.0, bottom, top)
    parts = [label(title, 8, 20, kind="head")]
    for value, text in round_ticks(y.low, y.high, unit):
        parts.append(element("line", x1=left, x2=right, y1=y.at(value), y2=y.at(value), class_="grid"))
        parts.append(label(text, left - 8, y.at(value) + 4, anchor="end", kind="soft"))
    for index, name in enumerate(steps):
        words = element("g", tooltip(name) + label(fitted(name, 130), 0, 0, anchor="end", kind="soft"),
                        transform=f"translate({x.at(index):g} {bottom + 16:g}) rotate(-35)")  # fmt: skip
        parts.append(words)
    parts.append(label(divisor(y.high, unit)[1], 8, top - 12, kind="soft"))
    for number, one in enumerate(series):
        parts += _line(one, number, steps, x, y, unit)
    described = "; ".join(
        f"{one.label}: "
        + ", ".join(
            f"{name} {'no value' if v is None else amount(v, unit)}"
            for name, v in zip(steps, one.values, strict=True)
        )
        for one in series
    )
    return svg(title, described, WIDTH, bottom + 100, parts)


def _line(one: Series, number: int, steps: Sequence[str], x: Scale, y: Scale, unit: str) -> list[str]:
    colour = COLOURS[number % len(COLOURS)]
    found = [(i, v) for i, v in enumerate(one.values) if v is not None]
    parts = [
        element("line", x1=x.at(a), y1=y.at(v), x2=x.at(b), y2=y.at(w), stroke=colour, stroke_width=2)
        for (a, v), (b, w) in itertools.pairwise(found)
        if b == a + 1
    ]
    for index, value in found:
        words = f"{one.label}, {steps[index]}: {amount(value, unit)}"
        parts.append(shape(number, x.at(index), y.at(value), 4.5, tooltip(words)))
        parts.append(label(f"{value:.4g}", x.at(index), y.at(value) - 9, anchor="middle"))
    if found:
        last, value = found[-1]
        parts.append(label(fitted(one.label, WIDTH - x.at(last) - 14), x.at(last) + 12, y.at(value) + 4))
    return parts


_PAGE_STYLE = """
:root{color-scheme:light dark;--ink:#1a1a1a;--soft:#595959;--grid:#d9d9d9;--paper:#fff}
@media (prefers-color-scheme:dark){:root{--ink:#f0f0f0;--soft:#b3b3b3;--grid:#454545;--paper:#171717}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:62rem;
margin:2rem auto;padding:0 1rem}
svg.plot{max-width:100%;height:auto;display:block;margin:1rem 0}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:.3rem .7rem .3rem 0;border-bottom:1px solid var(--grid)}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}
"""


def page(title: str, sections: Sequence[Section]) -> str:
    """One self-contained HTML file that follows the reader's light or dark setting."""
    body = [element("h1", text_of(title)), *(_section(section) for section in sections)]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = (
        element("meta", charset="utf-8")
        + element("meta", name="viewport", content="width=device-width, initial-scale=1")
        + element("meta", http_equiv="Content-Security-Policy", content=policy)
        + element("title", text_of(title))
        + element("style", _PAGE_STYLE)
    )
    whole = element("head", head) + "\n" + element("body", element("main", "\n".join(body)))
    return "<!DOCTYPE html>\n" + element("html", whole, lang="en") + "\n"


def _section(section: Section) -> str:
    parts = [element("h2", text_of(section.heading))]
    parts += [element("p", text_of(words)) for words in section.paragraphs]
    parts += list(section.plots)
    if section.table:
        head, *rows = section.table
        first = "".join(element("th", text_of(cell) or " ", scope="col") for cell in head)
        body = "".join(
            element("tr", "".join(element("td", text_of(cell) or " ") for cell in row)) for row in rows
        )
        table = element("thead", element("tr", first)) + element("tbody", body or " ")
        parts.append(element("div", element("table", table), class_="wide"))
    return element("section", "\n".join(parts))
