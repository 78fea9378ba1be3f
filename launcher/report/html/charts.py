"""Charts as inline SVG that fits any width: lines over steps, and stacked bars. Pure.

Texts keep their size; only the plot stretches. Colours are variables of the page's style, for light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from launcher.report.html.elements import Markup, joined, tag
from launcher.report.sections import COMPONENTS, Curve, Event, Point, StackedBar
from launcher.report.tables import BYTES, amount, divisor
from launcher.report.values import figure, several, size

HEIGHT = 220.0
"""Pixels of the plot of curves, without its axes."""
COLUMNS = 700
"""Many points are reduced to this many columns: about one per pixel of a wide page."""
_MARKS = 60
"""Points up to which each gets a dot."""
_TOOLTIPS = 120
_SPREAD = 100.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
_COLOURS = 6
_LEAST = 1e-9
"""Relative range below which values count as constant."""

_ROW, _BAR = 58.0, 26.0
_ABOVE = 20.0
"""Pixels above a bar, for its label."""
_LEAST_SHARE = 0.15
"""A limit is drawn only if the largest bar has at least this share of it."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to positions along one axis."""

    low: float
    high: float
    start: float
    """Position of `low`."""
    end: float
    """Position of `high`."""
    log: bool = False

    def at(self, value: float) -> float:
        low, high, here = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (here - low) / (high - low)

    def ticks(self, unit: str = "") -> list[tuple[float, str]]:
        """Round values on the axis with their labels, in the unit of `divisor(high)`."""
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            apart = max(1, (last - first) // 4)
            return [(10.0**power, f"{10.0**power:g}") for power in range(first, last + 1, apart)]
        divided_by, _ = divisor(self.high, unit)
        raw = (self.high - self.low) / divided_by / 5
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
        first = math.ceil(self.low / divided_by / step - 1e-9)
        last = math.floor(self.high / divided_by / step + 1e-9)
        found = [n * step for n in range(first, last + 1)]
        return [(v * divided_by, f"{v:,.10g}" if abs(v) >= 10_000 else f"{v:.10g}") for v in found]


def _picture(
    title: str, described: str, inside: Sequence[Markup | None], height: float, frame: str
) -> Markup:
    """The SVG with name and description for screen readers, in a frame with space for axis labels."""
    drawn = tag(
        "svg", tag("title", title), tag("desc", described), *inside, class_="plot", role="img",
        aria_label=title, width="100%", height=height, xmlns="http://www.w3.org/2000/svg",
    )  # fmt: skip
    return tag("div", drawn, class_=frame)


# --- lines over steps


def curves(
    title: str,
    lines: Sequence[Curve],
    *,
    from_zero: bool = False,
    spread: bool = False,
    events: Sequence[Event] = (),
) -> Markup:
    """A figure: legend with the last values, the plot, its axes.

    from_zero: the axis begins at 0. spread: the axis is logarithmic if the values span magnitudes. Raises
    ValueError for a value that is not finite.
    """
    values = [value for line in lines for _, value in line.found]
    if not all(map(math.isfinite, values)):
        raise ValueError("a curve's values are finite, or None for a gap")
    heading = tag("figcaption", tag("span", title, class_="head"), _curve_legend(lines))
    if not values:
        return tag("figure", heading, tag("p", "no finite value was recorded", class_="soft"))
    log = spread and min(values) > 0 and max(values) / min(values) > _SPREAD
    x = _step_axis([step for line in lines for step, _ in line.found])
    y = _value_axis(values, from_zero=from_zero, log=log)
    inside = [
        *_grid(y),
        *_steps(x),
        _paths(lines, x, y),
        *(_event(event, x) for event in events if x.low <= event.step <= x.high),
        *(dot for number, line in enumerate(lines) for dot in _dots(line, number, x, y)),
        *_tooltips(lines, x),
    ]
    return tag("figure", heading, _picture(title, _curves_described(lines, log=log), inside, HEIGHT, "frame"))


def _curve_legend(lines: Sequence[Curve]) -> Markup | None:
    """Name and last value of each line; with several lines also how each is drawn."""
    rows = []
    for number, line in enumerate(lines):
        last = figure(line.found[-1][1]) if line.found else "no value"
        sample = [tag("path", d="M1 6H25", class_=_kind(number))]
        sample += [_dot(number, "13", 6.0)] if line.marked else []
        drawn = tag("svg", *sample, width="26", height="12", aria_hidden="true") if len(lines) > 1 else None
        rows.append(tag("span", drawn, f"{line.label} ", tag("b", last), class_="entry"))
    return tag("span", *rows, class_="legend") if rows else None


def _kind(number: int) -> str:
    """The class of the n-th line: colour and dashes differ."""
    return f"line c{number % _COLOURS} d{number % _COLOURS}"


def _step_axis(steps: Sequence[float]) -> Scale:
    """Steps in percent of the width."""
    low, high = min(steps), max(steps)
    return Scale(low, max(high, low + max(1.0, abs(low) * _LEAST)), 0.0, 100.0)


def _value_axis(values: Sequence[float], *, from_zero: bool, log: bool) -> Scale:
    low, high = min(values), max(values)
    if log:
        return Scale(low / 1.2, high * 1.2, HEIGHT, 0.0, log=True)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    if high - low <= abs(high) * _LEAST:  # a constant: in the middle of its axis
        low, high = (0.0, high * 2) if high > 0 else (low * 2 - 1.0, 1.0)
    margin = (high - low) * 0.06
    return Scale(low if from_zero and low == 0 else low - margin, high + margin, HEIGHT, 0.0)


def _grid(y: Scale) -> Iterator[Markup]:
    for value, text in y.ticks():
        at = y.at(value)
        yield tag("line", x1="0", x2="100%", y1=at, y2=at, class_="grid")
        yield tag("text", text, x="-8", y=at + 4, text_anchor="end")


def _steps(x: Scale) -> Iterator[Markup]:
    yield tag("line", x1="0", x2="100%", y1=HEIGHT, y2=HEIGHT, class_="axis")
    ticks = [(v, t) for v, t in x.ticks() if v == int(v)]
    for value, text in ticks or [(x.low, f"{x.low:g}")]:
        place = x.at(value)
        anchor = "start" if place < 2 else "end" if place > 96 else "middle"
        yield tag("text", text, x=f"{place:.2f}%", y=HEIGHT + 18, text_anchor=anchor)
    yield tag("text", "step", x="100%", y=HEIGHT + 36, text_anchor="end")


def _event(event: Event, x: Scale) -> Markup:
    place = x.at(event.step)
    at, late = f"{place:.2f}%", place > 60
    line = tag("line", x1=at, x2=at, y1="0", y2=HEIGHT, class_="event")
    text = tag("text", event.label, x=at, y="12", dx="-6" if late else "6",
               text_anchor="end" if late else "start")  # fmt: skip
    return tag("g", tag("title", f"{event.label} at step {event.step:g}"), line, text)


def _paths(lines: Sequence[Curve], x: Scale, y: Scale) -> Markup:
    """The lines in a box of 1000 by 1000 that is stretched over the plot; their strokes are not."""
    parts = []
    for number, line in reversed(list(enumerate(lines))):  # the first one on top
        drawn = " ".join(_path(run, x, y) for run in _runs(line.points))
        if drawn:
            parts.append(tag("path", d=drawn, class_=_kind(number)))
    return tag("svg", *parts, viewBox="0 0 1000 1000", preserveAspectRatio="none", width="100%",
               height=HEIGHT, overflow="visible")  # fmt: skip


def _runs(points: Sequence[Point]) -> Iterator[list[tuple[float, float]]]:
    """Stretches without a gap."""
    for _, run in groupby(points, key=lambda point: point[1] is None):
        found = [(step, value) for step, value in run if value is not None]
        if found:
            yield found


def _path(run: Sequence[tuple[float, float]], x: Scale, y: Scale) -> str:
    places = [(x.at(step) * 10, y.at(value) / HEIGHT * 1000) for step, value in thinned(run, x)]
    if len(places) == 1:  # a stroke without length has round ends
        return f"M{places[0][0]:.1f} {places[0][1]:.1f}h0"
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in places)


