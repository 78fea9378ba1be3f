"""Parts of a run's page from its record: header, data, training, result, how it ended. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.execute.record import RunRecord, total_seconds
from launcher.report import suites
from launcher.report.diagnosis_text import whose
from launcher.report.html.charts import Curve, Event, Point, curves
from launcher.report.html.elements import (
    NONE,
    Markup,
    apart,
    at,
    block,
    bullets,
    code,
    count,
    cut,
    details,
    duration,
    escaped,
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
from launcher.report.html.page import PageSection
from launcher.report.html.plan_sections import hardware_text, length_text, method_text, plan_tiles

_CHARTS = {
    "loss": "Loss",
    "eval_loss": "Held-out loss",
    "learning_rate": "Learning rate",
    "tokens_per_second": "Tokens per second",
    "grad_norm": "Gradient norm",
}
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
_SAMPLES = 3
_CHARACTERS = 3000
"""Characters shown of a sample."""
STATES = {
    "finished": "✓ finished", "failed": "✕ failed", "stopped": "■ stopped", "running": "▸ running",
    "not started": "○ not started", "planned": "○ planned, nothing was started",
}  # fmt: skip
"""Text of the badge: sign and colour both differ."""


# --- the header


def header(record: RunRecord) -> list[Markup]:
    """Name and state, a line about the run, its directory, and the most important numbers."""
    is_plan = record.state in ("planned", "not started")
    text, kind = STATES[record.state], record.state.replace(" ", "-")
    if record.state == "planned" and record.problems:
        text, kind = "✕ does not fit", "failed"
    model, batch = mapping(record.plan.get("model")), mapping(record.plan.get("batch"))
    name = str(model.get("name") or "a model")
    about = [
        f"{Path(name).name if name.startswith('/') else name} ({parameters(model.get('params'))} parameters)",
        method_text(record),
        hardware_text(record),
        f"{length_text(record)}, {count(batch.get('global'))} samples a step".strip(" ,"),
    ]
    tiles = (
        tag("div", tag("dt", name), tag("dd", value), tag("dd", note, class_="note") if note else None)
        for name, value, note in (plan_tiles(record) if is_plan else _run_tiles(record))
    )
    return [
        tag("p", f"effilaunch {'plan' if record.state == 'planned' else 'report'}", class_="over"),
        tag("div", tag("h1", record.name), tag("span", text, class_=f"state {kind}"), class_="title"),
        tag("p", " · ".join(about), class_="lead"),
        *([tag("p", code(record.run_dir), class_="soft small")] if record.run_dir else []),
        tag("dl", *tiles, class_="tiles"),
    ]


def _run_tiles(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    first, last = losses(record)
    memory = mapping(record.result.get("memory"))
    if number(last) is not None:
        mean, count_of = recent_loss(record)
        note = "" if count_of < 2 else f"mean of the last {count_of} logged; "
        yield "Loss", figure(last if count_of < 2 else mean), f"{note}{figure(first)} at the first step"
    for name, value in list(scores(record).items())[:2]:
        yield name.replace("eval_", "Held-out ").replace("_", " "), figure(value), ""
    planned = number(at(record.plan, "schedule", "steps"))
    yield (
        "Steps",
        count(steps_done(record)),
        f"of {count(planned)} planned" if planned else length_text(record),
    )
    speed = record.result.get("tokens_per_second")
    if number(speed) is not None:
        yield "Tokens per second", rate(speed), f"{count(record.result.get('tokens'))} in all"
    if record.result.get("seconds") is not None:
        since = record.result.get("resumed_at")
        part = f" since step {count(since)}" if since else " of it"
        yield "Time", time_text(record), f"{duration(record.result.get('train_seconds'))}{part} training"
    if memory.get("measured") is not None:
        predicted = memory.get("predicted")
        note = f"{size(predicted)} predicted ({apart(predicted, memory['measured'])})"
        yield "Peak memory of a device", size(memory["measured"]), note
    else:
        yield "Memory predicted", size(at(record.plan, "memory", "total")), "of each device, at the peak"
    if record.state != "finished" and record.checkpoints:
        newest = record.checkpoints[-1].removeprefix("checkpoint-")
        yield "Newest checkpoint", newest, f"{len(record.checkpoints)} complete"
    if record.mirror:
        held = [row.get("step") for row in objects(record.mirror.get("checkpoints"))]
        more = " and the result" if record.mirror.get("result") is True else ""
        where = str(record.mirror.get("url", NONE))
        newest = str(held[-1]) if held else NONE
        yield "In the object store", newest, f"{count(len(held))} complete{more} in {where}"


def losses(record: RunRecord) -> tuple[Any, Any]:
    """The first and the last loss, from the result or else from the metrics."""
    loss = mapping(record.result.get("loss"))
    rows = [row["loss"] for row in record.metrics if number(row.get("loss")) is not None]
    return loss.get("first", rows[0] if rows else None), loss.get("last", rows[-1] if rows else None)


_RECENT = 10
"""Logged losses that are averaged at most; one batch says little."""


def recent_loss(record: RunRecord) -> tuple[float, int]:
    """Mean of the last logged losses, of at most a fifth of all, and how many they are."""
    rows = [found for row in record.metrics if (found := number(row.get("loss"))) is not None]
    recent = rows[-min(_RECENT, max(1, len(rows) // 5)) :]
    return (sum(recent) / len(recent) if recent else 0.0), len(recent)


def scores(record: RunRecord) -> dict[str, float]:
    """Name -> value of the last evaluation, without timings."""
    rows = [row for row in record.metrics if number(row.get("eval_loss")) is not None]
    last = {**(rows[-1] if rows else {}), **mapping(record.result.get("eval"))}
    slow = ("_runtime", "_per_second", "_time")
    return {
        name: value
        for name, raw in last.items()
        if name.startswith("eval_") and not name.endswith(slow) and (value := number(raw)) is not None
    }


def steps_done(record: RunRecord) -> float:
    """Optimizer steps, from the result or else the highest that was logged."""
    known = number(record.result.get("steps"))
    if known is not None:
        return known
    logged = [number(row.get("step")) or 0 for row in record.metrics]
    return max([float(record.step), *logged])


def time_text(record: RunRecord) -> str:
    """The time of all starts of a run; if unknown, of the last one with the step it began at."""
    total = total_seconds(record.result)
    if total is not None:
        return duration(total)
    since = record.result.get("resumed_at")
    last = duration(record.result.get("seconds"))
    return f"{last} since step {count(since)}" if since else last


# --- the data


def data_section(record: RunRecord) -> PageSection | None:
    """None where no data was prepared."""
    given = mapping(record.data.get("splits"))
    splits = {name: split for name, split in given.items() if isinstance(split, Mapping)}
    samples = [sample for sample in objects(record.data.get("samples")) if listed(sample.get("pieces"))]
    samples = samples[:_SAMPLES]
    if not splits and not samples:
        return None
    parts: list[Markup] = []
    if splits:
        parts += [_counts(splits), *_held_out(record, splits), *_lengths(splits), *_sources(splits)]
    if samples:
        parts.append(tag("h3", f"{several(len(samples), 'sample')} with their loss mask"))
        rest = " pieces contribute to the loss; the rest is only context."
        parts.append(tag("p", tag("mark", "Underlined"), rest, class_="small"))
        parts += [_sample(n, sample) for n, sample in enumerate(samples, 1)]
    return PageSection("data", "Data", joined(parts))


def _counts(splits: Mapping[str, Mapping[str, Any]]) -> Markup:
    head = (
        "split", "rows read", "kept", "dropped", "truncated", "split in several", "samples", "tokens",
        "target tokens",
    )  # fmt: skip
    rows = []
    for name, split in splits.items():
        counts = mapping(split.get("counts"))
        read, kept, truncated, cut_up = map(counts.get, ("read", "kept", "truncated", "split"))
        dropped = sum(number(value) or 0 for value in mapping(counts.get("dropped")).values())
        tokens, lost, targets = (number(counts.get(key)) for key in ("tokens", "tokens_lost", "targets"))
        left = None if tokens is None else tokens - (lost or 0)
        share = f"{targets / left:.1%}" if targets is not None and left else NONE
        numbers = (read, kept, dropped, truncated, cut_up, split.get("samples"), left)
        rows.append((name, *map(count, numbers), share))
    return table("Rows", head, rows, "numbers")


def _held_out(record: RunRecord, splits: Mapping[str, Mapping[str, Any]]) -> list[Markup]:
    """Where the evaluation gets a share of the training sources: how many samples are left to train on."""
    held_out, total = number(record.data.get("held_out")), number(at(splits, "train", "samples"))
    if not held_out or total is None:
        return []
    shown = f"{count(total - held_out)} are trained on; {count(held_out)} are held out."
    return [tag("p", f"Of the samples of train {shown}", class_="small")]


def _lengths(splits: Mapping[str, Mapping[str, Any]]) -> list[Markup]:
    rows = [
        (f"{name}{of}", *(count(at(split, kind, key)) for key in ("mean", "p50", "p95", "max")))
        for name, split in splits.items()
        for kind, of in (("lengths", ""), ("image_tokens", ", of images"))
        if mapping(split.get(kind))
    ]
    head = ("tokens of a sample", "mean", "median", "at 95 %", "longest")
    return [table("Tokens of a sample", head, rows, "numbers")] if rows else []


def _sources(splits: Mapping[str, Mapping[str, Any]]) -> list[Markup]:
    """Where the rows come from, which columns were not read, and why rows were dropped."""
    items: list[Markup | str] = []
    for name, split in splits.items():
        for source in objects(split.get("sources")):
            unused = ", ".join(map(str, listed(source.get("unused"))))
            text = f" ({name}): {count(source.get('rows'))} rows, read as {source.get('format')}"
            text += f"; columns that were not read: {unused}" if unused else ""
            text += "".join(f"; {line}" for line in listed(source.get("files")))
            items.append(joined([code(source.get("path")), escaped(text)], ""))
        dropped, notes = (mapping(at(split, "counts", key)) for key in ("dropped", "notes"))
        items += [f"{name}: {count(rows)} rows dropped: {why}" for why, rows in dropped.items()]
        items += [f"{name}: {what}: {count(number)}" for what, number in notes.items()]
    return [bullets(items[:50], "plain small")] if items else []


def _sample(place: int, sample: Mapping[str, Any]) -> Markup:
    file, line = sample.get("file"), sample.get("line")
    where = f"{Path(str(file)).name}, line {count(line)}" if file else "from the stream"
    about = f"{where}: {count(sample.get('tokens'))} tokens, {count(sample.get('targets'))} of them targets"
    pieces, left = [], _CHARACTERS
    for piece in listed(sample.get("pieces")):
        if left <= 0:
            break
        if isinstance(piece, list | tuple) and len(piece) == 2:
            text = str(piece[0])
            pieces.append(tag("mark" if piece[1] is True else "span", text[:left] + "…" * (len(text) > left)))
            left -= len(text)
    if left < 0:
        about += f"; its first {_CHARACTERS:,} characters"
    name = f"Sample {place}"
    caption = tag("figcaption", tag("span", name, class_="head"), tag("span", about, class_="soft small"))
    text_block = tag("pre", *pieces, class_="sample", tabindex="0", role="region", aria_label=name)
    return tag("figure", caption, *_thumbnails(sample), text_block)


_DATA_URI = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/=]{1,100000}")


def _thumbnails(sample: Mapping[str, Any]) -> list[Markup]:
    """The images of a sample, small, each with its size and where its tokens are."""
    items: list[Markup] = []
    for place, image in enumerate(objects(sample.get("images")), 1):
        source, sides, tokens = (
            str(image.get("thumbnail")),
            listed(image.get("size")),
            listed(image.get("tokens")),
        )
        if not _DATA_URI.fullmatch(source):
            continue
        name = Path(str(image.get("name"))).name
        about = f"image {place}: {name}, {' x '.join(map(count, sides))} pixels"
        about += f", tokens {' to '.join(map(count, tokens))}" if tokens else ""
        items.append(tag("li", tag("img", src=source, alt=f"Image {place}: {name}"), tag("span", about)))
    if items and (more := number(sample.get("more_images"))):
        items.append(tag("li", f"and {count(more)} more"))
    return [tag("ul", *items, class_="thumbs")] if items else []


# --- the training


def points(record: RunRecord, column: str) -> list[Point]:
    """Step and value of the rows that have this column, by step; a value that is not finite is a gap."""
    found = [
        (step, number(row[column]))
        for row in record.metrics
        if column in row and (step := number(row.get("step"))) is not None
    ]
    return sorted(found, key=lambda point: point[0])


def training_section(record: RunRecord) -> PageSection | None:
    """Curves of loss, learning rate, speed and gradients, and the logged rows; None for a plan."""
    if record.state in ("planned", "not started"):
        return None
    if not record.metrics:
        body = tag(
            "p",
            "No step was logged: the run ended before its first step, or has not reached it.",
            class_="soft",
        )
        return PageSection("training", "Training", body)
    adapted = objects(at(record.plan, "adapted", "adaptations"))
    events = [
        Event(step, name)
        for rows, name in ((record.restarts, "restart"), (adapted, "adapted"))
        for row in rows
        if (step := number(row.get("step"))) is not None
    ]
    held_out = points(record, "eval_loss")
    lines = {
        "loss": [
            Curve("training", points(record, "loss")),
            *([Curve("held out", held_out, marked=True)] if held_out else []),
        ]
    }
    for column in ("learning_rate", "tokens_per_second", "grad_norm"):
        lines[column] = [Curve("last", points(record, column))]
    parts = [charts(lines, events), _metrics_table(record)]
    return PageSection("training", "Training", joined(parts))


def charts(lines: Mapping[str, Sequence[Curve]], events: Sequence[Event] = ()) -> Markup:
    """One chart per column of the metrics; without values only that of the loss."""
    parts = []
    for column, title in _CHARTS.items():
        shown_lines = lines.get(column, ())
        if column == "loss" or any(line.found for line in shown_lines):
            is_amount = column in ("learning_rate", "tokens_per_second")
            drawn = curves(title, shown_lines, from_zero=is_amount, spread=not is_amount, events=events)
            parts.append(tag("div", drawn, class_="first") if column == "loss" else drawn)
    return tag("div", *parts, class_="charts")


def _metrics_table(record: RunRecord) -> Markup:
    """Evenly spaced rows, the last one among them."""
    metrics = record.metrics
    apart = max(1, math.ceil(len(metrics) / _ROWS))
    rows = [metrics[i] for i in range((len(metrics) - 1) % apart, len(metrics), apart)]
    columns = [name for name in _COLUMNS if any(name in row for row in rows)]
    cells = [[_cell(name, row.get(name)) for name in columns] for row in rows]
    note = "" if apart == 1 else f"every {apart}th of {len(metrics):,} rows"
    if record.logged > len(metrics):
        note = f"of {record.logged:,}; a curve has the least and the largest of each column of pixels"
    head = [name.replace("_", " ") for name in columns]
    return details(several(len(rows), "logged row"), table("Logged steps", head, cells, "numbers"), note=note)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if number(value) is None:
        return "not finite"
    return {"memory": size, "step": count, "tokens": count}.get(column, figure)(value)


# --- the result


def result_section(record: RunRecord) -> PageSection | None:
    """None without result.json."""
    if not record.result:
        return None
    parts = [pairs((name, value) for name, value in _result_rows(record) if NONE not in value)]
    output = record.result.get("output")
    if output in ("adapter", "model") and record.run_dir:
        parts.append(tag("p", f"The {output} is in ", code(f"{record.run_dir}/{output}"), class_="small"))
    return PageSection("result", "Result", joined(parts))


def _result_rows(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Name and value, with NONE for a missing one."""
    result, (first, last) = record.result, losses(record)
    saves, rows = mapping(result.get("checkpoints")), mapping(result.get("rows"))
    yield "loss", f"{figure(first)} at the first step, {figure(last)} at the last"
    if rollouts := mapping(result.get("rollouts")):
        ends = f"{figure(rollouts.get('first'))} in the first generation, {figure(rollouts.get('last'))}"
        yield "mean reward", f"{ends} in the last"
        without = count(rollouts.get("groups_without_signal"))
        yield "prompts without a signal", f"{without} of {count(rollouts.get('groups'))}"
        for warning in listed(rollouts.get("warnings")):
            yield "warning", str(warning)
    for name, value in scores(record).items():
        yield name.replace("eval_", "held-out ").replace("_", " "), figure(value)
    yield "steps", count(result.get("steps"))
    yield "tokens", count(result.get("tokens"))
    yield "speed", f"{rate(result.get('tokens_per_second'))} tokens per second, padding not counted"
    yield "time", time_text(record)
    if result.get("resumed_at"):
        yield "measured since", f"step {count(result['resumed_at'])}, where the run was resumed"
    yield "training time", duration(result.get("train_seconds"))
    trained, total = parameters(result.get("trainable_params")), parameters(result.get("total_params"))
    yield "parameters", f"{trained} trained of {total}"
    if idle := mapping(result.get("idle_adapters")):
        names = ", ".join(map(str, listed(idle.get("first"))))
        yield "adapters without gradient", f"{count(idle.get('count'))} of {count(idle.get('of'))}: {names}"
    yield "optimizer", str(result.get("optimizer") or NONE)
    yield "processes", count(result.get("processes"))
    yield "weights in memory", size(result.get("memory_footprint"))
    yield "samples", f"{count(rows.get('train'))} to train on, {count(rows.get('eval'))} held out"
    yield "checkpoints saved", count(saves.get("saved"))
    yield "time per save", duration(saves.get("seconds"))
    yield "checkpoint size", size(saves.get("bytes"))
    if skipped := listed(saves.get("skipped")):
        yield "saves skipped", f"{len(skipped)}, for lack of disk space"


