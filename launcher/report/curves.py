"""Numbers over steps as inline SVG that fits any width: its texts keep their size, only the plot stretches.

Pure. The colours are variables of the page's style (report/html/style.py), for light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.report.html.elements import Markup, joined, tag
from launcher.report.html.values import figure, several
from launcher.report.svg import Scale, round_ticks

Point = tuple[float, float | None]
"""Step and value; None is a gap."""
HEIGHT = 220.0
"""Pixels of the plot alone."""
COLUMNS = 700
"""Columns into which many points are gathered: about one for each pixel of a wide page."""
_MARKS = 60
"""Points that have a mark each."""
_HITS = 120
"""Places that show their values to a pointer."""
_SPREAD = 100.0
"""A loss whose largest value is so many times its smallest is shown on a logarithmic axis."""
_COLOURS = 6
_LEAST = 1e-9
"""Of a value: a smaller range is none, on paper and in floats."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of values, by ascending step."""

    label: str
    points: Sequence[Point]
    marked: bool = False
    """Whether each value has a mark: of few values, such as those of evaluations."""

    @property
    def values(self) -> list[float]:
        return [value for _, value in self.points if value is not None]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at a step."""

    step: float
    label: str


def curves(
    title: str,
    lines: Sequence[Curve],
    *,
    unit: str = "",
    from_zero: bool = False,
    spread: bool = False,
    events: Sequence[Event] = (),
) -> Markup:
    """A figure: heading with the lines' names and last values, the plot, its axes.

    from_zero: whether the axis begins there, as an amount's does. spread: whether values of several
    magnitudes may have a logarithmic axis. ValueError for a value that is not finite.
    """
    values = [value for line in lines for value in line.values]
    if not all(math.isfinite(v) for v in values):
        raise ValueError("a curve's values are finite, or None for a gap")
    steps = [step for line in lines for step, value in line.points if value is not None]
    heading = tag("figcaption", tag("span", _title(title, unit), class_="head"), _legend(lines))
    if not values:
        empty = tag("p", "no finite value was recorded", class_="soft")
        return tag("figure", heading, empty, class_="curves")
    log = spread and min(values) > 0 and max(values) / min(values) > _SPREAD
    x, y = _axis(steps), _value_axis(values, from_zero=from_zero, log=log)
    inside = [
        *_grid(y, log=log),
        *_steps(x),
        _paths(lines, x, y),
        *(_event(event, x) for event in events if x.low <= event.step <= x.high),
        *(mark for number, line in enumerate(lines) for mark in _marks(line, number, x, y)),
        *_hits(lines, x, unit),
    ]
    picture = tag(
        "svg", tag("title", _title(title, unit)), tag("desc", _described(lines, unit, log=log)), *inside,
        class_="plot", role="img", aria_label=title, width="100%", height=HEIGHT,
        xmlns="http://www.w3.org/2000/svg",
    )  # fmt: skip
    return tag("figure", heading, tag("div", picture, class_="frame"), class_="curves")


def _title(title: str, unit: str) -> str:
    return f"{title}, {unit}" if unit else title


def _legend(lines: Sequence[Curve]) -> Markup | None:
    """Each line's name, how it is drawn, and its last value."""
    rows = []
    for number, line in enumerate(lines):
        last = figure(line.values[-1]) if line.values else "no value"
        key = {"class_": "key", "width": "26", "height": "12", "aria_hidden": "true"}
        several = len(lines) > 1
        sample = tag("svg", _sample(number, marked=line.marked), **key) if several else None
        rows.append(tag("span", sample, f"{line.label} ", tag("b", last), class_="entry"))
    return tag("span", *rows, class_="legend") if rows else None


def _sample(number: int, *, marked: bool) -> Markup:
    line = tag("path", d="M1 6H25", class_=_kind(number))
    return joined([line, _mark(number, "13", 6.0)]) if marked else line


def _kind(number: int) -> str:
    """The class of the n-th line: colour and dashes both tell it."""
    return f"line c{number % _COLOURS} d{number % _COLOURS}"


def _axis(steps: Sequence[float]) -> Scale:
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
    air = (high - low) * 0.06
    return Scale(low if from_zero and low == 0 else low - air, high + air, HEIGHT, 0.0)


def _grid(y: Scale, *, log: bool) -> Iterator[Markup]:
    for value, text in _log_marks(y) if log else _round_marks(y):
        at = y.at(value)
        yield tag("line", x1="0", x2="100%", y1=at, y2=at, class_="grid")
        yield tag("text", text, x="-8", y=at + 4, text_anchor="end")


def _round_marks(scale: Scale, most: int = 5) -> list[tuple[float, str]]:
    """Round values with texts."""
    found = round_ticks(scale.low, scale.high, "", most=most)
    return [(value, f"{value:,.10g}" if abs(value) >= 10_000 else text) for value, text in found]