def thinned(run: Sequence[tuple[float, float]], x: Scale) -> Sequence[tuple[float, float]]:
    """At most four points a column: the first, the last, the smallest and the largest."""
    if len(run) <= 2 * COLUMNS:
        return run
    kept: list[tuple[float, float]] = []
    for _, column in groupby(run, key=lambda point: int(x.at(point[0]) / 100 * COLUMNS)):
        inside = list(column)
        least, most = (choose(inside, key=lambda point: point[1]) for choose in (min, max))
        kept += sorted({inside[0], inside[-1], least, most})
    return kept


def _dots(line: Curve, number: int, x: Scale, y: Scale) -> Iterator[Markup]:
    found = line.found if line.marked and len(line.found) <= _MARKS else line.found[-1:]
    return (_dot(number, f"{x.at(step):.2f}%", y.at(value)) for step, value in found)


def _dot(number: int, x: str, y: float) -> Markup:
    return tag("circle", cx=x, cy=y, r="3.5", class_=f"dot c{number % _COLOURS}")


def _tooltips(lines: Sequence[Curve], x: Scale) -> Iterator[Markup]:
    """Columns that show the values at their step to a pointer."""
    by_step: dict[float, list[str]] = {}
    for line in lines:
        for step, value in line.found:
            by_step.setdefault(step, []).append(f"{line.label} {figure(value)}")
    steps = sorted(by_step)
    steps = steps[:: max(1, math.ceil(len(steps) / _TOOLTIPS))]
    width = 100 / max(1, len(steps) - 1)
    for step in steps:
        left = max(0.0, x.at(step) - width / 2)
        wide = min(100.0, x.at(step) + width / 2) - left
        yield tag("rect", tag("title", f"step {step:,.10g}: {', '.join(by_step[step])}"), x=f"{left:.2f}%",
                  width=f"{wide:.2f}%", y="0", height=HEIGHT, class_="hit")  # fmt: skip


