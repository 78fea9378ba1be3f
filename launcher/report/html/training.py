"""How the training went, as curves and rows: a part of a page. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.execute.record import RunRecord
from launcher.report.curves import Curve, Event, Point, curves
from launcher.report.html.elements import Markup, details, joined, table, tag
from launcher.report.html.sections import Section
from launcher.report.html.values import at, count, figure, number, objects, several, size

ROWS = 200
"""Rows of the metrics that a table shows."""
_COLUMNS = (
    "step",
    "loss",
    "eval_loss",
    "learning_rate",
    "grad_norm",
    "tokens",
    "tokens_per_second",
    "memory",
)


def points(record: RunRecord, column: str) -> list[Point]:
    """Step and value of the rows that have this column, by step; what is not finite is a gap."""
    found = [
        (step, number(row[column]))
        for row in record.metrics
        if column in row and (step := number(row.get("step"))) is not None
    ]
    return sorted(found, key=lambda point: point[0])


def training_section(record: RunRecord) -> Section | None:
    """Loss, learning rate, speed and gradients over the steps; None for a plan."""
    if record.state in ("planned", "not started"):
        return None
    if not record.metrics:
        body = tag("p", "No step was logged: the run ended, or is, before its first one.", class_="soft")
        return Section("training", "Training", body)
    pictures = tag("div", *_pictures(record), class_="charts")
    return Section("training", "Training", joined([pictures, _rows(record.metrics)]))


def _pictures(record: RunRecord) -> Iterator[Markup]:
    events = events_of(record)
    losses = [Curve("training", points(record, "loss"))]
    if held_out := points(record, "eval_loss"):
        losses.append(Curve("held out", held_out, marked=True))
    yield tag("div", curves("Loss", losses, spread=True, events=events), class_="first")
    for column, title, unit in (
        ("learning_rate", "Learning rate", ""),
        ("tokens_per_second", "Tokens a second", ""),
        ("grad_norm", "Gradient norm", ""),
    ):
        found = points(record, column)
        if any(value is not None for _, value in found):
            line = Curve("last", found)
            yield curves(
                title,
                [line],
                unit=unit,
                from_zero=column != "grad_norm",
                spread=column == "grad_norm",
                events=events,
            )


def events_of(record: RunRecord) -> list[Event]:
    """Where the run was started again, and where it went on with less memory."""
    found = [
        Event(step, "restart") for row in record.restarts if (step := number(row.get("step"))) is not None
    ]
    adapted = objects(at(record.plan, "adapted", "adaptations"))
    return found + [
        Event(step, "adapted") for row in adapted if (step := number(row.get("step"))) is not None
    ]


def _rows(metrics: Sequence[Mapping[str, Any]]) -> Markup:
    """Some of the rows, evenly spread, the last one among them."""
    apart = max(1, math.ceil(len(metrics) / ROWS))
    shown = [metrics[i] for i in range((len(metrics) - 1) % apart, len(metrics), apart)]
    columns = [name for name in _COLUMNS if any(name in row for row in shown)]
    cells = [[_cell(name, row.get(name)) for name in columns] for row in shown]
    note = "" if len(shown) == len(metrics) else f"every {apart}th of {len(metrics):,} rows"
    said = table("Logged steps", [name.replace("_", " ") for name in columns], cells, "numbers")
    return details(several(len(shown), "logged row"), said, note=note)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if number(value) is None:
        return "not finite"
    return (
        size(value) if column == "memory" else count(value) if column in ("step", "tokens") else figure(value)
    )
