"""Sections about a run, from its record: results, training, benchmarks, how it ended. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from launcher.execute.record import RunRecord, total_seconds
from launcher.models.lora import describe_idle_adapters
from launcher.plan.stored import OWN_COMMAND
from launcher.report.data_sections import note_texts
from launcher.report.diagnosis_sections import failure_cards
from launcher.report.plan_sections import length_text
from launcher.report.sections import (
    MAIN,
    Block,
    Code,
    Curve,
    Curves,
    Event,
    Fact,
    Figure,
    Folded,
    Group,
    Point,
    Row,
    Rows,
    Section,
    Table,
    Text,
    rows_of,
    table_of,
)
from launcher.report.values import (
    NONE,
    apart,
    at,
    count,
    duration,
    listed,
    mapping,
    number,
    objects,
    several,
    shown,
)

_ROWS = 200
"""Rows of the metrics that a table shows."""
_COLUMNS = {
    "step": "count", "loss": "number", "eval_loss": "number", "learning_rate": "number",
    "grad_norm": "number", "tokens": "count", "tokens_per_second": "number", "memory": "bytes",
}  # fmt: skip
_ATTEMPTS = 100
"""Restarts and adaptations shown."""
STATES = {
    "finished": "✓ finished", "failed": "✕ failed", "stopped": "■ stopped", "running": "▸ running",
    "not started": "○ not started", "planned": "○ planned, nothing was started",
}  # fmt: skip
"""Text of the badge: sign and colour both differ."""


HELD_OUT = "held-out "
"""What the names of an evaluation's figures begin with."""


# --- the figures of a run

FIRST = (
    Fact("loss", "{last:number}",
         "at the last step, {first:number} at the first[; {mean:number} is the mean of the last "
         "{means:count} logged][; {risen}]", MAIN),
    Fact("mean reward", "{rollouts.last:number}",
         "in the last generation, {rollouts.first:number} in the first; "
         "{rollouts.groups_without_signal:count} of {rollouts.groups:count} prompts without a signal", MAIN),
    Fact("generated", "{rollouts.completions:count} completions", "in {rollouts.seconds:seconds}, scored"),
)  # fmt: skip
FACTS = (
    Fact("steps", "{steps:count}",
         "[of {planned.steps:count} planned][{length}][, the last {own:count} of them since the run was "
         "resumed]", MAIN),
    Fact("tokens", "{tokens:count}"),
    Fact("speed", "{tokens_per_second:rate} tokens/s", "(padding not counted)", MAIN),
    Fact("time", "{time}",
         "[{train_seconds:seconds} of it training][ since step {resumed_at:count}][, {ratio} times the "
         "{estimate:seconds} that the plan estimated][; this machine is busy: {load} processes per core]",
         MAIN),
    Fact("peak memory", "{memory.measured:bytes}", "of each device[, {predicted:bytes} predicted][ ({off})]",
         MAIN),
    Fact("memory predicted", "{unmeasured:bytes}", "of each device, at the peak", MAIN),
    Fact("host memory", "{memory.host.measured:bytes}",
         "of a node[, {memory.host.predicted:bytes} predicted]"),
    Fact("weights in memory", "{memory_footprint:bytes}"),
    Fact("rows", "{rows.read:count} read", "[, {rows.kept:count} kept][, {rows.truncated:count} truncated][, "
         "{rows.split:count} split][, {rows.dropped:count} dropped][ ({reasons})][; {notes}]"),
    Fact("samples", "{rows.train:count} to train on", "[, {rows.eval:count} held out]"),
    Fact("parameters", "{trainable_params:parameters} trained", "[of {total_params:parameters}]"),
    Fact("adapters", "{idle}"),
    Fact("optimizer", "{optimizer}"),
    Fact("processes", "{processes:count}"),
    Fact("checkpoints", "{checkpoints.saved:count} saved", "[, each {checkpoints.bytes:bytes}][ in "
         "{checkpoints.seconds:seconds}][; {skipped} skipped for lack of disk space]"),
    Fact("newest checkpoint", "{newest}", "({complete:count} complete)", MAIN),
    Fact("object store", "{held}", "in {mirror.url}", MAIN),
    Fact("restarts", "{restarts:count}"),
    Fact("{output}", "`{output_folder}`"),
)  # fmt: skip
"""What is shown of a run: in its page, in a terminal, in a model card, and in a comparison."""


