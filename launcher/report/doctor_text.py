"""The findings of `doctor`, for a terminal and for a bug tracker. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from launcher.errors import printable
from launcher.knowledge.doctor.check import CheckResult
from launcher.report.tables import table, wrapped

_SIGNS = {"ok": "ok", "warn": "WARN", "fail": "FAIL", "skip": "-"}


def doctor_text(findings: Sequence[CheckResult], asked: str | None) -> str:
    """One line per check, with an explanation of problems."""
    return "\n".join([*finding_lines(findings), "", verdict_line(findings, asked)]) + "\n"


def finding_lines(findings: Sequence[CheckResult]) -> list[str]:
    """The checks without the conclusion."""
    lines = []
    width = max(len(finding.title) for finding in findings)
    for finding in findings:
        verdict = finding.verdict
        head = f"{_SIGNS[verdict.status]:<4}  {finding.title:<{width}}  {verdict.found}"
        lines += wrapped(head.rstrip())
        if verdict.status in ("warn", "fail"):
            explained = verdict.message + (f" ({verdict.hint})" if verdict.hint else "")
            lines += wrapped(explained, " " * 8)
        elif verdict.message:
            lines += wrapped(verdict.message, " " * 8)
    return lines


def verdict_line(findings: Sequence[CheckResult], asked: str | None) -> str:
    """The conclusion in one sentence."""
    failed = [finding.id for finding in findings if finding.verdict.status == "fail"]
    warned = sum(finding.verdict.status == "warn" for finding in findings)
    more = f"; {warned} warning{'s' if warned > 1 else ''}" if warned else ""
    subject = f"this machine can{'not' if failed else ''} run {printable(asked)}" if asked else (
        "problems found on this machine" if failed else "no problems found on this machine"
    )  # fmt: skip
    return subject + (f": {', '.join(failed)}" if failed else "") + more


def bundle_text(
    findings: Sequence[dict[str, Any]], machine: dict[str, Any], asked: str | None, version: str
) -> str:
    """The report of `doctor --bundle`, as Markdown; its values are already redacted."""
    rows = [["status", "check", "found", "meaning"]]
    for entry in findings:
        meaning = entry["message"] + (f" ({entry['hint']})" if entry["hint"] else "")
        rows.append([entry["status"], entry["id"], printable(entry["found"]), printable(meaning)])
    lines = [f"# effilaunch {version}: doctor", ""]
    if asked:
        lines += [f"Asked: can this machine run {printable(asked)}?", ""]
    lines += ["Secrets, names of persons and machines, home folders and addresses were removed.", ""]
    lines += ["```", *table(rows, ""), "```", "", "## Machine", ""]
    return "\n".join([*lines, "```json", json.dumps(machine, indent=1, default=str), "```", ""])
