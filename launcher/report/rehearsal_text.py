"""What a rehearsal will do, measured and found, for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.doctor.units import amount, duration, rate
from launcher.facts.rehearsal_course import Course
from launcher.knowledge.doctor import Finding
from launcher.knowledge.lint.document import printable
from launcher.report.doctor_text import finding_lines
from launcher.report.tables import table


def course_line(course: Course, ranks: int, run_dir: str) -> str:
    """What comes, and how long it may take at most."""
    what = f"{course.seconds:g} s of all-reduce, then links, devices and a save" if ranks > 1 else "a save"
    wait = f"; a rank that has not come after {course.meet_s:.0f} s is named" if ranks > 1 else ""
    return f"rehearsal in {run_dir}: {what}, at most {course.limit_s(ranks) / 60:.0f} minutes{wait}"


def rehearsal_text(findings: Sequence[Finding], measured: Mapping[str, Any], asked: str, run_dir: str) -> str:
    """The numbers as tables, then a line a check, as `doctor` writes them."""
    lines = [*_all_reduce(measured.get("all_reduce") or []), *_links(measured), ""]
    lines += [*finding_lines(findings), "", _verdict(findings, asked), f"logs and result.json in {run_dir}"]
    return "\n".join(lines).lstrip("\n") + "\n"


def _all_reduce(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    cells = [["all-reduce", "median", "fastest", "slowest", "messages", "bus bandwidth"]]
    cells += [
        [amount(row["bytes"]), duration(row["median_s"]), duration(row["min_s"]), duration(row["max_s"]),
         str(row["count"]), rate(row["bus_bytes_per_s"])]
        for row in rows
    ]  # fmt: skip
    return table(cells)


MOST_LINKS = 12
"""Links that are shown: the slowest ones; result.json has all."""


def _links(measured: Mapping[str, Any]) -> list[str]:
    rows = sorted(measured.get("links") or [], key=lambda row: float(row["bytes_per_s"]))
    if not rows:
        return []
    ranks = {facts["rank"]: facts for facts in measured["ranks"]}
    several = len({(facts["node"], facts["host"]) for facts in ranks.values()}) > 1

    def name(rank: int) -> str:
        facts = ranks[rank]
        return f"{facts['host']} ({facts['interface']})" if several else f"rank {rank}"

    cells = [["link from", "to", "bandwidth", "latency"]]
    cells += [
        [name(row["from"]), name(row["to"]), rate(row["bytes_per_s"]), duration(row["latency_s"])]
        for row in rows[:MOST_LINKS]
    ]
    more = [f"  and {len(rows) - MOST_LINKS} faster ones"] if len(rows) > MOST_LINKS else []
    return ["", *table(cells), *more]


def _verdict(findings: Sequence[Finding], asked: str) -> str:
    failed = [finding.id for finding in findings if finding.verdict.status == "fail"]
    warned = sum(finding.verdict.status == "warn" for finding in findings)
    more = f"; {warned} warning{'s' if warned > 1 else ''}" if warned else ""
    if failed:
        return f"the rehearsal of {printable(asked)} failed: {', '.join(failed)}{more}"
    return f"the rehearsal of {printable(asked)} went well{more}"