def run_rows(record: RunRecord, load: float = 0.0) -> list[Row]:
    """Every figure of a run that is known. load: processes per core that want to run."""
    (first, last), (mean, means) = losses(record), recent_loss(record)
    rollouts = mapping(record.result.get("rollouts"))
    before, after = number(first), number(last)
    risen = before is not None and after is not None and after >= before and not rollouts
    scope = {
        "first": first, "last": last, "mean": mean if means > 1 else None, "means": means,
        "risen": "it did not fall" if risen else None, "rollouts": rollouts,
    }  # fmt: skip
    scored = {
        name.replace("eval_", HELD_OUT).replace("_", " "): value for name, value in scores(record).items()
    }
    return [
        *rows_of(FIRST, scope),
        *(Row("WARNING", [str(warning)]) for warning in listed(rollouts.get("warnings"))),
        *(Row(name, [Figure(value)], is_main=name == f"{HELD_OUT}loss") for name, value in scored.items()),
        *rows_of(FACTS, {**record.result, **_times(record, load), **_memory(record), **_kept(record)}),
    ]


_BUSY = 1.2
"""Processes per core that want to run, from which others take time from a run."""
_AS_PLANNED = 1.5
"""Up to this many times the estimate, and down to its reciprocal, the time of a run is not commented."""


def _times(record: RunRecord, load: float) -> dict[str, Any]:
    """Steps and time; the estimate where the steps took another time, and whether this machine is busy."""
    result, planned = record.result, mapping(record.plan.get("schedule"))
    since, trained = number(result.get("resumed_at")) or 0, number(result.get("train_seconds"))
    own = steps_done(record) - since
    estimate = (number(at(record.plan, "time", "likely", "seconds_per_step")) or 0) * own
    ratio = trained / estimate if trained and estimate > 0 else 1.0
    is_other = not 1 / _AS_PLANNED <= ratio <= _AS_PLANNED
    return {
        "steps": steps_done(record) or (None if is_own(record) else 0),
        "planned": planned,
        "length": None if number(planned.get("steps")) else length_text(record.plan),
        "own": own if since else None,
        "resumed_at": since or None,
        "time": time_text(record).removeprefix(NONE),
        "ratio": f"{ratio:.2g}" if is_other else None,
        "estimate": estimate,
        "load": f"{load:.1f}" if is_other and ratio > 1 and load > _BUSY else None,
    }


def _memory(record: RunRecord) -> dict[str, Any]:
    memory, planned = mapping(record.result.get("memory")), at(record.plan, "memory", "total")
    measured, predicted = memory.get("measured"), memory.get("predicted", planned)
    off = apart(predicted, measured)
    return {
        "memory": memory,
        "predicted": predicted,
        "off": None if off == NONE else off,
        "unmeasured": None if measured is not None else planned,
    }


def _kept(record: RunRecord) -> dict[str, Any]:
    """Rows, checkpoints, the object store, the output."""
    result, rows = record.result, mapping(record.result.get("rows"))
    mirror = record.mirror or mapping(result.get("mirror"))
    steps = [f"checkpoint-{row.get('step')}" for row in objects(mirror.get("checkpoints"))]
    held = [*steps, *(["the result"] if mirror.get("result") is True else [])]
    idle, output = mapping(result.get("idle_adapters")), result.get("output")
    has_idle = all(number(idle.get(key)) is not None for key in ("count", "of", "steps"))
    reasons = mapping(rows.get("dropped_reasons")).items()
    is_open = record.state != "finished" and record.checkpoints
    return {
        "reasons": ", ".join(f"{name} {count(rows)}" for name, rows in reasons),
        "notes": "; ".join(note_texts(rows.get("notes"))),
        "idle": describe_idle_adapters({**idle, "first": listed(idle.get("first"))}) if has_idle else None,
        "skipped": len(listed(at(result, "checkpoints", "skipped"))) or None,
        "newest": record.checkpoints[-1].removeprefix("checkpoint-") if is_open else None,
        "complete": len(record.checkpoints),
        "mirror": mirror,
        "held": (", ".join(held) or "nothing yet") if mirror else None,
        "restarts": len(record.restarts) or None,
        "output_folder": f"{record.run_dir}/{output}"
        if record.run_dir and output in ("adapter", "model")
        else None,
    }


def is_own(record: RunRecord) -> bool:
    """Whether it is a user's own command, which may report no step."""
    return record.plan.get("kind") == OWN_COMMAND


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


def run_facts(record: RunRecord) -> dict[str, Any]:
    """The run in `report --json`."""
    first, last = losses(record)
    result = record.result
    return {
        "run_dir": record.run_dir,
        "state": record.state,
        "recipe": record.plan.get("recipe"),
        "steps": int(steps_done(record)),
        "loss": {"first": first, "last": last},
        "eval": scores(record),
        "seconds": total_seconds(result),
        "tokens_per_second": result.get("tokens_per_second"),
        "memory": {
            "predicted": at(record.plan, "memory", "total"),
            "measured": at(result, "memory", "measured"),
        },
        "restarts": len(record.restarts),
        "diagnosis": dict(record.diagnosis) or None,
    }


