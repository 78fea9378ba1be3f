"""How a run ended, and what came before: failures, restarts, adaptations. A part of a page. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.execute.record import RunRecord
from launcher.report.diagnosis_text import ranks_text
from launcher.report.html.elements import Markup, block, code, joined, table, tag
from launcher.report.html.sections import Section, steps_done
from launcher.report.html.values import at, count, duration, listed, mapping, number, objects, said, several

_ERROR = 4000
"""Characters of an error that are shown."""
_FRAMES = 8
"""Calls of a traceback, the innermost ones."""
_ROWS = 100


def ending_section(record: RunRecord) -> Section | None:
    """None where nothing happened that is worth a word."""
    parts = [*_how(record), *_findings(record), *_restarts(record), *_adaptations(record)]
    if not parts:
        return None
    heading = {"failed": "What went wrong", "stopped": "How it stopped", "planned": "Why it does not fit"}
    return Section("ending", heading.get(record.state, "What happened on the way"), joined(parts))


def _how(record: RunRecord) -> Iterator[Markup]:
    step = count(steps_done(record))
    goes_on = _saved(record)
    if record.state == "planned":
        if record.problems:
            yield tag("div", *(tag("p", problem) for problem in record.problems), class_="card bad")
        return
    if record.state == "failed":
        findings = objects(record.diagnosis.get("findings"))
        if record.problems and not findings:
            yield tag("div", *(tag("p", problem) for problem in record.problems), class_="card bad")
        yield tag("p", f"The run failed after step {step}. {goes_on}")
    if record.state == "stopped":
        said = record.problems[0] if record.problems else "A signal stopped the run before its first step"
        why = record.stopped.get("reason") or said
        yield tag("p", f"{str(why).rstrip('.')}. {goes_on}")
        yield tag(
            "p",
            code(f"--resume auto --output-dir {record.run_dir}"),
            " goes on from there.",
            class_="small",
        )
    if record.state == "running":
        words = f"The run is at step {step} ({record.phase or 'starting'})"
        yield tag("p", f"{words}; this page shows it as far as it has come. {goes_on}")


def _saved(record: RunRecord) -> str:
    if not record.checkpoints:
        return "There is no whole checkpoint."
    newest = record.checkpoints[-1]
    return f"Saved: {several(len(record.checkpoints), 'whole checkpoint')}; the newest is {newest}."


def _findings(record: RunRecord) -> Iterator[Markup]:
    if record.state != "failed":
        return
    total = int(number(record.diagnosis.get("ranks")) or 1)
    for finding in objects(record.diagnosis.get("findings")):
        yield tag(
            "div",
            tag("h3", str(finding.get("title") or "A known failure")),
            tag("p", code(finding.get("id")), _ranks(finding, total), class_="soft small"),
            _pair("Cause", finding.get("cause")),
            _pair("Mend", finding.get("mend")),
            _edits(finding),
            *_error(mapping(finding.get("error")), finding),
            class_="card bad",
        )
    for unknown in objects(record.diagnosis.get("unknown")):
        name = tag("h3", str(unknown.get("type") or "An error that is not known"))
        whose = tag("p", "none of the known failures", _ranks(unknown, total), class_="soft small")
        yield tag("div", name, whose, *_error(unknown, unknown), class_="card bad")


def _ranks(finding: Mapping[str, Any], total: int) -> str:
    ranks = [rank for rank in listed(finding.get("ranks")) if isinstance(rank, int)]
    text = ranks_text(ranks, total)
    first = finding.get("first_rank")
    return (
        ""
        if not text
        else f" · {text}" + (f", first rank {first}" if len(ranks) > 1 and first is not None else "")
    )


def _pair(name: str, words: Any) -> Markup | None:
    return tag("p", tag("b", f"{name}: "), str(words)) if words else None


def _edits(finding: Mapping[str, Any]) -> Markup | None:
    """The lines of the recipe that mend it."""
    edits = objects(finding.get("recipe"))
    if not edits:
        return None
    rows = [
        (code(e.get("path")), _was(e.get("old")), code(said(e.get("new"))), code(_place(e))) for e in edits
    ]
    return table("Changes of the recipe", ("recipe key", "is", "change to", "where"), rows)


def _was(value: Any) -> Markup:
    return tag("span", "not said", class_="soft") if value is None else code(said(value))


def _place(edit: Mapping[str, Any]) -> str:
    return f"{edit.get('file')}:{edit['line']}" if edit.get("line") else str(edit.get("file"))


def _error(error: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[Markup]:
    calls = objects(error.get("frames"))
    shown = [
        f"  {call.get('file')}:{call.get('line')} in {call.get('function')}" for call in calls[-_FRAMES:]
    ]
    if len(calls) > len(shown):
        shown.insert(0, f"  … {len(calls) - len(shown)} more calls")
    told = ": ".join(str(part) for part in (error.get("type"), error.get("message")) if part)
    if told or shown:
        text = "\n".join([*shown, told])
        yield block(text if len(text) <= _ERROR else text[:_ERROR] + "…", "Error")
    if place.get("file"):
        yield tag("p", "in ", code(f"{place['file']}:{place.get('line')}"), class_="soft small")


def _restarts(record: RunRecord) -> Iterator[Markup]:
    if not record.restarts:
        return
    rows = [
        (
            str(n),
            count(row.get("step")),
            count(row.get("resumed_from")),
            duration(row.get("waited_s")),
            str(row.get("cause") or "")[:_ERROR],
        )
        for n, row in enumerate(record.restarts[:_ROWS], 1)
    ]
    yield tag("h3", several(len(record.restarts), "restart"))
    yield table("Restarts", ("restart", "failed at step", "went on from step", "pause", "cause"), rows)


def _adaptations(record: RunRecord) -> Iterator[Markup]:
    found = objects(at(record.plan, "adapted", "adaptations"))[:_ROWS]
    if not found:
        return
    rows = [
        (count(row.get("step")), _changes(row.get("changed")), str(row.get("reason") or "")[:_ERROR])
        for row in found
    ]
    yield tag("h3", "Adapted when memory ran out")
    yield table("Adaptations", ("at step", "changed", "why"), rows)


def _changes(changed: Any) -> Markup:
    items = []
    for key, pair in mapping(changed).items():
        old, new = (pair[0], pair[1]) if isinstance(pair, list | tuple) and len(pair) == 2 else (None, pair)
        items.append(code(f"{key}: {said(old)} → {said(new)}"))
    return joined(items, tag("br"))
