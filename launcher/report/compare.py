"""Sections of a page that compares runs: results, curves, settings that differ, memory. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.execute.record import RunRecord
from launcher.report.memory_sections import limit_of, memory_bars
from launcher.report.plan_sections import facts, hardware_text
from launcher.report.run_sections import STATES, points, run_rows
from launcher.report.sections import Bars, Code, Curve, Curves, Fact, Row, Section, Table, Text, rows_of
from launcher.report.values import NONE, at, mapping, shown


def sections(records: Sequence[RunRecord], names: Sequence[str]) -> list[Section | None]:
    return [
        Section("results", "Results", [_results(records, names)]),
        _training(records, names),
        _settings(records, names),
        _memory(records, names),
        _software(records, names),
    ]


_RUN = (Fact("state", "{state}"), Fact("on", "{on}"), Fact("run directory", "`{run_dir}`"))


def _results(records: Sequence[RunRecord], names: Sequence[str]) -> Table:
    """What each run is, what was measured, and what was planned."""
    found: list[dict[str, Row]] = []
    for record in records:
        own = {"state": STATES[record.state], "on": hardware_text(record.plan), "run_dir": record.run_dir}
        measured = {row.name: row for row in (*rows_of(_RUN, own), *run_rows(record))}
        found.append(measured | {f"planned: {row.name}": row for row in facts(record.plan)})
    keys = dict.fromkeys(key for each in found for key in each)
    rows = [
        (key, *([each[key].value, each[key].note] if key in each else NONE for each in found)) for key in keys
    ]
    return Table("Results", ("", *names), rows, "stack")


def _training(records: Sequence[RunRecord], names: Sequence[str]) -> Section | None:
    lines = {
        column: [
            Curve(name, points(record, column), marked=column == "eval_loss")
            for record, name in zip(records, names, strict=True)
        ]
        for column in ("loss", "eval_loss", "learning_rate", "tokens_per_second")
    }
    if not any(line.found for found in lines.values() for line in found):
        return None
    return Section("training", "Training", [Curves(lines)])


def differing(records: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Setting -> its value in each run, where they differ; None where a run has no such setting."""
    every = [mapping(record.plan.get("settings")) for record in records]
    return _differing([{key: at(value, "value") for key, value in each.items()} for each in every])


def _differing(every: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    keys = sorted({key for each in every for key in each})
    found = {key: [each.get(key) for each in every] for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def _settings(records: Sequence[RunRecord], names: Sequence[str]) -> Section:
    found = differing(records)
    equal = len({key for record in records for key in mapping(record.plan.get("settings"))}) - len(found)
    rows = [(Code(key), *(Code(shown(value)) for value in values)) for key, values in found.items()]
    text = f"The other {equal} settings are equal." if rows else f"None of the {equal} settings differs."
    table = [Table("Settings that differ", ("setting", *names), rows)] if rows else []
    return Section("settings", "Settings that differ", [*table, Text([text], "soft")])


def _memory(records: Sequence[RunRecord], names: Sequence[str]) -> Section | None:
    bars = [
        bar for r, name in zip(records, names, strict=True) for bar in memory_bars(r.plan, r.result, name)
    ]
    limits = {limit_of(record.plan) for record in records}
    chart = Bars("Memory of each run", bars, limit=limits.pop() if len(limits) == 1 else None, legend=True)
    return Section("memory", "Memory of each device", [chart]) if bars else None


def _software(records: Sequence[RunRecord], names: Sequence[str]) -> Section | None:
    """Versions that differ."""
    every = [{k: v for k, v in record.environment.items() if isinstance(v, str)} for record in records]
    if not any(every):
        return None
    rows = [(key, *(value or NONE for value in values)) for key, values in _differing(every).items()]
    table = Table("Versions that differ", ("", *names), rows)
    return Section("versions", "Versions", [table if rows else Text(["All versions are equal."])])