def time_text(record: RunRecord) -> str:
    """The time of all starts of a run; if unknown, of the last one with the step it began at."""
    total = total_seconds(record.result)
    if total is not None:
        return duration(total)
    since = record.result.get("resumed_at")
    last = duration(record.result.get("seconds"))
    return f"{last} since step {count(since)}" if since else last


# --- training and result


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
        text = "No step was logged: the run ended before its first step, or has not reached it."
        return Section("training", "Training", [Text([text], "soft")])
    adapted = objects(at(record.plan, "adapted", "adaptations"))
    events = [
        Event(step, name)
        for rows, name in ((record.restarts, "restart"), (adapted, "adapted"))
        for row in rows
        if (step := number(row.get("step"))) is not None
    ]
    lines = {
        column: [Curve("last", points(record, column))]
        for column in ("learning_rate", "tokens_per_second", "grad_norm")
    }
    held_out = points(record, "eval_loss")
    held_out_curve = [Curve("held out", held_out, marked=True)] if held_out else []
    lines["loss"] = [Curve("training", points(record, "loss")), *held_out_curve]
    return Section("training", "Training", [Curves(lines, events), _metrics_table(record)])


def _metrics_table(record: RunRecord) -> Folded:
    """Evenly spaced rows, the last one among them."""
    metrics = record.metrics
    apart = max(1, math.ceil(len(metrics) / _ROWS))
    rows = [metrics[i] for i in range((len(metrics) - 1) % apart, len(metrics), apart)]
    columns = {name.replace("_", " "): f"[{{{name}:{unit}}}]" for name, unit in _COLUMNS.items()}
    (table,) = table_of("Logged steps", columns, rows, "numbers")
    note = "" if apart == 1 else f"every {apart}th of {len(metrics):,} rows"
    if record.logged > len(metrics):
        note = f"of {record.logged:,}; a curve has the least and the largest of each column of pixels"
    return Folded(several(len(rows), "logged row"), table, note)


def result_section(record: RunRecord) -> Section | None:
    """None without result.json."""
    return Section("result", "Result", [Rows(run_rows(record))]) if record.result else None


# --- how it ended


def ending_section(record: RunRecord) -> Section | None:
    """Failures, restarts and adaptations; None where there are none."""
    restarts = [{**row, "n": str(n)} for n, row in enumerate(record.restarts[:_ATTEMPTS], 1)]
    blocks = [
        *_state(record),
        *failure_cards(record.diagnosis),
        *table_of("Restarts", _RESTART, restarts, heading=several(len(record.restarts), "restart")),
        *adaptations(at(record.plan, "adapted", "adaptations")),
    ]
    heading = {"failed": "What went wrong", "stopped": "How it stopped", "planned": "Why it does not fit"}
    return (
        Section("ending", heading.get(record.state, "What happened on the way"), blocks) if blocks else None
    )


_RESTART = {
    "restart": "{n}", "failed at step": "{step:count}", "resumed from step": "{resumed_from:count}",
    "pause": "{waited_s:seconds}", "cause": "{cause}",
}  # fmt: skip


def _state(record: RunRecord) -> Iterator[Block]:
    step, newest = count(steps_done(record)), record.checkpoints[-1] if record.checkpoints else ""
    how_many = several(len(record.checkpoints), "complete checkpoint")
    saved = f"Saved: {how_many}; the newest is {newest}." if newest else "There is no complete checkpoint."
    if record.state in ("planned", "failed") and record.problems and not record.diagnosis.get("findings"):
        yield Group([Text([problem]) for problem in record.problems], "card bad")
    if record.state == "failed":
        yield Text([f"The run failed after step {step}. {saved}"])
    elif record.state == "stopped":
        known = record.problems[0] if record.problems else "A signal stopped the run before its first step"
        yield Text([f"{str(record.stopped.get('reason') or known).rstrip('.')}. {saved}"])
        yield Text([Code(f"--resume auto --output-dir {record.run_dir}"), " continues from there."], "small")
    elif record.state == "running":
        at_step = f"The run is at step {step} ({record.phase or 'starting'})"
        yield Text([f"{at_step}; this page shows it up to there. {saved}"])


def adaptations(found: Any) -> list[Table]:
    """What a run has changed after it ran out of memory."""
    scopes = [{**row, "changes": _changes(row.get("changed"))} for row in objects(found)[:_ATTEMPTS]]
    columns = {"at step": "{step:count}", "changed": "`{changes}`", "why": "{reason}"}
    return table_of("Adaptations", columns, scopes, heading="Adapted when memory ran out")


def _changes(changed: Any) -> str:
    pairs = {
        key: pair if isinstance(pair, list | tuple) and len(pair) == 2 else (None, pair)
        for key, pair in mapping(changed).items()
    }
    return ", ".join(f"{key}: {shown(old)} → {shown(new)}" for key, (old, new) in pairs.items())
