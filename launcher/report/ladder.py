"""A climbed ladder: one line a rung, a table, and a page with plots. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.report.html.charts import Bar, legend, stacked_bars
from launcher.report.html.elements import Markup, joined, tag
from launcher.report.html.elements import table as html_table
from launcher.report.html.page import Section, page
from launcher.report.tables import BYTES, amount, table

HEAD = ("rung", "predicted", "measured", "off", "load", "seconds", "metric", "what it does")
REASON = 96
"""Characters of a reason that a table shows; ladder.json has all of it."""


def rung_line(rung: Mapping[str, Any]) -> str:
    """How one rung ended."""
    if rung["status"] != "done":
        return f"{rung['id']}: {rung['status']}: {_cut(rung['reason'] or '')}"
    metric = rung["metric"]
    return (
        f"{rung['id']}: measured {_bytes(rung['measured'])}, predicted {_bytes(rung['predicted'])} "
        f"({_off(rung)}), {rung['seconds']:.1f} s, {metric['name']} {_number(metric['value'])}"
    )


def ladder_text(data: Mapping[str, Any], folder: str) -> str:
    """The table, and where the rest lies."""
    rows = [HEAD, *(_row(rung) for rung in data["rungs"])]
    title = f"{data['recipe']} on {data['hardware']}: {data['steps']} steps of {data['batch']} samples"
    return "\n".join(["", title, *table(rows), "", f"{folder}/ladder.html has the plots"]) + "\n"


def _row(rung: Mapping[str, Any]) -> tuple[str, ...]:
    metric = rung["metric"]
    said = rung["title"] if rung["status"] == "done" else f"{rung['status']}: {_cut(rung['reason'] or '')}"
    return (
        rung["id"],
        _bytes(rung["predicted"]),
        _bytes(rung["measured"]),
        _off(rung),
        _bytes(rung["load"]),
        "" if rung["seconds"] is None else f"{rung['seconds']:.1f}",
        "" if metric is None else f"{metric['name']} {_number(metric['value'])}",
        said,
    )


def _bytes(size: float | None) -> str:
    return "" if size is None else amount(size, BYTES)


def _off(rung: Mapping[str, Any]) -> str:
    """How far the prediction is from the measurement."""
    if not rung["measured"] or rung["predicted"] is None:
        return ""
    return f"{rung['predicted'] / rung['measured'] - 1:+.1%}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _cut(reason: str) -> str:
    return reason if len(reason) <= REASON else reason[: REASON - 1].rstrip() + "…"


def ladder_page(data: Mapping[str, Any]) -> str:
    """Table and plots as one HTML file."""
    rungs = data["rungs"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(data["versions"].items()))
    about = [
        f"{data['recipe']}: {data['model']} on {data['hardware']}; every rung trains on the samples of "
        f"{data['steps']} steps of {data['batch']}.",
        "Bars are the predicted memory of one device by component, at the peak of training; marks are what "
        "was measured.",
        f"Measured with {versions}.",
    ]
    changed = [
        (rung["id"], _changes(rung["changed"]), ", ".join(rung["keeps"]) or "the start", _ended(rung))
        for rung in rungs
    ]
    bars = _memory_bars(data)
    limit = ("device", float(data["device_bytes"])) if data["device_bytes"] else None
    memory = [
        *(tag("p", text) for text in about),
        legend(bars),
        stacked_bars("Predicted by component, and measured", bars, limit=limit),
        html_table("Rungs", HEAD, [_row(rung) for rung in rungs]),
    ]
    head = ("rung", "changes", "keeps the changes of", "ended")
    sections = [
        Section("memory", "Memory", joined(memory)),
        Section(
            "time",
            "Seconds of training",
            _values("Seconds", "s", {r["id"]: r["seconds"] for r in rungs if r["seconds"] is not None}),
        ),
        *_metrics(rungs),
        Section("changes", "What each rung changes", html_table("Changes", head, changed)),
    ]
    title = f"Memory ladder of {data['model']}"
    return page(title, [tag("h1", title)], sections, f"ladder.json of {data['recipe']}")


def _changes(changed: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {json.dumps(value)}" for key, value in changed.items()) or "nothing"


def _ended(rung: Mapping[str, Any]) -> str:
    return f"{rung['status']}: {rung['reason']}" if rung["reason"] else str(rung["status"])


def _memory_bars(data: Mapping[str, Any]) -> list[Bar]:
    return [
        Bar(
            rung["id"],
            {name: float(size) for name, size in (rung["components"] or {}).items()},
            "" if rung["status"] == "done" else _cut(_ended(rung)),
            measured=rung["measured"],
        )
        for rung in data["rungs"]
    ]


def _values(title: str, unit: str, values: Mapping[str, float | None]) -> Markup:
    """One bar a rung; only the text of a value that has no bar."""
    bars = [
        Bar(
            rung, {title: value} if value and value > 0 else {}, "" if value and value > 0 else _number(value)
        )
        for rung, value in values.items()
    ]
    return stacked_bars(title, bars, unit=unit)


def _metrics(rungs: Sequence[Mapping[str, Any]]) -> list[Section]:
    """One chart for each metric, since they need not share a scale."""
    found = [rung for rung in rungs if rung["metric"] is not None]
    sections = []
    for place, name in enumerate(dict.fromkeys(rung["metric"]["name"] for rung in found)):
        values = {r["id"]: r["metric"]["value"] for r in found if r["metric"]["name"] == name}
        body = _values(f"{name} at the end", "", values)
        sections.append(Section(f"metric-{place}", f"At the end: {name}", body))
    return sections
