"""Sections of a run's page about what happened: the training, its result, how it ended. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.execute.record import RunRecord
from launcher.report.diagnosis_text import ranks_text
from launcher.report.html.charts import Curve, Event, Point, curves
from launcher.report.html.elements import (
    NONE,
    Markup,
    at,
    block,
    code,
    count,
    cut,
    details,
    duration,
    figure,
    joined,
    listed,
    mapping,
    number,
    objects,
    pairs,
    parameters,
    rate,
    several,
    shown,
    size,
    table,
    tag,
)
from launcher.report.html.page import Section
from launcher.report.html.sections import losses, scores, steps_done, time_text

_ROWS = 200
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
_ERROR = 4000
"""Characters shown of an error."""
_FRAMES = 8
"""Innermost calls shown of a traceback."""
_ATTEMPTS = 100
"""Restarts and adaptations shown."""


# --- the training


def points(record: RunRecord, column: str) -> list[Point]:
    """Step and value of the rows that have this column, by step; a value that is not finite is a gap."""
    found = [
        (step, number(row[column]))
        for row in record.metrics
        if column in row and (step := number(row.get("step"))) is not None
    ]
    return sorted(found, key=lambda point: point[0])


def training_section(record: RunRecord) -> Section | None:
    """Curves of loss, learning rate, speed and gradients, and the logged rows; None for a plan."""
    if record.state in ("planned", "not started"):
        return None
    if not record.metrics:
        body = tag("p", "No step was logged: the run ended, or is, before its first one.", class_="soft")
        return Section("training", "Training", body)
    charts = tag("div", *_charts(record), class_="charts")
    return Section("training", "Training", joined([charts, _metrics_table(record.metrics)]))


def _charts(record: RunRecord) -> Iterator[Markup]:
    adapted = objects(at(record.plan, "adapted", "adaptations"))
    events = [
        Event(step, name)
        for rows, name in ((record.restarts, "restart"), (adapted, "adapted"))
        for row in rows
        if (step := number(row.get("step"))) is not None
    ]
    lines = [Curve("training", points(record, "loss"))]
    if held_out := points(record, "eval_loss"):
        lines.append(Curve("held out", held_out, marked=True))
    yield tag("div", curves("Loss", lines, spread=True, events=events), class_="first")
    for column, title in (
        ("learning_rate", "Learning rate"),
        ("tokens_per_second", "Tokens a second"),
        ("grad_norm", "Gradient norm"),
    ):
        found = points(record, column)
        if any(value is not None for _, value in found):
            spread = column == "grad_norm"
            yield curves(title, [Curve("last", found)], from_zero=not spread, spread=spread, events=events)


def _metrics_table(metrics: Sequence[Mapping[str, Any]]) -> Markup:
    """Evenly spaced rows, the last one among them."""
    apart = max(1, math.ceil(len(metrics) / _ROWS))
    rows = [metrics[i] for i in range((len(metrics) - 1) % apart, len(metrics), apart)]
    columns = [name for name in _COLUMNS if any(name in row for row in rows)]
    cells = [[_cell(name, row.get(name)) for name in columns] for row in rows]
    note = "" if apart == 1 else f"every {apart}th of {len(metrics):,} rows"
    head = [name.replace("_", " ") for name in columns]
    return details(several(len(rows), "logged row"), table("Logged steps", head, cells, "numbers"), note=note)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if number(value) is None:
        return "not finite"
    return {"memory": size, "step": count, "tokens": count}.get(column, figure)(value)


# --- the result


def result_section(record: RunRecord) -> Section | None:
    """None without result.json."""
    if not record.result:
        return None
    parts = [pairs((name, value) for name, value in _result_rows(record) if NONE not in value)]
    output = record.result.get("output")
    if output in ("adapter", "model") and record.run_dir:
        parts.append(tag("p", f"The {output} is in ", code(f"{record.run_dir}/{output}"), class_="small"))
    return Section("result", "Result", joined(parts))


def _result_rows(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Name and value, with NONE for a missing one."""
    result, (first, last) = record.result, losses(record)
    saves, rows = mapping(result.get("checkpoints")), mapping(result.get("rows"))
    yield "loss", f"{figure(first)} at the first step, {figure(last)} at the last"
    for name, value in scores(record).items():
        yield name.replace("eval_", "held-out ").replace("_", " "), figure(value)
    yield "steps", count(result.get("steps"))
    yield "tokens", count(result.get("tokens"))
    yield "speed", f"{rate(result.get('tokens_per_second'))} tokens a second, padding not counted"
    yield "time", time_text(record)
    if result.get("resumed_at"):
        yield "measured since", f"step {count(result['resumed_at'])}, where the run was resumed"
    yield "of it training", duration(result.get("train_seconds"))
    trained, total = parameters(result.get("trainable_params")), parameters(result.get("total_params"))
    yield "parameters", f"{trained} trained of {total}"
    yield "optimizer", str(result.get("optimizer") or NONE)
    yield "processes", count(result.get("processes"))
    yield "weights in memory", size(result.get("memory_footprint"))
    yield "samples", f"{count(rows.get('train'))} to train on, {count(rows.get('eval'))} held out"
    yield "checkpoints saved", count(saves.get("saved"))
    yield "a save took", duration(saves.get("seconds"))
    yield "a checkpoint has", size(saves.get("bytes"))
    if skipped := listed(saves.get("skipped")):
        yield "saves left out", f"{len(skipped)}, for lack of disk space"


