"""Rows to prepared samples, once and before any process group: read, format, encode, cache by content."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from launcher.errors import MachineError, Problem, RecipeError
from launcher.files.safe_files import parse_json, write_json
from launcher.machine.probe import cache_root
from launcher.machine.software import installed_versions
from launcher.plan.settings import deciding_images, declared_keys
from launcher.recipe.keys import ALWAYS
from launcher.recipe.reward_columns import columns_read
from launcher.rows import prepared_images
from launcher.rows.image_rows import refuse_texts
from launcher.rows.sources import Row, source_bytes, source_lines
from launcher.tasks import FORMATS
from launcher.tasks.sequence_classification import REGRESSION
from launcher.tasks.task import Task
from launcher.train.data.chat import turns_end_open
from launcher.train.data.encoded import Counts, EncodedBatch, Encoder, dropped_text, encode_rows
from launcher.train.data.job_sources import Source, recognise
from launcher.train.data.special_tokens import text_encoder
from launcher.train.data.store import (
    RECORD,
    SampleWriter,
    arrow_columns,
    cached,
    content_key,
    open_samples,
    processing_digest,
    seal,
)
from launcher.train.hooks import Hooks
from launcher.train.job import Job
from launcher.train.model.models import label_order
from launcher.train.progress import Progress
from launcher.train.tasks import train_task

BATCH = 512
"""Rows that are encoded together."""
LARGE = 32 << 20
"""Bytes of data from which on several processes pay for their start."""
Item = TypeVar("Item")
Result = TypeVar("Result")
AHEAD = 3
"""Items in flight per process: enough to keep it busy, few enough to keep memory flat."""
_function: Callable[[Any], Any] | None = None


def prepare(job: Job, processing: Any, hooks: Hooks) -> dict[str, Any]:
    """Prepare all data of a plan, or find it in the cache; returns the record for data.json.

    processing: the tokenizer, or the image processor of image classification.
    """
    keep = not job.data.streaming
    splits = {"train": recognise(job, "train", hooks, digest=keep)}
    if isinstance(job.data.eval, list):
        splits["eval"] = recognise(job, "eval", hooks)
    key = content_key(_key_parts(job, processing, hooks, splits))
    formats = [source.detected.format for source in splits["train"]]
    _check_inserted(job, formats)
    if not keep:
        # Streamed rows are encoded during the run; only an evaluation set is small enough to keep.
        splits.pop("train")
    target = cache_root() / "data" / key

    def build(folder: Path) -> None:
        labels = _labels(job, splits, hooks)
        written = {
            name: _write_split(job, processing, hooks, name, sources, labels, folder)
            for name, sources in splits.items()
        }
        if labels and job.data.problem_type != REGRESSION:
            for split in written.values():
                split["labels"] = _label_counts(open_samples(folder / split["file"]), labels)
        base = {"schema_version": 1, "key": key, "task": job.task.name, "labels": labels}
        write_json(folder / RECORD, {**base, "splits": written})

    cached(target, "prepared data", build, rehash=True)
    record: dict[str, Any] = parse_json((target / RECORD).read_text(encoding="utf-8"))
    if keep and not job.tiny:
        _keep_images(job, record["splits"]["train"], splits["train"])
    for name, sources in splits.items():
        # The files may have been moved since their contents were cached.
        record["splits"][name]["files"] = [file for source in sources for file in source.files]
        for entry, source in zip(record["splits"][name]["sources"], sources, strict=True):
            lines = [] if job.tiny else source_lines(source.settings, offer="eval" not in splits)
            entry |= {"path": source.settings["path"], "files": lines, "unused": list(source.unused)}
    return {**record, "folder": str(target), "formats": formats}


def _keep_images(job: Job, split: Mapping[str, Any], sources: Sequence[Source]) -> None:
    """Let later plans of this recipe find what its rows hold of images."""
    if split.get("images") is None or not job.model.name_or_path:
        return
    files = [file for source in sources for file in source.files]
    settings = {name: job.at(name) for name in deciding_images()}
    found = prepared_images.PreparedImages(**split["images"])
    with contextlib.suppress(OSError):  # plans then count all tokens as tokens of images
        prepared_images.keep(settings, files, installed_versions().get("transformers", ""), found)


def _check_inserted(job: Job, formats: Sequence[str]) -> None:
    """RecipeError where a recipe asks for what a template inserts, and nothing is rendered by one."""
    name = "data.loss_on_inserted"
    if job.at(name) and not any(FORMATS[fmt].rendered for fmt in formats):
        message = f"the rows are {' and '.join(sorted(set(formats)))}; only chats are rendered by a template"
        raise RecipeError(Problem("loss-on", message, path=name, hint=f"remove {name}"))


def prepare_rows(
    job: Job, processing: Any, hooks: Hooks, labels: Sequence[str] | None, folder: Path
) -> dict[str, Any]:
    """Prepare the rows of `data.eval` alone into a folder, for a run that has its labels; their record."""
    sources = recognise(job, "eval", hooks)
    written = _write_split(job, processing, hooks, "eval", sources, labels, folder)
    seal(folder, [written["file"]])
    return {
        "schema_version": 1,
        "key": None,
        "task": job.task.name,
        "labels": labels,
        "splits": {"eval": {**written, "files": [file for source in sources for file in source.files]}},
        "folder": str(folder),
        "formats": [source.detected.format for source in sources],
    }


def _write_split(
    job: Job, processing: Any, hooks: Hooks, name: str, sources: Sequence[Source],
    labels: Sequence[str] | None, folder: Path,
) -> dict[str, Any]:  # fmt: skip
    """Encode the sources of a split into one file; returns what became of their rows."""
    counts, found = Counts(), []
    files = {file: number for number, file in enumerate(f for source in sources for f in source.files)}
    known = [source.lines for source in sources]
    total = sum(known) if all(known) else None  # type: ignore[arg-type]  # all() excludes None
    title = f"Preparing {name} data"
    with SampleWriter(folder / f"{name}.arrow") as writer, Progress(title, total) as progress:
        for source in sources:
            start, read, dropped = writer.samples, counts.read, dict(counts.dropped)
            encoder = text_encoder(job, processing, source.detected, labels)
            for rows, encoded in _encoded(job, hooks, source, encoder, counts):
                counts.add(encoded)
                places = [rows[index] for index in encoded.rows]
                numbers = [row.number for row in places]
                writer.write(
                    {**encoded.columns, "file": [files[row.file] for row in places], "number": numbers}
                )
                progress.add(len(rows))
            own = counts.since(read, dropped)
            found.append({
                "path": source.settings["path"], "format": source.detected.format,
                **own, "start": start, "stop": writer.samples,
            })  # fmt: skip
            if writer.samples == start:
                raise _nothing_left(source, own["dropped"])
            if job.task.sees_images and not any(counts.images_of(start)):
                refuse_texts(source.settings, f"{source.place}.path")
    images = counts.images()
    return {
        "file": f"{name}.arrow",
        "samples": writer.samples,
        "sources": found,
        "counts": counts.to_json(),
        "lengths": counts.lengths(),
        "first_rows": {name: [files[file], line] for name, (file, line) in counts.first_rows.items()},
        **({"image_tokens": images.tokens, "images": asdict(images)} if images else {}),
    }


def _encoded(
    job: Job, hooks: Hooks, source: Source, encoder: Encoder, counts: Counts
) -> Iterator[tuple[list[Row], EncodedBatch]]:
    """Batches of rows with what they became, in order."""

    def call(rows: list[Row]) -> tuple[list[Row], EncodedBatch]:
        # Only the places of the rows are needed beyond this point, and little to send between processes.
        encoded = encode_rows(encoder, rows)
        if encoded.rows:
            encoded.columns = arrow_columns(encoded.columns)
        return [Row({}, row.file, row.number) for row in rows], encoded

    batches = _batches(source.rows(job, hooks, counts))
    yield from ordered_map(call, batches, _processes(job, source))


def _processes(job: Job, source: Source) -> int:
    """How many processes encode: as many as asked for, else one per core where there is enough to do."""
    asked: int | None = job.data.num_proc
    if job.tiny or asked is not None:
        return 1 if job.tiny else int(asked or 1)
    if (source_bytes(source.settings) or 0) < LARGE:
        return 1
    return min(8, os.cpu_count() or 1)


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while batch := list(itertools.islice(rows, BATCH)):
        yield batch


def _nothing_left(source: Source, dropped: Mapping[str, int]) -> RecipeError:
    reasons, meaning = dropped_text(dropped)
    message = f"no row is left to train on ({reasons or 'no rows'})"
    too_long = dropped and dropped.keys() <= {"no-targets", "overlong", "image-cut"}
    place = "data.max_length" if too_long else f"{source.place}.path"
    hint = meaning or "give a file with rows"
    return RecipeError(Problem("nothing-left", message, str(source.settings["path"]), path=place, hint=hint))


def _labels(job: Job, splits: Mapping[str, Sequence[Source]], hooks: Hooks) -> list[str] | None:
    """Names of the classes, in the order of their ids; None for tasks without classes."""
    if not job.task.classifies:
        return None
    sources = splits["train"]
    rows = itertools.chain.from_iterable(source.rows(job, hooks) for source in sources)
    found = train_task(job.task.name).labels(job, rows)
    classes = sources[0].classes
    if classes and set(found) <= set(classes) and all(source.classes == classes for source in sources):
        found = classes  # also those that no row has, so that the numbers are the data set's
    return list(label_order(job, found))


def _deciding(task: Task) -> Iterator[str]:
    """Settings of `data` that name the cached samples, beside their rows.

    One that the task does not read is left out if 0.2.0 did not have it: its caches stay what they are.
    """
    for name, key in declared_keys().items():
        if key.decides_samples and (key.before is ALWAYS or key.is_read_by(task)):
            yield name


def _key_parts(
    job: Job, processing: Any, hooks: Hooks, splits: Mapping[str, Sequence[Source]]
) -> dict[str, Any]:
    """Everything that decides the samples; nothing that only decides how they are used."""
    import tokenizers

    names = ["task", *_deciding(job.task)]
    names += [f"{job.task.section}.{name}" for name in job.task.decides_samples]
    if job.data.fim:
        names.append("seed")
    if job.task.classifies:
        # A checkpoint that knows the labels decides their order.
        names += ["model.name_or_path", "model.revision", "model.config"]
    versions = {"tokenizers": tokenizers.__version__}
    versions |= {name: importlib.import_module(name).__version__ for name in job.task.prepared_by}
    rollouts = {}
    if job.task.rolls_out:
        names += ["trainer.max_completion_length"]
        read = [columns_read(entry) for entry in job.reward]
        rollouts = {
            "reference": 1,
            "columns": [None if one is None else sorted(one) for one in read],
            "template": job.trainer.others.get("chat_template_kwargs"),
        }
    return {
        **rollouts,
        **{name: job.settings.at(name) for name in names},
        "versions": versions,
        "tokenizer": processing_digest(processing) if job.task.reads_tokens else None,
        **({"turn_ends": "next-role"} if turns_end_open(processing) else {}),
        "hooks": hooks.digest if hooks.format_row is not None else None,
        "sources": {name: [source.key for source in sources] for name, sources in splits.items()},
    }


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], processes: int
) -> Iterator[Result]:
    """`map(function, items)` over forked processes, in order. What `function` raises is raised here.

    Unlike `Pool.imap` it does not read `items` to their end before the results are taken.
    """
    global _function
    if processes <= 1:
        yield from map(function, items)
        return
    _function = function  # inherited by fork: a tokenizer is loaded once, and never pickled
    threads = os.environ.get("TOKENIZERS_PARALLELISM", "true")
    # Each process works on one batch; threads inside the tokenizer would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    waiting: deque[Future[Result]] = deque()
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("fork")) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(_call, item))
                if len(waiting) >= AHEAD * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            hint = "lower data.num_proc: each process needs memory of its own"
            raise MachineError(
                Problem("process-killed", "a process that prepares data was killed", hint=hint)
            ) from error
        finally:
            os.environ["TOKENIZERS_PARALLELISM"] = threads
            pool.shutdown(wait=True, cancel_futures=True)
            _function = None


def _call(item: Any) -> Any:
    assert _function is not None, "set before the processes are forked"
    return _function(item)


def _label_counts(samples: Any, labels: Sequence[str]) -> dict[str, int]:
    """Label -> prepared samples, of token classification words, that have it.

    `labels` of the samples are ids, the ids of words, or a 0.0 or 1.0 for each label.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    ids = samples.with_format("arrow")["labels"][:]
    if pa.types.is_list(ids.type):
        ids = pc.list_flatten(ids)
        if pa.types.is_floating(ids.type):
            sums = ids.to_numpy().reshape(-1, len(labels)).sum(axis=0)
            return {name: int(count) for name, count in zip(labels, sums, strict=True)}
    found = {one["values"]: one["counts"] for one in pc.value_counts(ids).to_pylist()}
    return {name: found.get(number, 0) for number, name in enumerate(labels)}
