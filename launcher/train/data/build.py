"""Prepared samples as the Trainer takes them: chosen, weighted, packed, with their collator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launcher.errors import Problem, RecipeError
from launcher.train.data.batches import make_collator
from launcher.train.data.encoded import result_rows
from launcher.train.data.store import open_samples, read_record
from launcher.train.job import Job
from launcher.train.tasks import train_task

PLACES = ("file", "number")
"""Columns that say which row a sample came from; the model never sees them."""


@dataclass(frozen=True, slots=True)
class Data:
    """What a Trainer needs to know of the data."""

    train: Any
    """Dataset of samples or packs; an IterableDataset, sharded by itself, when streaming."""
    eval: Any | None
    collate: Any | None
    """Samples to a batch; None: the Trainer's own (trl's)."""
    labels: tuple[str, ...] | None
    """Names of the classes."""
    counts: dict[str, Any]
    """Rows read, kept, truncated and dropped: `rows` of result.json; without those that are streamed."""
    streaming: bool = False
    samples: Any | None = None
    """The training samples before packing, for the first-batch gate."""
    formats: tuple[str, ...] = ()
    """Of the training sources: what they leave unlearnt."""
    collate_eval: Any | None = None
    """Samples to a batch of an evaluation; None: as in training."""


def build_data(job: Job, processing: Any) -> Data:
    """The data that `prepare` left for this run. RecipeError when it is not there."""
    record = read_record(job)
    labels = tuple(record["labels"]) if record.get("labels") else None
    formats = tuple(record["formats"])
    collate = train_task(job.task.name).collator(job, processing)
    collate_eval = _eval_collator(job, processing)
    if job.data.streaming:
        from launcher.train.data.stream import Stream

        evaluation = _finish(job, _without_places(_open(record, "eval")), processing)
        counts = row_counts(record, (), evaluation)
        stream = Stream(job, processing)
        return Data(
            stream, evaluation, collate, labels, counts,
            streaming=True, formats=formats, collate_eval=collate_eval,
        )  # fmt: skip
    rows = _open(record, "train")
    held_out = job.data.eval
    train_index, eval_index = _split(job, rows, held_out)
    train_index = _weighted(job, record["splits"]["train"], train_index)
    train = _without_places(rows.select(train_index))
    if eval_index is not None:
        evaluation = _without_places(rows.select(eval_index))
    else:
        evaluation = _without_places(_open(record, "eval"))
    packed = _finish(job, train, processing)
    packed_eval = _finish(job, evaluation, processing)
    counts = row_counts(record, packed, packed_eval)
    return Data(
        packed, packed_eval, collate, labels, counts,
        samples=train, formats=formats, collate_eval=collate_eval,
    )  # fmt: skip


def build_evaluation(job: Job, processing: Any) -> Data:
    """The rows held out alone, as an evaluation during the run has them. RecipeError as `build_data`.

    They stand in the place of the training rows, too, for trainers that will not do without.
    """
    record = read_record(job)
    held_out = job.data.eval
    if isinstance(held_out, Mapping):
        rows = _open(record, "train")
        rows = rows.select(_split(job, rows, held_out)[1])
    else:
        rows = _open(record, "eval")
    evaluation = _finish(job, _without_places(rows), processing)
    labels = tuple(record["labels"]) if record.get("labels") else None
    return Data(
        evaluation, evaluation, train_task(job.task.name).collator(job, processing), labels, {},
        formats=tuple(record["formats"]), collate_eval=_eval_collator(job, processing),
    )  # fmt: skip


def _open(record: Mapping[str, Any], name: str) -> Any:
    """The samples of a split, None when it has none."""
    split = record["splits"].get(name)
    return None if split is None else open_samples(Path(record["folder"]) / split["file"])


def _without_places(rows: Any) -> Any:
    return None if rows is None else rows.remove_columns(list(PLACES))


def _split(job: Job, rows: Any, held_out: Any) -> tuple[Any, Any | None]:
    """Indices of training and evaluation samples; all samples of one row stay on one side."""
    if not isinstance(held_out, Mapping):
        return np.arange(rows.num_rows), None
    table = rows.with_format("numpy")
    row = np.column_stack([table["file"][:], table["number"][:]])
    # Rows lie one after the other, so a row begins wherever its place changes.
    ordinal = np.concatenate([[0], np.cumsum(np.any(row[1:] != row[:-1], axis=1))])
    total = int(ordinal[-1]) + 1
    if total < 2:
        raise RecipeError(Problem("eval-split", "one row cannot be split", path="data.eval"))
    size = min(total - 1, max(1, round(total * float(held_out["split"]))))
    chosen: Any = np.zeros(total, dtype=bool)
    chosen[np.random.default_rng(job.seed).permutation(total)[:size]] = True
    evaluated = chosen[ordinal]
    return np.flatnonzero(~evaluated), np.flatnonzero(evaluated)


def _weighted(job: Job, split: Mapping[str, Any], index: Any) -> Any:
    """Each source's samples as often as its weight says: 2.5 is twice all of them and a random half."""
    weights = [float(source["weight"]) for source in job.data.train]
    if all(weight == 1.0 for weight in weights):
        return index
    random = np.random.default_rng(job.seed)
    parts = []
    for weight, source in zip(weights, split["sources"], strict=True):
        own = index[(index >= source["start"]) & (index < source["stop"])]
        whole, rest = divmod(weight, 1.0)
        parts += [own] * int(whole)
        least = 1 if rest and not whole else 0  # no source vanishes by its weight
        share = random.permutation(own)[: max(least, round(rest * len(own)))]
        parts.append(np.sort(share))
    return np.concatenate(parts)


def _finish(job: Job, samples: Any | None, processing: Any) -> Any | None:
    return None if samples is None else train_task(job.task.name).samples(job, samples, processing)


def _eval_collator(job: Job, processing: Any) -> Any | None:
    """Padded rows where training flattens samples that are not packed.

    Evaluations keep predictions by row, and leave out the rows that fill the ranks' last batches up.
    """
    if not job.data.padding_free or job.data.packing:
        return None
    return make_collator("pad", processing, pad_to_multiple_of=job.data.pad_to_multiple_of)


def row_counts(record: Mapping[str, Any], train: Any, evaluation: Any | None) -> dict[str, Any]:
    """`rows` of result.json, of what was prepared."""
    splits: Sequence[Mapping[str, Any]] = [split["counts"] for split in record["splits"].values()]
    return result_rows(len(train), 0 if evaluation is None else len(evaluation), splits)
