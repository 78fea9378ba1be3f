"""Whole pages: of a run, of a plan, of several runs. One file each; no script, nothing loaded. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.execute.record import RunRecord
from launcher.report.html import compare
from launcher.report.html.data import data_section
from launcher.report.html.elements import Markup, joined, tag
from launcher.report.html.endings import ending_section
from launcher.report.html.memory import memory_section
from launcher.report.html.results import result_section
from launcher.report.html.sections import (
    Section,
    about,
    command_section,
    decisions_section,
    environment_section,
    fixes_section,
    state_of,
    tiles,
)
from launcher.report.html.style import STYLE
from launcher.report.html.training import training_section

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def run_page(record: RunRecord, made: str) -> str:
    """The report of one run, or of a plan. made: when and by which version, said at the end of the page."""
    kind = "plan" if record.state == "planned" else "report"
    found = (
        ending_section(record),
        training_section(record),
        result_section(record),
        memory_section(record),
        decisions_section(record),
        fixes_section(record),
        data_section(record),
        environment_section(record),
        command_section(record),
    )
    top = [
        tag("p", f"effilaunch {kind}", class_="over"),
        tag("div", tag("h1", record.name), state_of(record), class_="title"),
        *about(record),
        tiles(record),
    ]
    return _page(f"{record.name}: {record.state}", top, [section for section in found if section], made)


def compare_page(records: Sequence[RunRecord], names: Sequence[str], made: str) -> str:
    """Several runs beside each other. names: unlike each other, one a run."""
    top = [
        tag("p", "effilaunch report", class_="over"),
        tag("h1", f"{len(records)} runs compared"),
        compare.about(records, names),
    ]
    found = compare.sections(records, names)
    return _page(f"{len(records)} runs compared", top, [section for section in found if section], made)


def _page(title: str, top: Sequence[Markup], sections: Sequence[Section], made: str) -> str:
    links = (tag("li", tag("a", section.heading, href=f"#{section.id}")) for section in sections)
    nav = tag("nav", tag("ul", *links), aria_label="Sections")
    parts = [
        tag("section", tag("h2", section.heading, id=f"{section.id}-heading"), section.body, id=section.id,
            aria_labelledby=f"{section.id}-heading")
        for section in sections
    ]  # fmt: skip
    body = tag(
        "div", tag("header", *top), nav, tag("main", *parts), tag("footer", tag("p", made)), class_="page"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        tag("style", Markup(STYLE)),
    )
    whole = tag("html", joined([head, tag("body", body)]), lang="en")
    return f"<!DOCTYPE html>\n{whole}\n"


def plan_record(data: Mapping[str, Any], name: str, recipe: str, problems: Sequence[str]) -> RunRecord:
    """A plan that is in no run directory, as a record: `data` is what `plan --json` says."""
    return RunRecord(name=name, state="planned", plan=data, recipe=recipe, problems=problems)
