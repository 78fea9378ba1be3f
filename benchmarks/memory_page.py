"""The accuracy of memory predictions as one self-contained page: bars and a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.facts.hardware import MIB
from launcher.report.html.charts import Bar, legend, stacked_bars
from launcher.report.html.elements import joined, table, tag
from launcher.report.html.page import Section, page
from launcher.report.tables import BYTES, amount

if TYPE_CHECKING:
    from comparison import Compared


def write_page(path: Path, rows: Sequence[Compared], summaries: Sequence[str], versions: str) -> None:
    """Write the page of these rows; `summaries`: a sentence for each group."""
    about = [
        "Predicted is the peak of training by the closed form (T0), made from the configuration alone. "
        "Measured is the peak of two real optimizer steps on a CPU, from the allocations that torch's "
        f"profiler saw ({versions}); published is what others measured on GPUs.",
        *summaries,
        "Bars are predicted by component; the mark is the measured peak.",
    ]
    sections = [
        Section("summary", "Summary", joined(tag("p", text) for text in about)),
        _bars("cpu", "Small models on a CPU", [one for one in rows if not _is_published(one)]),
        _bars("gpu", "Published peaks on GPUs", [one for one in rows if _is_published(one)]),
        Section("rows", "Every row", table("Every row", HEAD, _cells(rows))),
    ]
    title = "Memory: predicted and measured"
    path.write_text(
        page(title, [tag("h1", title)], sections, "benchmarks/memory_accuracy.py"), encoding="utf-8"
    )


def _is_published(one: Compared) -> bool:
    return one.half.startswith(("published", "elsewhere"))


def _bars(name: str, title: str, rows: Sequence[Compared]) -> Section | None:
    if not rows:
        return None
    bars = []
    for one in rows:
        text = f"{amount(one.t0, BYTES)} predicted, {amount(one.measured, BYTES)} measured"
        bars.append(Bar(one.name, one.components, f"{text} ({percent(one.error('t0'))})", None, one.measured))
    return Section(name, title, joined([legend(bars), stacked_bars(title, bars)]))


def percent(error: float | None) -> str:
    """A signed error; no sign on what rounds to nothing."""
    if error is None:
        return ""
    return "0.0%" if abs(error) < 0.0005 else f"{error:+.1%}"


def mib(size: int | None) -> str:
    return "" if size is None else f"{size / MIB:,.1f}"


HEAD = ("row", "half", "measured, MiB", "T0, MiB", "error", "T1, MiB", "error", "low to high, MiB")


def _cells(rows: Sequence[Compared]) -> list[list[str]]:
    return [
        [one.name, one.half, mib(one.measured), mib(one.t0), percent(one.error("t0")), mib(one.t1),
         percent(one.error("t1")), f"{mib(one.low)} to {mib(one.high)}"]
        for one in rows
    ]  # fmt: skip