def _curves_described(lines: Sequence[Curve], *, log: bool) -> str:
    """The lines as text, for screen readers."""
    texts = []
    for line in lines:
        found = line.found
        if not found:
            texts.append(f"{line.label}: no finite value")
            continue
        least, most = min(found, key=lambda p: p[1]), max(found, key=lambda p: p[1])
        gaps = len(line.points) - len(found)
        missing = f", {several(gaps, 'value')} not finite" if gaps else ""
        texts.append(
            f"{line.label}: {several(len(found), 'value')}, {_at(found[0])}, {_at(found[-1])}, "
            f"least {_at(least)}, largest {_at(most)}{missing}"
        )
    return "; ".join(texts) + ("; logarithmic axis" if log else "")


def _at(point: tuple[float, float]) -> str:
    return f"{figure(point[1])} at step {point[0]:,.10g}"


# --- stacked bars


def _valued(value: float, unit: str) -> str:
    return size(value) if unit == BYTES else amount(value, unit)


def _colour(component: str) -> str:
    """The class with a component's colour."""
    return f"m{COMPONENTS.index(component) if component in COMPONENTS else 0}"


def swatched(component: str) -> Markup:
    """The component's name after a square of its colour."""
    return joined([tag("span", class_=f"swatch {_colour(component)}"), Markup(component)], "")


def legend(bars: Sequence[StackedBar]) -> Markup:
    """The colours of the components that these bars have."""
    shown = [name for name in COMPONENTS if any(bar.parts.get(name) for bar in bars)]
    return tag("p", *(tag("span", swatched(name), class_="entry") for name in shown), class_="legend")


def stacked_bars(
    title: str,
    bars: Sequence[StackedBar],
    *,
    unit: str = BYTES,
    limit: tuple[str, float] | None = None,
    mark: tuple[str, float] | None = None,
) -> Markup:
    """Horizontal bars. limit, mark: name and value of a line through all rows."""
    largest = max([*(bar.end for bar in bars), mark[1] if mark else 0.0]) or 1.0
    shown = limit if limit and largest >= _LEAST_SHARE * limit[1] else None
    scale = Scale(0.0, max(largest, shown[1] if shown else 0.0) * 1.02, 0.0, 100.0)
    bottom = _ROW * len(bars) + 8
    inside = [
        *_bar_axis(scale, unit, bottom),
        *(part for number, bar in enumerate(bars) for part in _bar(bar, scale, unit, _ROW * number)),
        *(
            _line_through(line, scale, unit, bottom, kind)
            for line, kind in ((shown, "limit"), (mark, "mark"))
            if line
        ),
        *(_bar_label(bar, unit, _ROW * number) for number, bar in enumerate(bars)),
    ]
    lines = "; ".join(f"{name} {_valued(value, unit)}" for name, value in filter(None, (mark, limit)))
    described = "; ".join(filter(None, [*(_bar_described(bar, unit) for bar in bars), lines]))
    return tag("figure", _picture(title, described, inside, bottom, "frame bars"))


