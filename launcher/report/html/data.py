"""The data section of a run's page: counts of rows, and samples with their loss mask. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.execute.record import RunRecord
from launcher.report.html.elements import (
    NONE,
    Markup,
    at,
    bullets,
    code,
    count,
    escaped,
    joined,
    listed,
    mapping,
    number,
    objects,
    several,
    table,
    tag,
)
from launcher.report.html.page import Section

_SAMPLES = 3
_CHARACTERS = 3000
"""Characters shown of a sample."""


def data_section(record: RunRecord) -> Section | None:
    """None where no data was prepared."""
    given = mapping(record.data.get("splits"))
    splits = {name: split for name, split in given.items() if isinstance(split, Mapping)}
    samples = [sample for sample in objects(record.data.get("samples")) if listed(sample.get("pieces"))]
    samples = samples[:_SAMPLES]
    if not splits and not samples:
        return None
    parts: list[Markup] = []
    if splits:
        parts += [_counts(splits), *_lengths(splits), *_sources(splits)]
    if samples:
        parts.append(tag("h3", f"{several(len(samples), 'sample')} with their loss mask"))
        rest = " pieces contribute to the loss; the rest is only context."
        parts.append(tag("p", tag("mark", "Underlined"), rest, class_="small"))
        parts += [_sample(n, sample) for n, sample in enumerate(samples, 1)]
    return Section("data", "Data", joined(parts))


def _counts(splits: Mapping[str, Mapping[str, Any]]) -> Markup:
    head = (
        "split", "rows read", "kept", "dropped", "truncated", "split in several", "samples", "tokens",
        "target tokens",
    )  # fmt: skip
    rows = []
    for name, split in splits.items():
        counts = mapping(split.get("counts"))
        dropped = sum(number(value) or 0 for value in mapping(counts.get("dropped")).values())
        rows.append((
            name, count(counts.get("read")), count(counts.get("kept")), count(dropped),
            count(counts.get("truncated")), count(counts.get("split")), count(split.get("samples")),
            count(_left(counts)), _share(counts.get("targets"), _left(counts)),
        ))  # fmt: skip
    return table("Rows", head, rows, "numbers")


def _left(counts: Mapping[str, Any]) -> float | None:
    tokens, lost = number(counts.get("tokens")), number(counts.get("tokens_lost")) or 0
    return None if tokens is None else tokens - lost


def _share(part: Any, whole: Any) -> str:
    some, every = number(part), number(whole)
    return NONE if some is None or not every else f"{some / every:.1%}"


def _lengths(splits: Mapping[str, Mapping[str, Any]]) -> list[Markup]:
    rows = [
        (name, *(count(at(split, "lengths", key)) for key in ("mean", "p50", "p95", "max")))
        for name, split in splits.items()
        if mapping(split.get("lengths"))
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
            items.append(joined([code(source.get("path")), escaped(text)], ""))
        dropped, notes = (mapping(at(split, "counts", key)) for key in ("dropped", "notes"))
        items += [f"{name}: {count(rows)} rows dropped: {why}" for why, rows in dropped.items()]
        items += [f"{name}: {count(turns)} turns: {what}" for what, turns in notes.items()]
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
    return tag("figure", caption, text_block)