# --- how it ended


def ending_section(record: RunRecord) -> Section | None:
    """Failures, restarts and adaptations; None where there are none."""
    parts = [*_state(record), *_findings(record), *_restarts(record), *_adaptations(record)]
    if not parts:
        return None
    heading = {"failed": "What went wrong", "stopped": "How it stopped", "planned": "Why it does not fit"}
    return Section("ending", heading.get(record.state, "What happened on the way"), joined(parts))


def _state(record: RunRecord) -> Iterator[Markup]:
    step, saved = count(steps_done(record)), _saved(record)
    has_cause = record.state == "failed" and bool(objects(record.diagnosis.get("findings")))
    if record.state in ("planned", "failed") and record.problems and not has_cause:
        yield tag("div", *(tag("p", problem) for problem in record.problems), class_="card bad")
    if record.state == "failed":
        yield tag("p", f"The run failed after step {step}. {saved}")
    elif record.state == "stopped":
        known = record.problems[0] if record.problems else "A signal stopped the run before its first step"
        why = str(record.stopped.get("reason") or known)
        yield tag("p", f"{why.rstrip('.')}. {saved}")
        resume = code(f"--resume auto --output-dir {record.run_dir}")
        yield tag("p", resume, " continues from there.", class_="small")
    elif record.state == "running":
        at_step = f"The run is at step {step} ({record.phase or 'starting'})"
        yield tag("p", f"{at_step}; this page shows it up to there. {saved}")


def _saved(record: RunRecord) -> str:
    if not record.checkpoints:
        return "There is no complete checkpoint."
    newest = record.checkpoints[-1]
    return f"Saved: {several(len(record.checkpoints), 'complete checkpoint')}; the newest is {newest}."


def _findings(record: RunRecord) -> Iterator[Markup]:
    if record.state != "failed":
        return
    total = int(number(record.diagnosis.get("ranks")) or 1)
    for finding in objects(record.diagnosis.get("findings")):
        yield tag(
            "div",
            tag("h3", str(finding.get("title") or "A known failure")),
            tag("p", code(finding.get("id")), _ranks(finding, total), class_="soft small"),
            *(
                tag("p", tag("b", f"{name}: "), str(finding[key]))
                for name, key in (("Cause", "cause"), ("Fix", "mend"))
                if finding.get(key)
            ),
            _edits(finding),
            *_error(mapping(finding.get("error")), finding),
            class_="card bad",
        )
    for unknown in objects(record.diagnosis.get("unknown")):
        name = tag("h3", str(unknown.get("type") or "An unknown error"))
        whose = tag("p", "none of the known failures", _ranks(unknown, total), class_="soft small")
        yield tag("div", name, whose, *_error(unknown, unknown), class_="card bad")


def _ranks(finding: Mapping[str, Any], total: int) -> str:
    ranks = [rank for rank in listed(finding.get("ranks")) if isinstance(rank, int)]
    text, first = ranks_text(ranks, total), finding.get("first_rank")
    return (
        f" · {text}{f', first rank {first}' if len(ranks) > 1 and first is not None else ''}" if text else ""
    )


def _edits(finding: Mapping[str, Any]) -> Markup | None:
    """The changes of the recipe that fix it."""
    rows = [
        (
            code(edit.get("path")),
            tag("span", "not set", class_="soft") if edit.get("old") is None else code(shown(edit["old"])),
            code(shown(edit.get("new"))),
            code(f"{edit.get('file')}:{edit['line']}" if edit.get("line") else edit.get("file")),
        )
        for edit in objects(finding.get("recipe"))
    ]
    return table("Changes of the recipe", ("recipe key", "is", "change to", "where"), rows) if rows else None


def _error(error: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[Markup]:
    calls = objects(error.get("frames"))
    lines = [
        f"  {call.get('file')}:{call.get('line')} in {call.get('function')}" for call in calls[-_FRAMES:]
    ]
    if len(calls) > _FRAMES:
        lines.insert(0, f"  … {len(calls) - _FRAMES} more calls")
    message = ": ".join(str(part) for part in (error.get("type"), error.get("message")) if part)
    if message or lines:
        yield block(cut("\n".join([*lines, message]), _ERROR), "Error")
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
        for n, row in enumerate(record.restarts[:_ATTEMPTS], 1)
    ]
    yield tag("h3", several(len(record.restarts), "restart"))
    yield table("Restarts", ("restart", "failed at step", "resumed from step", "pause", "cause"), rows)


def _adaptations(record: RunRecord) -> Iterator[Markup]:
    found = objects(at(record.plan, "adapted", "adaptations"))[:_ATTEMPTS]
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
        old, new = pair if isinstance(pair, list | tuple) and len(pair) == 2 else (None, pair)
        items.append(code(f"{key}: {shown(old)} → {shown(new)}"))
    return joined(items, tag("br"))
