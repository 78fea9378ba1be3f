"""The section about prepared data, from data.json: rows, lengths, sources, samples. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.report.sections import Block, Inline, Sample, Section, Text, filled, notes_of, table_of
from launcher.report.values import at, count, listed, mapping, number, objects, several, share

_NOTES = {
    "turn-masked": "turns masked by the rows",
    "empty-turn-masked": "turns of the assistant empty, and masked",
    "inserted-text-masked": "turns with text of the template that is masked",
    "reasoning-left-out": "turns whose reasoning the template leaves out",
    "word-without-token": "words of which the tokenizer leaves no token",
    "invalid-tags": "rows with tags in an order that their scheme excludes",
    "without-label": "rows with none of the labels",
    "anchor-repeated": "rows whose anchor is also one of their other texts",
    "contradicting-labels": "pairs of texts with different labels",
    "special-token-in-text": "rows whose text holds the special token",
}
"""Text of the notes in a split's counts."""
_LABELS = 20
"""Labels whose counts are shown."""
SAMPLES = 3
_CHARACTERS = 3000
"""Characters shown of a sample in a page."""


_COUNTS = {
    "split": "{split}", "rows read": "{counts.read:count}", "kept": "{counts.kept:count}",
    "dropped": "{dropped:count}", "truncated": "{counts.truncated:count}",
    "split in several": "{counts.split:count}", "samples": "{samples:count}", "tokens": "{left:count}",
    "cut off": "{lost:share}", "targets": "{targets:share}",
}  # fmt: skip
_LENGTHS = {
    "tokens of a sample": "{name}", "mean": "{mean:count}", "median": "{p50:count}", "at 95 %": "{p95:count}",
    "longest": "{max:count}",
}  # fmt: skip
_SOURCE = (
    "`{path}` ({split}): {rows:count} rows, read as {format}[; columns that were not read: {columns}]"
    "[; {read}]"
)


def data_section(
    data: Mapping[str, Any], samples: int = SAMPLES, longest: int = _CHARACTERS
) -> Section | None:
    """None where no data was prepared. longest: characters of a sample that are shown."""
    given = mapping(data.get("splits"))
    splits = {name: split for name, split in given.items() if isinstance(split, Mapping)}
    found = [sample for sample in objects(data.get("samples")) if listed(sample.get("pieces"))][:samples]
    counts = [{**split, **_shares(split), "split": name} for name, split in splits.items()]
    blocks: list[Block] = [*table_of("Rows", _COUNTS, counts, "numbers")]
    held_out, total = number(data.get("held_out")), number(at(splits, "train", "samples"))
    if held_out and total is not None:
        left = f"{count(total - held_out)} to train on, {count(held_out)} held out"
        blocks.append(Text([f"Samples of train: {left}."], "small"))
    lengths = [
        {**found, "name": f"{name}{of}"}
        for name, split in splits.items()
        for found, of in (
            (mapping(split.get("lengths")), ""),
            (mapping(split.get("image_tokens")), ", of images"),
            (mapping(at(split, "images", "images")), ", number of images"),
        )
        if found
    ]
    blocks += table_of("Tokens of a sample", _LENGTHS, lengths, "numbers")
    blocks += notes_of(note for name, split in splits.items() for note in _notes(name, split))
    if found:
        blocks.append(Text([f"{several(len(found), 'sample')} with their loss mask"], "heading"))
        blocks.append(Text(["Marked text contributes to the loss; the rest is only context."], "small"))
        blocks += [_sample(place, sample, longest) for place, sample in enumerate(found, 1)]
    return Section("data", "Data", blocks) if blocks else None


def _shares(split: Mapping[str, Any]) -> dict[str, float | None]:
    """Rows that were dropped, tokens that are left, the shares that were cut off and that are targets."""
    counts = mapping(split.get("counts"))
    tokens, lost, targets = (number(counts.get(key)) for key in ("tokens", "tokens_lost", "targets"))
    left = None if tokens is None else tokens - (lost or 0)
    return {
        "dropped": sum(number(value) or 0 for value in mapping(counts.get("dropped")).values()),
        "left": left,
        "lost": lost / tokens if lost is not None and tokens else None,
        "targets": targets / left if targets is not None and left else None,
    }


def _notes(name: str, split: Mapping[str, Any]) -> Iterator[Inline | None]:
    """Where the rows come from, which columns were not read, why rows were dropped, what is particular."""
    for source in objects(split.get("sources")):
        unused, files = (list(map(str, listed(source.get(key)))) for key in ("unused", "files"))
        yield filled(
            _SOURCE, {**source, "split": name, "columns": ", ".join(unused), "read": "; ".join(files)}
        )
    counts = mapping(split.get("counts"))
    read = number(counts.get("read"))
    for why, rows in mapping(counts.get("dropped")).items():
        of = f" ({share((number(rows) or 0) / read)})" if read else ""
        yield [f"{name}: {count(rows)} rows dropped: {why}{of}"]
    yield from ([f"{name}: {text}"] for text in note_texts(counts.get("notes")))
    if labels := {label: number(rows) or 0 for label, rows in mapping(split.get("labels")).items()}:
        most = sorted(labels.items(), key=lambda one: -one[1])
        more = f", and {len(most) - _LABELS} more" if len(most) > _LABELS else ""
        yield [
            f"{name}: labels: {', '.join(f'{label} {count(rows)}' for label, rows in most[:_LABELS])}{more}"
        ]


def note_texts(found: Any) -> list[str]:
    """Turns of conversations, labelled words and rows with something particular, with their counts."""
    texts = []
    for name, how_many in mapping(found).items():
        kind, _, what = name.partition(": ")
        text = f"{_NOTES[kind]} {what}".rstrip() if kind in _NOTES else f"turns: {name}"
        texts.append(f"{count(how_many)} {text}")
    return texts


def _sample(place: int, sample: Mapping[str, Any], longest: int) -> Sample:
    file, line = sample.get("file"), sample.get("line")
    where = f"{Path(str(file)).name}, line {count(line)}" if file else "from the stream"
    about = f"{where}: {count(sample.get('tokens'))} tokens, {count(sample.get('targets'))} of them targets"
    pieces, left = [], longest
    for piece in listed(sample.get("pieces")):
        if left > 0 and isinstance(piece, list | tuple) and len(piece) == 2:
            text = str(piece[0])
            pieces.append((text[:left] + "…" * (len(text) > left), piece[1] is True))
            left -= len(text)
    if left < 0:
        about += f"; its first {longest:,} characters"
    return Sample(f"Sample {place}", about, pieces, _thumbnails(sample))


_DATA_URI = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/=]{1,100000}")


def _thumbnails(sample: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The images of a sample, small, each with its size and where its tokens are."""
    found: list[tuple[str, str]] = []
    for place, image in enumerate(objects(sample.get("images")), 1):
        source, sides, tokens = (
            str(image.get("thumbnail")),
            listed(image.get("size")),
            listed(image.get("tokens")),
        )
        if _DATA_URI.fullmatch(source):
            about = (
                f"Image {place}: {Path(str(image.get('name'))).name}, {' x '.join(map(count, sides))} pixels"
            )
            found.append((source, about + (f", tokens {' to '.join(map(count, tokens))}" if tokens else "")))
    if found and (more := number(sample.get("more_images"))):
        found.append(("", f"and {count(more)} more"))
    return found
