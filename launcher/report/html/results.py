"""What a finished run left, in numbers: a part of a page. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from launcher.execute.record import RunRecord
from launcher.report.html.elements import code, joined, tag
from launcher.report.html.sections import Section, losses, pairs, scores, time_words
from launcher.report.html.values import (
    NONE,
    at,
    count,
    duration,
    figure,
    listed,
    mapping,
    parameters,
    rate,
    size,
)


def result_section(record: RunRecord) -> Section | None:
    """None where there is no result.json."""
    if not record.result:
        return None
    rows = [(name, value) for name, value in _rows(record) if NONE not in value]
    parts = [pairs(rows)]
    output = record.result.get("output")
    if output in ("adapter", "model") and record.run_dir:
        parts.append(tag("p", f"The {output} lies in ", code(f"{record.run_dir}/{output}"), class_="small"))
    return Section("result", "Result", joined(parts))


def _rows(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Name and value; a value that is not there is left out by the caller."""
    result, (first, last) = record.result, losses(record)
    yield "loss", f"{figure(first)} at the first step, {figure(last)} at the last"
    for name, value in scores(record).items():
        yield name.replace("eval_", "held-out ").replace("_", " "), figure(value)
    yield "steps", count(result.get("steps"))
    yield "tokens", count(result.get("tokens"))
    yield "speed", f"{rate(result.get('tokens_per_second'))} tokens a second, padding not counted"
    yield "time", time_words(record)
    if result.get("resumed_at"):
        yield "measured since", f"step {count(result['resumed_at'])}, where the run was resumed"
    yield "of it training", duration(result.get("train_seconds"))
    trained, whole = result.get("trainable_params"), result.get("total_params")
    yield "parameters", f"{parameters(trained)} trained of {parameters(whole)}"
    yield "optimizer", str(result.get("optimizer") or NONE)
    yield "processes", count(result.get("processes"))
    yield "weights in memory", size(result.get("memory_footprint"))
    yield (
        "samples",
        f"{count(at(result, 'rows', 'train'))} to train on, {count(at(result, 'rows', 'eval'))} held out",
    )
    yield from _saves(mapping(result.get("checkpoints")))


def _saves(saves: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    yield "checkpoints saved", count(saves.get("saved"))
    yield "a save took", duration(saves.get("seconds"))
    yield "a checkpoint has", size(saves.get("bytes"))
    if skipped := listed(saves.get("skipped")):
        yield "saves left out", f"{len(skipped)}, for want of room"
