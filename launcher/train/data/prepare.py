"""Rows to prepared samples, once and before any process group: read, format, encode, cache by content."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.train.data.counts import Counts
from launcher.train.data.encode import EncodedBatch, Encoder, encoder_for
from launcher.train.data.formats import Detected, canonical, collect_labels, detect
from launcher.train.data.parallel import ordered_map
from launcher.train.data.progress import Progress
from launcher.train.data.sources import Row, iter_rows, source_bytes, source_files
from launcher.train.data.store import (
    RECORD,
    SampleWriter,
    content_key,
    file_digest,
    tokenizer_digest,
)
from launcher.train.gguf import cache_root
from launcher.train.hooks import Hooks
from launcher.train.job import Job
from launcher.train.models import label_order
from launcher.train.outcome import write_json

PEEK = 100
"""Rows that the format is recognised from."""
BATCH = 512
"""Rows that are encoded together."""
LARGE = 32 << 20
"""Bytes of data from which on several processes pay for their start."""


@dataclass(frozen=True, slots=True)
class Source:
    """One source of the plan, recognised."""

    settings: Mapping[str, Any]
    detected: Detected
    digest: str
    """Of the files' contents; of the name and revision for a hub id."""
    lines: int | None
    """Line feeds of its files: about the rows of line formats; None where nothing can be said."""

    def rows(self, job: Job, hooks: Hooks, counts: Counts | None = None) -> Iterator[Row]:
        """Canonical rows; those that `format_row` drops are counted."""
        for row in raw_rows(job, self.settings, hooks, counts):
            yield canonical(row, self.detected)


def raw_rows(
    job: Job, settings: Mapping[str, Any], hooks: Hooks, counts: Counts | None = None
) -> Iterator[Row]:
    """Rows as the source holds them, after the user's `format_row`."""
    if job.tiny:
        from launcher.train.tiny import tiny_rows

        made = tiny_rows(settings, job.value("task"), job.value("data.loss_on"))
        rows: Iterator[Row] = iter(made)
    else:
        rows = iter_rows(settings, job.value("model.cache_dir"))
    for row in rows:
        if counts is not None:
            counts.read += 1
        if hooks.format_row is None:
            yield row
            continue
        values = hooks.format_row(row.values, row.file, row.number)
        if values is not None:
            yield Row(values, row.file, row.number)
        elif counts is not None:
            counts.drop("format_row", 1)


def recognise(job: Job, settings: Mapping[str, Any], hooks: Hooks, *, digest: bool = True) -> Source:
    """Find the format of a source from its first rows, and digest its contents.

    digest: False for rows that are streamed, whose contents are not cached. RecipeError when it holds
    no rows or rows of no known format.
    """
    first = list(itertools.islice(raw_rows(job, settings, hooks), PEEK))
    path = str(settings["path"])
    if not first:
        raise RecipeError(Problem("no-rows", "holds no rows", file=path, path="data.train"))
    asked, columns = settings.get("format") or "auto", settings.get("columns") or {}
    if job.tiny:
        columns = {}
    detected = detect(first, asked, columns, job.value("task"), path)
    if job.tiny or not digest:
        return Source(settings, detected, "tiny" if job.tiny else "stream", None)
    digests, lines = [], 0
    files = source_files(settings)
    plain = all(file.suffix in (".jsonl", ".ndjson", ".csv", ".tsv", ".txt") for file in files)
    for file in files:
        content, count = file_digest(file)
        digests.append(f"{file.name}:{content}")
        lines += count
    if not files:
        digests = [f"hub:{path}:{settings.get('name')}:{settings.get('split')}:{settings.get('revision')}"]
    return Source(settings, detected, ";".join(digests), lines if plain and files else None)


def prepare(job: Job, processing: Any, hooks: Hooks) -> dict[str, Any]:
    """Prepare all data of a plan, or find it in the cache; returns the record for data.json.

    processing: the tokenizer, or the image processor of image classification.
    """
    keep = not job.value("data.streaming")
    splits = {"train": [recognise(job, source, hooks, digest=keep) for source in job.value("data.train")]}
    held_out = job.value("data.eval")
    if isinstance(held_out, list):
        splits["eval"] = [recognise(job, settings, hooks) for settings in held_out]
    labels = _labels(job, splits, hooks)
    key = content_key(_key_parts(job, processing, hooks, splits, labels))
    base = {"schema_version": 1, "key": key, "task": job.value("task"), "labels": labels}
    formats = [source.detected.format for source in splits["train"]]
    if not keep:
        # Streamed rows are encoded during the run; only an evaluation set is small enough to keep.
        splits.pop("train")
    target = cache_root() / "data" / key
    if not (target / RECORD).is_file():
        _build(job, processing, hooks, splits, labels, base, target)
    return {**read_cached(target), "formats": formats}


def read_cached(folder: Path) -> dict[str, Any]:
    """The record inside a cache folder."""
    import json

    record: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    return {**record, "folder": str(folder)}


