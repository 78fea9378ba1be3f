"""What became of the rows, and samples with what is learnt of them: a part of a page. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.execute.record import RunRecord
from launcher.report.html.elements import Markup, code, joined, table, tag
from launcher.report.html.sections import Section
from launcher.report.html.values import NONE, at, count, listed, mapping, number, objects, several

SAMPLES = 3
CHARACTERS = 3000
"""Of a sample that are shown."""


def data_section(record: RunRecord) -> Section | None:
    """None where no data was prepared."""
    splits = {
        name: split
        for name, split in mapping(record.data.get("splits")).items()
        if isinstance(split, Mapping)
    }
    samples = [sample for sample in objects(record.data.get("samples")) if listed(sample.get("pieces"))][
        :SAMPLES
    ]
    if not splits and not samples:
        return None
    parts: list[Markup] = []
    if splits:
        parts += [_counts(splits), _lengths(splits), *_sources(splits)]
    if samples:
        parts.append(tag("h3", f"{several(len(samples), 'sample')}, with what is learnt"))
        words = "Underlined pieces count in the loss; the rest is only read."
        parts.append(tag("p", tag("mark", "Underlined"), words.removeprefix("Underlined"), class_="small"))
        parts += [_sample(n, sample) for n, sample in enumerate(samples, 1)]
    return Section("data", "Data", joined(parts))


def _counts(splits: Mapping[str, Mapping[str, Any]]) -> Markup:
    head = (
        "split",
        "rows read",
        "kept",
        "dropped",
        "truncated",
        "split in several",
        "samples",
        "tokens",
        "learnt",
    )
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


def _lengths(splits: Mapping[str, Mapping[str, Any]]) -> Markup:
    rows = [
        (name, *(count(at(split, "lengths", key)) for key in ("mean", "p50", "p95", "max")))
        for name, split in splits.items()
        if mapping(split.get("lengths"))
    ]
    if not rows:
        return Markup("")
    return table(
        "Tokens of a sample", ("tokens of a sample", "mean", "median", "at 95 %", "longest"), rows, "numbers"
    )


def _sources(splits: Mapping[str, Mapping[str, Any]]) -> Iterator[Markup]:
    """Where the rows come from, what was not read of them, and why rows were dropped."""
    items = []
    for name, split in splits.items():
        for source in objects(split.get("sources")):
            unused = ", ".join(map(str, listed(source.get("unused"))))
            said = [f" ({name}): {count(source.get('rows'))} rows, read as {source.get('format')}"]
            if unused:
                said.append(f"; columns that were not read: {unused}")
            items.append(tag("li", code(source.get("path")), "".join(said)))
        dropped = mapping(at(split, "counts", "dropped"))
        items += [tag("li", f"{name}: {count(rows)} rows dropped: {why}") for why, rows in dropped.items()]
        notes = mapping(at(split, "counts", "notes"))
        items += [tag("li", f"{name}: {count(turns)} turns: {what}") for what, turns in notes.items()]
    if items:
        yield tag("ul", *items[:50], class_="plain small")


def _sample(place: int, sample: Mapping[str, Any]) -> Markup:
    file, line = sample.get("file"), sample.get("line")
    where = f"{Path(str(file)).name}, line {count(line)}" if file else "from the stream"
    words = f"{where}: {count(sample.get('tokens'))} tokens, {count(sample.get('targets'))} learnt"
    pieces, left = [], CHARACTERS
    for piece in listed(sample.get("pieces")):
        if not isinstance(piece, list | tuple) or len(piece) != 2:
            continue
        text = str(piece[0])
        if left <= 0:
            break
        shown = text[:left] + ("…" if len(text) > left else "")
        left -= len(text)
        pieces.append(tag("mark", shown) if piece[1] is True else tag("span", shown))
    if left < 0:
        words += f"; its first {CHARACTERS:,} characters"
    name = f"Sample {place}"
    shown = tag("pre", *pieces, class_="sample", tabindex="0", role="region", aria_label=name)
    return tag(
        "figure",
        tag("figcaption", tag("span", name, class_="head"), tag("span", words, class_="soft small")),
        shown,
    )
