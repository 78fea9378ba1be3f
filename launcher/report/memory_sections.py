"""The section about memory: predicted and measured, by component and by moment. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from launcher.report.plan_sections import MEMORY, Plan, summary
from launcher.report.sections import (
    COMPONENTS,
    Bars,
    Block,
    Group,
    Notes,
    Part,
    Section,
    StackedBar,
    Table,
    Tone,
    filled,
    notes_of,
    table_of,
)
from launcher.report.values import NONE, amount_of, apart, at, cut, listed, mapping, size

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
_MOMENTS = {
    "training": ("total", None),
    "loading": ("load_peak", "load"),
    "evaluating": ("eval_peak", "eval"),
    "saving": ("save_peak", "save"),
    "host of a node": ("host_bytes", "host"),
}
"""Moment -> key of the plan's memory, key of the result's."""
_VISIBLE = 2**19
"""Bytes that are shown as more than 0 MiB."""


def memory_section(plan: Plan, result: Mapping[str, Any] = {}) -> Section | None:
    """What was predicted and, with the result of a run, measured; None where there is neither."""
    memory, measured = mapping(plan.get("memory")), mapping(result.get("memory"))
    columns = {"predicted": predicted_parts(plan), "measured": measured_parts(plan, result)}
    if not any(columns.values()):
        return None
    blocks: list[Block] = [
        Group([*_components(columns), *_at_the_step(measured), *_moments(memory, measured)], "beside")
    ]
    if columns["predicted"]:
        peak = amount_of(measured.get("measured"))
        mark = None if peak is None else ("measured peak", peak)
        title = "Memory predicted by component" + (", and measured" if peak is not None else "")
        blocks.insert(0, Bars(title, memory_bars(plan, result), limit=limit_of(plan), mark=mark))
        if peak is None and (bars := _moment_bars(memory)):
            title, heading = "Memory at each moment", "Moment by moment"
            blocks.append(Bars(title, bars, limit=limit_of(plan), legend=True, heading=heading))
    fits = memory.get("fits")
    tone: Tone = "good" if fits is True else "bad" if fits is False else ""
    blocks += _notes(memory, measured)
    return Section("memory", "Memory of each device", blocks, summary=summary(plan, MEMORY), tone=tone)


_NOTES = (
    "{calibration}",
    "{tight}",
    "each evaluation batch leaves {kept:bytes} more where metrics read predictions, until "
    "trainer.eval_accumulation_steps",
    "host of a node, without data sets: {parts}",
)


def _notes(memory: Mapping[str, Any], measured: Mapping[str, Any]) -> list[Notes]:
    held, high, kept = (amount_of(memory.get(key)) or 0 for key in ("device_bytes", "high", "eval_kept"))
    parts = [
        f"{name} {size(value)}" for name, value in mapping(memory.get("host")).items() if amount_of(value)
    ]
    tight = "the likely peak fits; the upper end of the range would not"
    scope = {
        **memory,
        "tight": tight if memory.get("fits") is True and high > held else None,
        "kept": kept if kept >= _VISIBLE else None,
        "parts": ", ".join(parts),
    }
    found = [filled(note, scope) for note in _NOTES] + [[str(note)] for note in listed(memory.get("notes"))]
    tokens = (
        "[; the longest batch had {tokens.largest:count} of the {tokens.planned:count} tokens planned for]"
    )
    return notes_of([*found, filled("measured by {method}" + tokens, measured)])


def predicted_parts(plan: Plan) -> dict[str, float]:
    """Component -> bytes at the predicted peak of training; empty where nothing was predicted."""
    given = mapping(at(plan, "memory", "components"))
    found = {name: amount_of(given.get(name)) for name in COMPONENTS}
    return {name: value for name, value in found.items() if value is not None}


def measured_parts(plan: Plan, result: Mapping[str, Any]) -> dict[str, float]:
    """The parts of the measured peak: states as measured when the optimizer steps, and the rest.

    Gradients that are incomplete at the predicted peak are part of the rest. Empty if nothing was measured.
    """
    measured, planned = mapping(result.get("memory")), predicted_parts(plan)
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


def memory_bars(plan: Plan, result: Mapping[str, Any], name: str = "") -> list[StackedBar]:
    """The bars of one run: predicted, and measured. name: of the run, if there are several."""
    memory, found = mapping(plan.get("memory")), measured_parts(plan, result)
    low, high = amount_of(memory.get("low")), amount_of(memory.get("high"))
    span = (low, high) if low is not None and high is not None and 0 < low <= high else None
    before = f"{name}: " if name else ""
    bars = []
    if planned := predicted_parts(plan):
        text = size(sum(planned.values()))
        if span and size(low) != size(high):
            first, last = (_number(end, text) for end in span)
            text += f" ({first} to {last})"
        bars.append(StackedBar(f"{before}predicted", planned, text, span))
    if found:
        total = sum(found.values())
        off = apart(sum(planned.values()), total)
        text = f"{size(total)} ({off})" if off != NONE else size(total)
        bars.append(StackedBar(f"{before}measured", found, text))
    return bars


def _number(value: float, beside: str) -> str:
    """The size, without its unit where that is the unit of `beside`: texts of a chart do not wrap."""
    amount, unit = size(value).split()
    return amount if beside.endswith(unit) else f"{amount} {unit}"


def compared_bars(columns: Sequence[tuple[str, Plan]]) -> Bars:
    """Plans on one scale, each with its range and its device. columns: name, and the plan with `memory`."""
    bars = [
        replace(
            bar,
            label=cut(name, _LABEL),
            text=size(bar.total),
            limit=amount_of(at(plan, "memory", "device_bytes")),
        )
        for name, plan in columns
        for bar in memory_bars(plan, {})
    ]
    return Bars("Memory of each device, at the peak of training", bars, legend=True)


def _moment_bars(memory: Mapping[str, Any]) -> list[StackedBar]:
    """A bar for each moment of a step by component, and for those before and after it."""
    bars = [
        StackedBar(_PHASES.get(name, name), {part: amount_of(parts.get(part)) or 0.0 for part in COMPONENTS})
        for name, parts in mapping(memory.get("phases")).items()
        if isinstance(parts, Mapping)
    ]
    whole = {name: amount_of(memory.get(key)) for name, (key, _) in _MOMENTS.items() if key.endswith("_peak")}
    return bars + [StackedBar(name, {_WHOLE: value}) for name, value in whole.items() if value]


def limit_of(plan: Plan) -> tuple[str, float] | None:
    """The size of a device."""
    held = amount_of(at(plan, "memory", "device_bytes"))
    return ("the device holds", held) if held else None


_COMPARED = {"predicted": "{predicted:bytes}", "measured": "{measured:bytes}", "off": "{off}"}


def _components(columns: Mapping[str, Mapping[str, float]]) -> list[Table]:
    """Activations are one row where they were measured together."""
    scopes: list[dict[str, Any]] = [
        {"name": Part(name), **{key: parts.get(name) for key, parts in columns.items()}}
        for name in COMPONENTS
        if any(parts.get(name) for parts in columns.values())
    ]
    scopes.append(
        {"name": "at the peak", **{key: sum(parts.values()) for key, parts in columns.items() if parts}}
    )
    head = {"component": "{name}", **_COMPARED}
    return table_of("Memory by component", head, scopes, "numbers", "By component at the peak")


def _at_the_step(measured: Mapping[str, Any]) -> list[Table]:
    """The states as predicted and as measured just before the optimizer steps."""
    given = {name: mapping(mapping(measured.get("components")).get(name)) for name in _STATES}
    scopes = [
        _compared(name, pair.get("predicted"), pair.get("measured"))
        for name, pair in given.items()
        if amount_of(pair.get("measured")) is not None and any(map(amount_of, pair.values()))
    ]
    head = {"state": "{name}", **_COMPARED}
    return table_of("Memory when the optimizer steps", head, scopes, "numbers", "When the optimizer steps")


def _moments(memory: Mapping[str, Any], measured: Mapping[str, Any]) -> list[Table]:
    """Each peak; predicted as by the plan, or else as the result has it."""
    scopes = []
    for moment, (planned, key) in _MOMENTS.items():
        given = measured if key is None else mapping(measured.get(key))
        before, after = memory.get(planned, given.get("predicted")), given.get("measured")
        if amount_of(before) is not None or amount_of(after) is not None:
            scopes.append(_compared(moment, before, after))
    head = {"moment": "{name}", **_COMPARED}
    return table_of("Memory at each moment", head, scopes, "numbers", "At each moment")


def _compared(name: str, before: Any, after: Any) -> dict[str, Any]:
    off = apart(before, after)
    return {"name": name, "predicted": before, "measured": after, "off": None if off == NONE else off}