def _build(
    job: Job,
    processing: Any,
    hooks: Hooks,
    splits: Mapping[str, Sequence[Source]],
    labels: Sequence[str] | None,
    base: Mapping[str, Any],
    target: Path,
) -> None:
    """Encode into a folder aside; the rename makes it complete. Two builders at once agree."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        written = {
            name: _write_split(job, processing, hooks, name, sources, labels, aside)
            for name, sources in splits.items()
        }
        write_json(aside / RECORD, {**base, "splits": written})
        if not (target / RECORD).is_file():
            shutil.rmtree(target, ignore_errors=True)  # what somebody left of an older one
        with contextlib.suppress(OSError):  # somebody else was first, with the same samples
            aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_split(
    job: Job,
    processing: Any,
    hooks: Hooks,
    name: str,
    sources: Sequence[Source],
    labels: Sequence[str] | None,
    folder: Path,
) -> dict[str, Any]:
    """Encode the sources of a split into one file, and say what became of their rows."""
    counts, found = Counts(), []
    files: dict[str, int] = {}
    known = [source.lines for source in sources]
    total = sum(known) if all(known) else None  # type: ignore[arg-type]  # all() excludes None
    title = f"Preparing {name} data"
    with SampleWriter(folder / f"{name}.arrow") as writer, Progress(title, total) as progress:
        for source in sources:
            start, before = writer.samples, counts.read
            encoder = encoder_for(job, processing, source.detected, labels)
            for rows, encoded in _encoded(job, hooks, source, encoder, counts):
                counts.add(encoded)
                writer.write(_with_places(encoded, rows, files))
                progress.add(len(rows))
            found.append(
                {
                    "path": source.settings["path"],
                    "format": source.detected.format,
                    "rows": counts.read - before,
                    "start": start,
                    "stop": writer.samples,
                }
            )
            if writer.samples == start:
                raise _nothing_left(source, counts)
    return {
        "file": f"{name}.arrow",
        "samples": writer.samples,
        "files": list(files),
        "sources": found,
        "counts": counts.to_json(),
        "lengths": counts.lengths(),
    }


def _encoded(
    job: Job, hooks: Hooks, source: Source, encoder: Encoder, counts: Counts
) -> Iterator[tuple[list[Row], EncodedBatch]]:
    """Batches of rows with what they became, in order."""

    def call(rows: list[Row]) -> tuple[list[Row], EncodedBatch]:
        # Only the places of the rows are needed beyond this point, and little to send between processes.
        return [Row({}, row.file, row.number) for row in rows], encoder(rows)

    batches = _batches(source.rows(job, hooks, counts))
    yield from ordered_map(call, batches, _processes(job, source))


def _processes(job: Job, source: Source) -> int:
    """How many processes encode: as many as asked for, where there is enough to do."""
    import os

    size = 0 if job.tiny else source_bytes(source.settings) or 0
    if size < LARGE or source.detected.format in ("image", "preference"):
        return 1
    return int(job.value("data.num_proc") or min(8, os.cpu_count() or 1))


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while batch := list(itertools.islice(rows, BATCH)):
        yield batch


def _with_places(encoded: EncodedBatch, rows: Sequence[Row], files: dict[str, int]) -> dict[str, list[Any]]:
    """The batch's columns and, for each sample, which row of which file it came from."""
    places = [rows[index] for index in encoded.rows]
    return {
        **encoded.columns,
        "file": [files.setdefault(row.file, len(files)) for row in places],
        "number": [row.number for row in places],
    }


def _nothing_left(source: Source, counts: Counts) -> RecipeError:
    reasons = ", ".join(f"{reason}: {rows}" for reason, rows in sorted(counts.dropped.items()))
    return RecipeError(
        Problem(
            "no-targets",
            f"no row is left to train on ({reasons or 'no rows'})",
            file=str(source.settings["path"]),
            path="data.max_length" if "no-targets" in counts.dropped else "data.train",
            hint="no-targets: the prompts alone fill data.max_length, or data.loss_on leaves no token; "
            "raise the one or change the other",
        )
    )


def _labels(job: Job, splits: Mapping[str, Sequence[Source]], hooks: Hooks) -> list[str] | None:
    """Names of the classes, in the order of their ids; None for tasks without classes."""
    if not str(job.value("task")).endswith("-classification"):
        return None
    rows = itertools.chain.from_iterable(source.rows(job, hooks) for source in splits["train"])
    return list(label_order(job, collect_labels(rows)))


def _key_parts(
    job: Job,
    processing: Any,
    hooks: Hooks,
    splits: Mapping[str, Sequence[Source]],
    labels: Sequence[str] | None,
) -> dict[str, Any]:
    """Everything that decides the samples; nothing that only decides how they are used."""
    names = ("task", "seed", "data.max_length", "data.overlong", "data.loss_on", "data.fim", "data.streaming")
    from_trl = {name: job.value(name) for name in ("trainer.truncation_mode",) if job.value("task") == "dpo"}
    image = job.value("task") == "image-classification"
    return {
        **{name: job.value(name) for name in names},
        **from_trl,
        "tokenizer": None if image else tokenizer_digest(processing),
        "hooks": hooks.digest if hooks.format_row is not None else None,
        "labels": labels,
        "sources": {
            name: [
                [source.digest, source.settings.get("format"), source.detected.format,
                 dict(source.detected.columns)]
                for source in sources
            ]
            for name, sources in splits.items()
        },
    }  # fmt: skip
