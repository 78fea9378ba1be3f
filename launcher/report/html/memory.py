"""Memory predicted and measured, by component and by moment: a part of a page. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.execute.record import RunRecord
from launcher.report.html.bars import COMPONENTS, Bar, memory_bars, swatch
from launcher.report.html.elements import Markup, details, joined, table, tag
from launcher.report.html.sections import Section
from launcher.report.html.values import NONE, amount_of, apart, at, count, listed, mapping, number, size

REST = "activations and the rest"
"""What a measurement cannot take apart: all but the states that lie on the device for certain."""
STATES = ("weights", "gradients", "optimizer", "context")
_MOMENTS = {
    "training": ("total", None),
    "loading": ("load_peak", "load"),
    "evaluating": ("eval_peak", "eval"),
    "saving": ("save_peak", "save"),
    "host of a node": ("host_bytes", "host"),
}
"""Words -> key of the plan's memory, key of the result's."""


def memory_section(record: RunRecord) -> Section | None:
    """None where the plan says nothing about memory."""
    memory, measured = mapping(record.plan.get("memory")), mapping(record.result.get("memory"))
    planned = predicted_parts(record)
    if not planned:
        return None
    tables = (
        tag("div", tag("h3", "By component at the peak"), _components(planned, measured)),
        *_at_the_step(measured),
        tag("div", tag("h3", "At each moment"), _moments(memory, measured)),
    )
    parts = [_bars(record), tag("div", *tables, class_="beside")]
    notes = [str(note) for note in listed(memory.get("notes"))]
    if memory.get("calibration"):
        notes.insert(0, str(memory["calibration"]))
    if method := measured.get("method"):
        notes.append(f"Measured by {method}; the longest batch had {_tokens(measured)}.")
    if notes:
        parts.append(tag("ul", *(tag("li", note) for note in notes), class_="plain small"))
    return Section("memory", "Memory of each device", joined(parts))


def _tokens(measured: Mapping[str, Any]) -> str:
    largest, planned = at(measured, "tokens", "largest"), at(measured, "tokens", "planned")
    if number(largest) is None:
        return "a length that was not recorded"
    return f"{count(largest)} of the {count(planned)} tokens that were planned for"


def predicted_parts(record: RunRecord) -> dict[str, float]:
    """Component -> bytes at the moment of training that rules; empty where nothing was predicted."""
    given = mapping(at(record.plan, "memory", "components"))
    found = {name: amount_of(given.get(name)) for name in COMPONENTS}
    return {name: value for name, value in found.items() if value is not None}


def measured_parts(record: RunRecord) -> dict[str, float]:
    """The same as measured: the states, and the rest up to the peak; empty where nothing was measured."""
    return _measured(mapping(record.result.get("memory")), predicted_parts(record))


def _measured(measured: Mapping[str, Any], planned: Mapping[str, float]) -> dict[str, float]:
    """The parts of the measured peak; states are measured when the optimizer steps.

    Gradients that are not all there at the predicted peak are part of the rest.
    """
    peak = amount_of(measured.get("measured"))
    if peak is None:
        return {}
    given = mapping(measured.get("components"))
    found = {}
    for name in STATES:
        value, before = (amount_of(at(given.get(name), key)) for key in ("measured", "predicted"))
        early = name == "gradients" and planned.get(name, before or 0) < (before or 0)
        if value is not None and not early:
            found[name] = value
    parts, left = {}, peak
    for name, value in found.items():  # the states need not all be there at the peak
        parts[name] = min(value, left)
        left -= parts[name]
    return {**parts, REST: left}


def memory_rows(record: RunRecord, name: str = "") -> list[Bar]:
    """The bars of one run: predicted, and measured. name: of the run, where there are several."""
    memory, found = mapping(record.plan.get("memory")), measured_parts(record)
    low, high = amount_of(memory.get("low")), amount_of(memory.get("high"))
    span = (low, high) if low is not None and high is not None and 0 < low <= high else None
    before = f"{name}: " if name else ""
    bars = []
    if planned := predicted_parts(record):
        said = size(sum(planned.values()))
        if span and size(low) != size(high):
            said += f" ({size(low)} to {size(high)})"
        bars.append(Bar(f"{before}predicted", planned, said, span))
    if found:
        total = sum(found.values())
        off = apart(sum(planned.values()), total)
        bars.append(Bar(f"{before}measured", found, f"{size(total)} ({off})" if off != NONE else size(total)))
    return bars


def limit_of(record: RunRecord) -> tuple[str, float] | None:
    """What a device holds."""
    held = amount_of(at(record.plan, "memory", "device_bytes"))
    return ("the device holds", held) if held else None


def _bars(record: RunRecord) -> Markup:
    measured = amount_of(at(record.result, "memory", "measured"))
    title = "Memory predicted by component" + (", and measured" if measured is not None else "")
    mark = None if measured is None else ("measured peak", measured)
    return memory_bars(title, memory_rows(record), limit=limit_of(record), mark=mark)


def _components(planned: Mapping[str, float], measured: Mapping[str, Any]) -> Markup:
    """What each colour is, and its bytes. Activations stand together where they were measured together."""
    found = _measured(measured, planned)
    head = ("component", "predicted", "measured") if found else ("component", "predicted")
    rows: list[tuple[Markup | str, ...]] = []
    for name in COMPONENTS:
        before, after = planned.get(name), found.get(name)
        if not before and not after:
            continue
        cells = (size(before) if name in planned else NONE, size(after) if name in found else NONE)
        rows.append((joined([swatch(name), Markup(name)], ""), *cells[: len(head) - 1]))
    totals = (size(sum(planned.values())), size(sum(found.values())))
    rows.append((tag("b", "at the peak"), *(tag("b", cell) for cell in totals[: len(head) - 1])))
    return table("Memory by component", head, rows, "numbers")


def _at_the_step(measured: Mapping[str, Any]) -> list[Markup]:
    """The states as predicted and as measured for one moment: just before the optimizer steps."""
    given = mapping(measured.get("components"))
    pairs = [(name, at(given.get(name), "predicted"), at(given.get(name), "measured")) for name in STATES]
    rows = [
        (name, size(before), size(after), apart(before, after))
        for name, before, after in pairs
        if amount_of(after) is not None and (amount_of(before) or amount_of(after))
    ]
    if not rows:
        return []
    head = ("state", "predicted", "measured", "off")
    title = "When the optimizer steps"
    return [tag("div", tag("h3", title), table("Memory when the optimizer steps", head, rows, "numbers"))]


def _moments(memory: Mapping[str, Any], measured: Mapping[str, Any]) -> Markup:
    rows = []
    for words, (planned, key) in _MOMENTS.items():
        pair = measured if key is None else mapping(measured.get(key))
        before, after = memory.get(planned), pair.get("measured")
        if amount_of(before) is None and amount_of(after) is None:
            continue
        cells = (words, size(before), size(after), apart(before, after))
        rows.append(cells if measured else cells[:2])
    head = ("moment", "predicted", "measured", "off")
    said = table("Memory at each moment", head if measured else head[:2], rows, "numbers")
    host = {k: v for k, v in mapping(memory.get("host")).items() if amount_of(v)}
    if not host:
        return said
    inside = table(
        "Host memory", ("part", "predicted"), [(name, size(value)) for name, value in host.items()], "numbers"
    )
    return joined([said, details("What the host of a node holds, as predicted", inside)])
