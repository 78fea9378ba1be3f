"""Bars of bytes by component as inline SVG that fits any width. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.report.html.elements import Markup, joined, tag
from launcher.report.html.values import size
from launcher.report.svg import BYTES, Scale, divisor, round_ticks

COMPONENTS = (
    "weights", "gradients", "optimizer", "activations", "logits", "buffers", "temporary", "context",
    "activations and the rest",
)  # fmt: skip
"""In the order in which they are stacked; the place gives the colour."""
_ROW, _BAR = 58.0, 26.0
_ABOVE = 20.0
"""Pixels above a bar, for its name."""
_LEAST_SHARE = 0.15
"""A limit is drawn where the largest bar is at least this share of it: else it would leave them no length."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One row."""

    label: str
    parts: Mapping[str, float]
    """Component -> bytes."""
    said: str = ""
    """Behind the label; the total where empty."""
    span: tuple[float, float] | None = None
    """Within which the end of the bar was expected."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def colour_of(component: str) -> str:
    """The class with a component's colour."""
    place = COMPONENTS.index(component) if component in COMPONENTS else len(COMPONENTS)
    return f"m{min(place, 8)}"


def swatch(component: str) -> Markup:
    """The component's colour, beside its name in a table."""
    return tag("span", class_=f"swatch {colour_of(component)}")


def legend(bars: Sequence[Bar]) -> Markup:
    """Which colour is which component, of those that these bars have."""
    shown = [name for name in COMPONENTS if any(bar.parts.get(name) for bar in bars)]
    entries = (tag("span", joined([swatch(name), Markup(name)], ""), class_="entry") for name in shown)
    return tag("p", *entries, class_="legend")


def memory_bars(
    title: str,
    bars: Sequence[Bar],
    *,
    limit: tuple[str, float] | None = None,
    mark: tuple[str, float] | None = None,
) -> Markup:
    """limit: name and value of a line through all rows, such as the device's size. mark: of another one."""
    largest = max([*(bar.total for bar in bars), *(bar.span[1] for bar in bars if bar.span), 1.0])
    largest = max(largest, mark[1] if mark else 0.0)
    shown = limit if limit and largest >= _LEAST_SHARE * limit[1] else None
    scale = Scale(0.0, max(largest, shown[1] if shown else 0.0) * 1.02, 0.0, 100.0)
    bottom = _ROW * len(bars) + 8
    inside = [
        *_axis(scale, bottom),
        *(part for number, bar in enumerate(bars) for part in _bar(bar, scale, _ROW * number)),
    ]
    if shown:
        inside.append(_line(shown, scale, bottom, "limit"))
    if mark:
        inside.append(_line(mark, scale, bottom, "mark"))
    inside += [_name(bar, _ROW * number) for number, bar in enumerate(bars)]
    lines = "; ".join(f"{name} {size(value)}" for name, value in filter(None, (mark, limit)))
    described = "; ".join(filter(None, [*(_said(bar) for bar in bars), lines]))
    picture = tag(
        "svg", tag("title", title), tag("desc", described), *inside, class_="plot", role="img",
        aria_label=title, width="100%", height=bottom, xmlns="http://www.w3.org/2000/svg",
    )  # fmt: skip
    return tag("figure", tag("div", picture, class_="frame bars"))


def _axis(scale: Scale, bottom: float) -> Iterator[Markup]:
    name = divisor(scale.high, BYTES)[1]
    for value, text in round_ticks(scale.low, scale.high, BYTES, most=5):
        at = f"{scale.at(value):.2f}%"
        yield tag("line", x1=at, x2=at, y1=_ABOVE, y2=bottom, class_="grid")
        anchor = "start" if value == 0 else "end" if scale.at(value) > 96 else "middle"
        yield tag("text", f"{text} {name}" if value == 0 else text, x=at, y=bottom + 16, text_anchor=anchor)


def _bar(bar: Bar, scale: Scale, top: float) -> Iterator[Markup]:
    start, y = 0.0, top + _ABOVE
    for part, value in bar.parts.items():
        left, width = scale.at(start), scale.at(value)
        start += value
        if width <= 0:
            continue
        words = tag("title", f"{bar.label}: {part} {size(value)}")
        yield tag("rect", words, x=f"{left:.3f}%", width=f"{width:.3f}%", y=y, height=_BAR,
                  class_=f"part {colour_of(part)}")  # fmt: skip
    if bar.span:
        low, high = (f"{scale.at(value):.2f}%" for value in bar.span)
        words = tag("title", f"between {size(bar.span[0])} and {size(bar.span[1])}")
        middle = y + _BAR / 2
        kinds = ("halo", "span")
        drawn = [
            line
            for kind in kinds
            for line in (
                tag("line", x1=low, x2=high, y1=middle, y2=middle, class_=kind),
                tag("line", x1=low, x2=low, y1=middle - 5, y2=middle + 5, class_=kind),
                tag("line", x1=high, x2=high, y1=middle - 5, y2=middle + 5, class_=kind),
            )
        ]
        yield tag("g", words, *drawn)


def _name(bar: Bar, top: float) -> Markup:
    name = tag("tspan", f"{bar.label}  ", class_="name")
    return tag("text", name, bar.said or size(bar.total), x="0", y=top + 14, class_="ink")


def _line(line: tuple[str, float], scale: Scale, bottom: float, kind: str) -> Markup:
    """A line through all rows, its name below it."""
    place = scale.at(line[1])
    at, words = f"{place:.2f}%", f"{line[0]} {size(line[1])}"
    anchor = "end" if place > 50 else "start"
    lines = [tag("line", x1=at, x2=at, y1=_ABOVE - 6, y2=bottom + 24, class_=each) for each in ("halo", kind)]
    text = tag("text", words, x=at, y=bottom + 34, text_anchor=anchor, dx="-5" if place > 50 else "5",
               class_="ink")  # fmt: skip
    return tag("g", tag("title", words), *lines, text)


def _said(bar: Bar) -> str:
    parts = ", ".join(f"{name} {size(value)}" for name, value in bar.parts.items() if value)
    span = f", between {size(bar.span[0])} and {size(bar.span[1])}" if bar.span else ""
    return f"{bar.label}: {size(bar.total)} ({parts}){span}"
