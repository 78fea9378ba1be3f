"""The accuracy of memory predictions as one self-contained page: bars, scatter, table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.facts.hardware import MIB
from launcher.report.plots import Bar, Point, Section, page, scatter, stacked_bars

if TYPE_CHECKING:
    from memory_accuracy import Compared

BAND = 0.12
"""Shaded around equality: the largest error that the closed form shall make."""


def write_page(path: Path, rows: Sequence[Compared], summaries: Sequence[str], versions: str) -> None:
    """Write the page of these rows; `summaries`: a sentence for each group."""
    measured = [one for one in rows if one.half != "published"]
    published = [one for one in rows if one.half == "published"]
    sections = [
        Section(
            "Summary",
            [
                "Predicted is the peak of training by the closed form (T0), made from the configuration "
                "alone. Measured is the peak of two real optimizer steps on a CPU, from the "
                f"allocations that torch's profiler saw ({versions}); published is what others measured "
                "on GPUs.",
                *summaries,
            ],
        ),
        Section("Predicted against measured", plots=_scatters(measured, published)),
        Section("Components", ["The mark is the measured peak."], _bars(measured, published)),
        Section("Every row", table=_table(rows)),
    ]
    path.write_text(page("Memory: predicted and measured", sections), encoding="utf-8")


def _scatters(measured: Sequence[Compared], published: Sequence[Compared]) -> list[str]:
    plots = []
    for title, rows in (("Small models on a CPU", measured), ("Published peaks on GPUs", published)):
        points = [Point(one.name, one.measured, one.t0, f"{one.half}, T0") for one in rows]
        points += [
            Point(one.name, one.measured, one.t1, f"{one.half}, T1") for one in rows if one.t1 is not None
        ]
        if points:
            plots.append(scatter(title, points, band=BAND))
    return plots


def _bars(measured: Sequence[Compared], published: Sequence[Compared]) -> list[str]:
    plots = []
    for title, rows in (("Small models on a CPU", measured), ("Published peaks on GPUs", published)):
        if rows:
            bars = [Bar(one.name, one.components, one.measured, percent(one.error("t0"))) for one in rows]
            plots.append(stacked_bars(title, bars))
    return plots


def percent(error: float | None) -> str:
    """A signed error; no sign on what rounds to nothing."""
    if error is None:
        return ""
    return "0.0%" if abs(error) < 0.0005 else f"{error:+.1%}"


def mib(size: int | None) -> str:
    return "" if size is None else f"{size / MIB:,.1f}"


def _table(rows: Sequence[Compared]) -> list[list[str]]:
    head = ["row", "half", "measured, MiB", "T0, MiB", "error", "T1, MiB", "error", "low to high, MiB"]
    return [
        head,
        *(
            [one.name, one.half, mib(one.measured), mib(one.t0), percent(one.error("t0")), mib(one.t1),
             percent(one.error("t1")), f"{mib(one.low)} to {mib(one.high)}"]
            for one in rows
        ),
    ]  # fmt: skip