def _log_marks(scale: Scale) -> list[tuple[float, str]]:
    first, last = math.ceil(math.log10(scale.low)), math.floor(math.log10(scale.high))
    apart = max(1, (last - first) // 4)
    return [(10.0**power, f"{10.0**power:g}") for power in range(first, last + 1, apart)]


def _steps(x: Scale) -> Iterator[Markup]:
    yield tag("line", x1="0", x2="100%", y1=HEIGHT, y2=HEIGHT, class_="axis")
    marks = [(v, t) for v, t in _round_marks(x) if v == int(v)]
    for value, text in marks or [(x.low, f"{x.low:g}")]:
        place = x.at(value)
        anchor = "start" if place < 2 else "end" if place > 96 else "middle"
        yield tag("text", text, x=f"{place:.2f}%", y=HEIGHT + 18, text_anchor=anchor)
    yield tag("text", "step", x="100%", y=HEIGHT + 36, text_anchor="end")


def _event(event: Event, x: Scale) -> Markup:
    place = x.at(event.step)
    at, late = f"{place:.2f}%", place > 60
    line = tag("line", x1=at, x2=at, y1="0", y2=HEIGHT, class_="event")
    said = tag("text", event.label, x=at, y="12", dx="-6" if late else "6",
               text_anchor="end" if late else "start")  # fmt: skip
    return tag("g", tag("title", f"{event.label} at step {event.step:g}"), line, said)


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
    run: list[tuple[float, float]] = []
    for step, value in points:
        if value is not None:
            run.append((step, value))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _path(run: Sequence[tuple[float, float]], x: Scale, y: Scale) -> str:
    places = [(x.at(step) * 10, y.at(value) / HEIGHT * 1000) for step, value in thinned(run, x)]
    if len(places) == 1:  # a stroke without length has round ends
        return f"M{places[0][0]:.1f} {places[0][1]:.1f}h0"
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in places)


def thinned(run: Sequence[tuple[float, float]], x: Scale) -> Sequence[tuple[float, float]]:
    """At most four points a column: its first and last one, its least and its largest."""
    if len(run) <= 2 * COLUMNS:
        return run
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in run:
        columns.setdefault(int(x.at(point[0]) / 100 * COLUMNS), []).append(point)
    kept: list[tuple[float, float]] = []
    for inside in columns.values():
        ends = [inside[0], inside[-1]]
        ends += [min(inside, key=lambda point: point[1]), max(inside, key=lambda point: point[1])]
        kept += sorted(set(ends))
    return kept


def _marks(line: Curve, number: int, x: Scale, y: Scale) -> Iterator[Markup]:
    found = [(step, value) for step, value in line.points if value is not None]
    if not line.marked or len(found) > _MARKS:
        found = found[-1:]
    for step, value in found:
        yield _mark(number, f"{x.at(step):.2f}%", y.at(value))


def _mark(number: int, x: str, y: float) -> Markup:
    return tag("circle", cx=x, cy=y, r="3.5", class_=f"dot c{number % _COLOURS}")


def _hits(lines: Sequence[Curve], x: Scale, unit: str) -> Iterator[Markup]:
    """Columns that show the values at their step to a pointer."""
    by_step: dict[float, list[str]] = {}
    for line in lines:
        for step, value in line.points:
            if value is not None:
                by_step.setdefault(step, []).append(f"{line.label} {figure(value)}")
    steps = sorted(by_step)
    steps = steps[:: max(1, math.ceil(len(steps) / _HITS))]
    width = 100 / max(1, len(steps) - 1) if len(steps) > 1 else 100.0
    for step in steps:
        words = f"step {step:,.10g}: {', '.join(by_step[step])} {unit}".rstrip()
        left = max(0.0, x.at(step) - width / 2)
        wide = min(100.0, x.at(step) + width / 2) - left
        yield tag("rect", tag("title", words), x=f"{left:.2f}%", width=f"{wide:.2f}%", y="0", height=HEIGHT,
                  class_="hit")  # fmt: skip


def _described(lines: Sequence[Curve], unit: str, *, log: bool) -> str:
    """The lines in words, for those who do not see them."""
    told = []
    for line in lines:
        found = [(step, value) for step, value in line.points if value is not None]
        if not found:
            told.append(f"{line.label}: no finite value")
            continue
        least, most = min(found, key=lambda p: p[1]), max(found, key=lambda p: p[1])
        gaps = len(line.points) - len(found)
        missing = f", {several(gaps, 'value')} not finite" if gaps else ""
        told.append(
            f"{line.label}: {several(len(found), 'value')}, {_at(found[0])}, {_at(found[-1])}, "
            f"least {_at(least)}, largest {_at(most)}{missing}"
        )
    return "; ".join(told) + (f"; in {unit}" if unit else "") + ("; logarithmic axis" if log else "")


def _at(point: tuple[float, float]) -> str:
    return f"{figure(point[1])} at step {point[0]:,.10g}"
