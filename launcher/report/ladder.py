"""A climbed ladder: one line a rung, a table, and a page with plots. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.report.plots import Bar, Section, Series, lines, page, stacked_bars
from launcher.report.svg import BYTES, amount
from launcher.report.tables import table

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
        "Bars are what was predicted for one device, by component, at the moment of training that needs "
        "most; the marks are what was measured.",
        f"Measured with {versions}.",
    ]
    changed = [("rung", "changes", "keeps the changes of", "ended")]
    changed += [
        (rung["id"], _changes(rung["changed"]), ", ".join(rung["keeps"]) or "the start", _ended(rung))
        for rung in rungs
    ]
    sections = [
        Section("Memory", about, [_memory_plot(data)], [HEAD, *(_row(rung) for rung in rungs)]),
        Section("Time", ["Seconds of training alone."], [_seconds_plot(rungs)]),
        *(Section(f"At the end: {name}", plots=[plot]) for name, plot in _metric_plots(rungs)),
        Section("What each rung changes", table=changed),
    ]
    return page(f"Memory ladder of {data['model']}", sections)


def _changes(changed: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {json.dumps(value)}" for key, value in changed.items()) or "nothing"


def _ended(rung: Mapping[str, Any]) -> str:
    return f"{rung['status']}: {rung['reason']}" if rung["reason"] else str(rung["status"])


def _memory_plot(data: Mapping[str, Any]) -> str:
    bars = [
        Bar(
            f"{rung['id']}",
            {name: float(size) for name, size in (rung["components"] or {}).items()},
            rung["measured"],
            "" if rung["status"] == "done" else f"{rung['status']}: {rung['reason'] or ''}",
        )
        for rung in data["rungs"]
    ]
    largest, held = max((bar.total for bar in bars), default=0.0), data["device_bytes"]
    # A device that is many times larger would leave the bars without length.
    limit = ("device", float(held)) if held and held <= 3 * largest else None
    return stacked_bars("Predicted by component, and measured", bars, limit=limit)


def _seconds_plot(rungs: Sequence[Mapping[str, Any]]) -> str:
    done = [rung for rung in rungs if rung["seconds"] is not None]
    return stacked_bars("Seconds", [Bar(r["id"], {"seconds": r["seconds"]}) for r in done], unit="s")


def _metric_plots(rungs: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """One plot for each metric, since they need not share a scale."""
    found = [rung for rung in rungs if rung["metric"] is not None]
    names = dict.fromkeys(rung["metric"]["name"] for rung in found)
    plots = []
    for name in names:
        values = [r["metric"]["value"] if r["metric"]["name"] == name else None for r in found]
        plots.append((name, lines(f"{name} at the end", [r["id"] for r in found], [Series(name, values)])))
    return plots
