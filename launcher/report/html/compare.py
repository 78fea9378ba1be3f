"""Sections of a page that compares runs: results, curves, settings that differ, memory. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.execute.record import RunRecord
from launcher.report.html.charts import Curve, legend, stacked_bars
from launcher.report.html.elements import (
    NONE,
    Markup,
    apart,
    at,
    code,
    count,
    figure,
    joined,
    mapping,
    parameters,
    rate,
    shown,
    size,
    table,
    tag,
)
from launcher.report.html.memory import limit_of, memory_rows
from launcher.report.html.page import PageSection
from launcher.report.html.plan_sections import hardware_text, method_text
from launcher.report.html.run_sections import STATES, charts, losses, points, scores, steps_done, time_text

_VALUE = 300
"""Characters shown of a setting."""


def about(records: Sequence[RunRecord], names: Sequence[str]) -> Markup:
    rows = [
        (
            name,
            STATES[r.state],
            str(at(r.plan, "model", "name") or NONE),
            method_text(r),
            hardware_text(r),
            code(r.run_dir),
        )
        for r, name in zip(records, names, strict=True)
    ]
    return table("Runs", ("run", "state", "model", "trains", "on", "run directory"), rows, "stack")


def sections(records: Sequence[RunRecord], names: Sequence[str]) -> list[PageSection | None]:
    return [
        PageSection("results", "Results", _results(records, names)),
        _training(records, names),
        _settings(records, names),
        _memory(records, names),
        _software(records, names),
    ]


_MEASURES: tuple[tuple[str, Callable[[RunRecord], str]], ...] = (
    ("steps", lambda r: count(steps_done(r))),
    ("loss at the first step", lambda r: figure(losses(r)[0])),
    ("loss at the last step", lambda r: figure(losses(r)[1])),
    ("tokens", lambda r: count(r.result.get("tokens"))),
    ("tokens per second", lambda r: rate(r.result.get("tokens_per_second"))),
    ("time", time_text),
    ("parameters trained", lambda r: parameters(at(r.plan, "model", "trainable"))),
    ("samples per step", lambda r: count(at(r.plan, "batch", "global"))),
    ("memory predicted", lambda r: size(at(r.plan, "memory", "total"))),
    ("memory measured", lambda r: size(at(r.result, "memory", "measured"))),
    (
        "measured against predicted",
        lambda r: apart(at(r.plan, "memory", "total"), at(r.result, "memory", "measured")),
    ),
    ("host memory measured", lambda r: size(at(r.result, "memory", "host", "measured"))),
    ("restarts", lambda r: str(len(r.restarts))),
)


def _results(records: Sequence[RunRecord], names: Sequence[str]) -> Markup:
    rows = [(name, *map(text_of, records)) for name, text_of in _MEASURES]
    found = [scores(record) for record in records]
    for name in dict.fromkeys(key for each in found for key in each):
        title = name.replace("eval_", "held-out ").replace("_", " ")
        rows.insert(3, (title, *(figure(each.get(name)) for each in found)))
    rows = [row for row in rows if any(cell not in (NONE, "0") for cell in row[1:])]
    return table("Results", ("", *names), rows, "numbers")


def _training(records: Sequence[RunRecord], names: Sequence[str]) -> PageSection | None:
    lines = {
        column: [
            Curve(name, points(record, column), marked=column == "eval_loss")
            for record, name in zip(records, names, strict=True)
        ]
        for column in ("loss", "eval_loss", "learning_rate", "tokens_per_second")
    }
    if not any(line.found for found in lines.values() for line in found):
        return None
    return PageSection("training", "Training", charts(lines))


def differing(records: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Setting -> its value in each run, where they differ; None where a run has no such setting."""
    every = [mapping(record.plan.get("settings")) for record in records]
    return _differing([{key: at(value, "value") for key, value in each.items()} for each in every])


def _differing(every: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    keys = sorted({key for each in every for key in each})
    found = {key: [each.get(key) for each in every] for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def _settings(records: Sequence[RunRecord], names: Sequence[str]) -> PageSection:
    found = differing(records)
    equal = len({key for record in records for key in mapping(record.plan.get("settings"))}) - len(found)
    rows = [(code(key), *(code(shown(v)[:_VALUE]) for v in values)) for key, values in found.items()]
    text = f"The other {equal} settings are equal." if rows else f"None of the {equal} settings differs."
    parts = [table("Settings that differ", ("setting", *names), rows)] if rows else []
    body = joined([*parts, tag("p", text, class_="soft small")])
    return PageSection("settings", "Settings that differ", body)


def _memory(records: Sequence[RunRecord], names: Sequence[str]) -> PageSection | None:
    bars = [bar for r, name in zip(records, names, strict=True) for bar in memory_rows(r, name)]
    if not bars:
        return None
    limits = {limit_of(record) for record in records}
    limit = limits.pop() if len(limits) == 1 else None
    body = joined([legend(bars), stacked_bars("Memory of each run", bars, limit=limit)])
    return PageSection("memory", "Memory of each device", body)


def _software(records: Sequence[RunRecord], names: Sequence[str]) -> PageSection | None:
    """Versions that differ."""
    every = [{k: v for k, v in record.environment.items() if isinstance(v, str)} for record in records]
    if not any(every):
        return None
    rows = [(key, *(value or NONE for value in values)) for key, values in _differing(every).items()]
    body = table("Versions that differ", ("", *names), rows) if rows else tag("p", "All versions are equal.")
    return PageSection("versions", "Versions", body)