def _bar_axis(scale: Scale, unit: str, bottom: float) -> Iterator[Markup]:
    for value, text in scale.ticks(unit):
        at = f"{scale.at(value):.2f}%"
        yield tag("line", x1=at, x2=at, y1=_ABOVE, y2=bottom, class_="grid")
        anchor = "start" if value == 0 else "end" if scale.at(value) > 96 else "middle"
        named = text if value else f"{text} {divisor(scale.high, unit)[1]}"
        yield tag("text", named, x=at, y=bottom + 16, text_anchor=anchor)


def _bar(bar: StackedBar, scale: Scale, unit: str, top: float) -> Iterator[Markup]:
    start, y = 0.0, top + _ABOVE
    for part, value in bar.parts.items():
        left, width = scale.at(start), scale.at(value)
        start += value
        if width > 0:
            title = tag("title", f"{bar.label}: {part} {_valued(value, unit)}")
            yield tag("rect", title, x=f"{left:.3f}%", width=f"{width:.3f}%", y=y, height=_BAR,
                      class_=f"part {_colour(part)}")  # fmt: skip
    if bar.span:
        low, high = (f"{scale.at(value):.2f}%" for value in bar.span)
        middle = y + _BAR / 2
        places = [(low, high, 0.0), (low, low, 5.0), (high, high, 5.0)]
        text = f"between {_valued(bar.span[0], unit)} and {_valued(bar.span[1], unit)}"
        yield _haloed("span", text, [(a, b, middle - half, middle + half) for a, b, half in places])
    if bar.measured is not None:
        at = f"{scale.at(bar.measured):.2f}%"
        text = f"{bar.label}: measured {_valued(bar.measured, unit)}"
        yield _haloed("mark", text, [(at, at, y - 4, y + _BAR + 4)])
    if bar.limit is not None:
        at = f"{scale.at(bar.limit):.2f}%"
        text = f"{bar.label}: the device holds {_valued(bar.limit, unit)}"
        yield _haloed("limit", text, [(at, at, y - 4, y + _BAR + 4)])


def _haloed(kind: str, text: str, lines: Sequence[tuple[str, str, float, float]]) -> Markup:
    """Lines (x1, x2, y1, y2) that are visible over any colour."""
    drawn = [
        tag("line", x1=a, x2=b, y1=c, y2=d, class_=each) for each in ("halo", kind) for a, b, c, d in lines
    ]
    return tag("g", tag("title", text), *drawn)


def _bar_label(bar: StackedBar, unit: str, top: float) -> Markup:
    name = tag("tspan", f"{bar.label}  ", class_="name")
    measured = "" if bar.measured is None else f", measured {_valued(bar.measured, unit)}"
    text = bar.text or f"{_valued(bar.total, unit)}{measured}"
    return tag("text", name, text, x="0", y=top + 14, class_="ink")


def _line_through(line: tuple[str, float], scale: Scale, unit: str, bottom: float, kind: str) -> Markup:
    """A line through all rows with its name below."""
    place = scale.at(line[1])
    at, text = f"{place:.2f}%", f"{line[0]} {_valued(line[1], unit)}"
    drawn = _haloed(kind, text, [(at, at, _ABOVE - 6, bottom + 24)])
    return tag("g", drawn, tag("text", text, x=at, y=bottom + 34, dx="-5" if place > 50 else "5",
                               text_anchor="end" if place > 50 else "start", class_="ink"))  # fmt: skip


def _bar_described(bar: StackedBar, unit: str) -> str:
    """The row as text, for screen readers."""
    parts = ", ".join(f"{name} {_valued(value, unit)}" for name, value in bar.parts.items() if value)
    span = f", between {_valued(bar.span[0], unit)} and {_valued(bar.span[1], unit)}" if bar.span else ""
    measured = "" if bar.measured is None else f", measured {_valued(bar.measured, unit)}"
    held = "" if bar.limit is None else f", the device holds {_valued(bar.limit, unit)}"
    return f"{bar.label}: {_valued(bar.total, unit)} ({parts}){span}{measured}{held}"