def suites_section(record: RunRecord) -> PageSection | None:
    """Scores in benchmarks; None where `eval --suite` was not called."""
    rows = suites.rows(record.result.get("suites"))
    if not rows:
        return None
    about = "± is the standard error; that of a change takes the two scores as independent."
    notes = [f"{task}: {text}" for task, text in suites.settings(record.result.get("suites"))]
    body = [table("Benchmarks", suites.HEAD, rows, "numbers"), tag("p", about, class_="small")]
    return PageSection("suites", "Benchmarks", joined([*body, bullets(notes, "plain small")]))


# --- how it ended


def ending_section(record: RunRecord) -> PageSection | None:
    """Failures, restarts and adaptations; None where there are none."""
    parts = [*_state(record), *_diagnosis(record), *_restarts(record), *_adaptations(record)]
    if not parts:
        return None
    heading = {"failed": "What went wrong", "stopped": "How it stopped", "planned": "Why it does not fit"}
    return PageSection("ending", heading.get(record.state, "What happened on the way"), joined(parts))


def _state(record: RunRecord) -> Iterator[Markup]:
    step, saved = count(steps_done(record)), _saved(record)
    if record.state in ("planned", "failed") and record.problems and not record.diagnosis.get("findings"):
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


def _diagnosis(record: RunRecord) -> Iterator[Markup]:
    """The known and the unknown failures, as `diagnose --json` has them."""
    for found in (*record.diagnosis.get("findings", ()), *record.diagnosis.get("unknown", ())):
        is_known, error = "id" in found, found.get("error", found)
        ranks = whose(found["ranks"], found["first_rank"], record.diagnosis.get("ranks", 1))
        name = code(found["id"]) if is_known else "none of the known failures"
        parts = [
            tag("h3", found["title"] if is_known else error["type"] or "An unknown error"),
            tag("p", name, f" · {ranks}" if ranks else None, class_="soft small"),
        ]
        if is_known:
            parts += [
                tag("p", tag("b", "Cause: "), found["cause"]),
                tag("p", tag("b", "Fix: "), found["mend"]),
            ]
            parts += _edits(found["recipe"])
        yield tag("div", *parts, *_error(error, found), class_="card bad")


def _edits(edits: Sequence[Mapping[str, Any]]) -> list[Markup]:
    """The changes of the recipe that fix it."""
    rows = [
        (
            code(edit["path"]),
            tag("span", "not set", class_="soft") if edit["old"] is None else code(shown(edit["old"])),
            code(shown(edit["new"])),
            code(f"{edit['file']}:{edit['line']}" if edit["line"] else edit["file"]),
        )
        for edit in edits
    ]
    return [table("Changes of the recipe", ("recipe key", "is", "change to", "where"), rows)] if rows else []


def _error(error: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[Markup]:
    calls = error["frames"]
    lines = [f"  {call['file']}:{call['line']} in {call['function']}" for call in calls[-_FRAMES:]]
    if len(calls) > _FRAMES:
        lines.insert(0, f"  … {len(calls) - _FRAMES} more calls")
    message = ": ".join(filter(None, (error["type"], error["message"])))
    yield block(cut("\n".join([*lines, message]), _ERROR), "Error")
    if place["file"]:
        yield tag("p", "in ", code(f"{place['file']}:{place['line']}"), class_="soft small")


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
