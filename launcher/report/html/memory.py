"""The memory section of a run's page: predicted and measured, by component and by moment. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from launcher.execute.record import RunRecord
from launcher.report.html.charts import COMPONENTS, StackedBar, legend, stacked_bars, swatched
from launcher.report.html.elements import (
    NONE,
    Markup,
    amount_of,
    apart,
    at,
    bullets,
    count,
    cut,
    details,
    joined,
    listed,
    mapping,
    number,
    size,
    table,
    tag,
)
from launcher.report.html.page import PageSection

_REST, _WHOLE = COMPONENTS[-2:]
"""What is not measured by component: all but the states that are certainly on the device; and all of it."""
_PHASES = {
    "forward": "end of forward",
    "backward": "start of backward",
    "gradients": "end of backward",
    "recompute": "layer recomputed",
    "step": "optimizer step",
}
"""Moments of a step, as launcher/memory/phases.py names them."""
_LABEL = 28
"""Characters of a name beside its size on a narrow page: texts of a chart do not wrap."""
_STATES = ("weights", "gradients", "optimizer", "context")
_COLUMNS = ("predicted", "measured", "off")
_MOMENTS = {
    "training": ("total", None),
    "loading": ("load_peak", "load"),
    "evaluating": ("eval_peak", "eval"),
    "saving": ("save_peak", "save"),
    "host of a node": ("host_bytes", "host"),
}
"""Moment -> key of the plan's memory, key of the result's."""


def memory_section(record: RunRecord) -> PageSection | None:
    """None where the plan says nothing about memory."""
    memory, measured = mapping(record.plan.get("memory")), mapping(record.result.get("memory"))
    if not predicted_parts(record):
        return None
    tables = (
        tag("div", tag("h3", "By component at the peak"), _components(record)),
        *_at_the_step(measured),
        tag("div", tag("h3", "At each moment"), _moments(memory, measured)),
    )
    peak = amount_of(measured.get("measured"))
    title = "Memory predicted by component" + (", and measured" if peak is not None else "")
    mark = None if peak is None else ("measured peak", peak)
    bars = stacked_bars(title, memory_rows(record), limit=limit_of(record), mark=mark)
    parts = [bars, tag("div", *tables, class_="beside")]
    if peak is None and (moments := moments_chart(record)) is not None:
        parts.append(moments)
    notes = [str(note) for note in listed(memory.get("notes"))]
    if memory.get("calibration"):
        notes.insert(0, str(memory["calibration"]))
    if method := measured.get("method"):
        notes.append(f"Measured by {method}; the longest batch had {_tokens(measured)}.")
    if notes:
        parts.append(bullets(notes, "plain small"))
    return PageSection("memory", "Memory of each device", joined(parts))


def _tokens(measured: Mapping[str, Any]) -> str:
    largest, planned = at(measured, "tokens", "largest"), at(measured, "tokens", "planned")
    if number(largest) is None:
        return "a length that was not recorded"
    return f"{count(largest)} of the {count(planned)} tokens that were planned for"


def predicted_parts(record: RunRecord) -> dict[str, float]:
    """Component -> bytes at the predicted peak of training; empty where nothing was predicted."""
    given = mapping(at(record.plan, "memory", "components"))
    found = {name: amount_of(given.get(name)) for name in COMPONENTS}
    return {name: value for name, value in found.items() if value is not None}


def measured_parts(record: RunRecord) -> dict[str, float]:
    """The parts of the measured peak: states as measured when the optimizer steps, and the rest.

    Gradients that are incomplete at the predicted peak are part of the rest. Empty if nothing was measured.
    """
    measured, planned = mapping(record.result.get("memory")), predicted_parts(record)
    peak = amount_of(measured.get("measured"))
    if peak is None:
        return {}
    given = mapping(measured.get("components"))
    parts, left = {}, peak
    for name in _STATES:
        value, before = (amount_of(at(given.get(name), key)) for key in ("measured", "predicted"))
        early = name == "gradients" and planned.get(name, before or 0) < (before or 0)
        if value is not None and not early:
            parts[name] = min(value, left)  # the states need not all be there at the peak
            left -= parts[name]
    return {**parts, _REST: left}


def memory_rows(record: RunRecord, name: str = "") -> list[StackedBar]:
    """The bars of one run: predicted, and measured. name: of the run, if there are several."""
    memory, found = mapping(record.plan.get("memory")), measured_parts(record)
    low, high = amount_of(memory.get("low")), amount_of(memory.get("high"))
    span = (low, high) if low is not None and high is not None and 0 < low <= high else None
    before = f"{name}: " if name else ""
    bars = []
    if planned := predicted_parts(record):
        text = size(sum(planned.values()))
        if span and size(low) != size(high):
            first, last = (_number(end, text) for end in span)
            text += f" ({first} to {last})"
        bars.append(StackedBar(f"{before}predicted", planned, text, span))
    if found:
        total = sum(found.values())
        off = apart(sum(planned.values()), total)
        bars.append(
            StackedBar(f"{before}measured", found, f"{size(total)} ({off})" if off != NONE else size(total))
        )
    return bars


def _number(value: float, beside: str) -> str:
    """The size, without its unit where that is the unit of `beside`: texts of a chart do not wrap."""
    amount, unit = size(value).split()
    return amount if beside.endswith(unit) else f"{amount} {unit}"


def compared_bars(columns: Sequence[tuple[str, Mapping[str, Any]]]) -> Markup:
    """Plans on one scale, each with its range and its device. columns: name, and the plan with `memory`."""
    bars = []
    for name, plan in columns:
        record = RunRecord(name, "planned", plan)
        held = amount_of(at(plan, "memory", "device_bytes"))
        bars += [
            replace(bar, label=cut(name, _LABEL), text=size(bar.total), limit=held)
            for bar in memory_rows(record)
        ]
    return joined([stacked_bars("Memory of each device, at the peak of training", bars), legend(bars)])


def moments_chart(record: RunRecord) -> Markup | None:
    """A bar for each moment of a step by component, and for those before and after it; None without any."""
    memory = mapping(record.plan.get("memory"))
    bars = [
        StackedBar(_PHASES.get(name, name), {part: amount_of(parts.get(part)) or 0.0 for part in COMPONENTS})
        for name, parts in mapping(memory.get("phases")).items()
        if isinstance(parts, Mapping)
    ]
    whole = (
        (name, amount_of(memory.get(key))) for name, (key, _) in _MOMENTS.items() if key.endswith("_peak")
    )
    bars += [StackedBar(name, {_WHOLE: value}) for name, value in whole if value]
    if not bars:
        return None
    drawn = stacked_bars("Memory at each moment", bars, limit=limit_of(record))
    return tag("div", tag("h3", "Moment by moment"), drawn, legend(bars))


def limit_of(record: RunRecord) -> tuple[str, float] | None:
    """The size of a device."""
    held = amount_of(at(record.plan, "memory", "device_bytes"))
    return ("the device holds", held) if held else None


def _components(record: RunRecord) -> Markup:
    """The colours with their bytes. Activations are one row where they were measured together."""
    columns = [predicted_parts(record), *filter(None, [measured_parts(record)])]
    rows: list[tuple[Markup | str, ...]] = [
        (swatched(name), *(size(column.get(name)) for column in columns))
        for name in COMPONENTS
        if any(column.get(name) for column in columns)
    ]
    totals = (tag("b", size(sum(column.values()))) for column in columns)
    rows.append((tag("b", "at the peak"), *totals))
    head = ("component", "predicted", "measured")[: 1 + len(columns)]
    return table("Memory by component", head, rows, "numbers")


def _at_the_step(measured: Mapping[str, Any]) -> list[Markup]:
    """The states as predicted and as measured just before the optimizer steps."""
    given = mapping(measured.get("components"))
    pairs = {name: (at(given.get(name), "predicted"), at(given.get(name), "measured")) for name in _STATES}
    rows = [
        _compared(name, before, after)
        for name, (before, after) in pairs.items()
        if amount_of(after) is not None and (amount_of(before) or amount_of(after))
    ]
    found = table("Memory when the optimizer steps", ("state", *_COLUMNS), rows, "numbers")
    return [tag("div", tag("h3", "When the optimizer steps"), found)] if rows else []


def _moments(memory: Mapping[str, Any], measured: Mapping[str, Any]) -> Markup:
    peaks = {
        moment: (memory.get(planned), at(measured, *filter(None, (key, "measured"))))
        for moment, (planned, key) in _MOMENTS.items()
    }
    columns = 4 if measured else 2
    rows = [
        _compared(moment, before, after)[:columns]
        for moment, (before, after) in peaks.items()
        if amount_of(before) is not None or amount_of(after) is not None
    ]
    moments = table("Memory at each moment", ("moment", *_COLUMNS)[:columns], rows, "numbers")
    host = [(name, size(v)) for name, v in mapping(memory.get("host")).items() if amount_of(v)]
    if not host:
        return moments
    parts = table("Host memory", ("part", "predicted"), host, "numbers")
    return joined([moments, details("Predicted host memory of a node by part", parts)])


def _compared(name: str, before: Any, after: Any) -> tuple[str, ...]:
    return (name, size(before), size(after), apart(before, after))
