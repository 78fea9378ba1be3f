"""Prepared samples as the Trainer takes them: chosen, weighted, packed, with their collator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from launcher.errors import Problem, RecipeError
from launcher.train.data.batches import make_collator
from launcher.train.data.encoded import Data, result_rows
from launcher.train.data.store import open_samples, read_record
from launcher.train.hooks import load_hooks
from launcher.train.job import Job
from launcher.train.own import own_data
from launcher.train.tasks import train_task

PLACES = ("file", "number")
"""Columns with the row that a sample came from; the model never sees them."""


def build_data(job: Job, processing: Any) -> Data:
    """The data that `prepare` left for this run, or that hooks make. RecipeError when it is not there."""
    if job.task.made_by_hooks:
        return own_data(job, processing)
    record = read_record(job)
    if job.data.streaming:
        from launcher.train.data.stream import Stream

        evaluation = _finish(job, _chosen(record, "eval"), processing)
        stream = Stream(job, processing)
        return _data(job, processing, record, stream, evaluation, train_size=0, streaming=True)
    rows = _open(record, "train")
    train_index, eval_index = _split(job, rows, job.data.eval)
    train = _chosen(record, "train", _weighted(job, record["splits"]["train"], train_index))
    held_out = _chosen(record, "eval") if eval_index is None else _chosen(record, "train", eval_index)
    packed, evaluation = (_finish(job, samples, processing) for samples in (train, held_out))
    return _data(job, processing, record, packed, evaluation, train_size=len(packed), samples=train)


def build_evaluation(job: Job, processing: Any) -> Data:
    """The rows held out alone, as an evaluation during the run has them. RecipeError as `build_data`.

    They also take the place of the training rows, for trainers that need some.
    """
    if job.task.made_by_hooks:
        made = own_data(job, processing)
        if made.eval is None:
            message, hint = "make_datasets returns no evaluation dataset", "return one"
            raise RecipeError(
                Problem("no-eval-rows", message, str(job.python.file), path="python", hint=hint)
            )
        return replace(made, train=made.eval)
    record = read_record(job)
    if isinstance(job.data.eval, Mapping):
        held_out = _chosen(record, "train", _split(job, _open(record, "train"), job.data.eval)[1])
    else:
        held_out = _chosen(record, "eval")
    evaluation = _finish(job, held_out, processing)
    return _data(job, processing, record, evaluation, evaluation, train_size=0)


def _data(
    job: Job, processing: Any, record: Mapping[str, Any], train: Any, evaluation: Any, *, train_size: int,
    **more: Any,
) -> Data:  # fmt: skip
    eval_size, own = 0 if evaluation is None else len(evaluation), load_hooks(job).data_collator
    return Data(
        train,
        evaluation,
        train_task(job.task.name).collator(job, processing) if own is None else own(processing),
        tuple(record["labels"]) if record.get("labels") else None,
        result_rows(train_size, eval_size, [split["counts"] for split in record["splits"].values()]),
        formats=tuple(record["formats"]),
        collate_eval=_eval_collator(job, processing),
        **more,
    )


def _open(record: Mapping[str, Any], name: str) -> Any:
    """The samples of a split, None when it has none."""
    split = record["splits"].get(name)
    return None if split is None else open_samples(Path(record["folder"]) / split["file"])


def _chosen(record: Mapping[str, Any], name: str, index: Any = None) -> Any:
    """The samples of a split, those of `index` or all, without their places; None when it has none."""
    rows = _open(record, name)
    if rows is None:
        return None
    return (rows if index is None else rows.select(index)).remove_columns(list(PLACES))


def held_out_samples(job: Job, record: Mapping[str, Any]) -> int | None:
    """Samples of the training sources that the evaluation gets; None: `data.eval` takes no share of them."""
    index = None if job.data.streaming else _split(job, _open(record, "train"), job.data.eval)[1]
    return None if index is None else len(index)


def _split(job: Job, rows: Any, held_out: Any) -> tuple[Any, Any | None]:
    """Indices of training and evaluation samples; all samples of one row stay on one side."""
    if not isinstance(held_out, Mapping):
        return np.arange(rows.num_rows), None
    table = rows.with_format("numpy")
    row = np.column_stack([table["file"][:], table["number"][:]])
    # Rows follow each other, so a row begins wherever its place changes.
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
    """Each source's samples as often as its weight: 2.5 is twice all of them and a random half."""
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


def _finish(job: Job, samples: Any | None, processing: Any) -> Any:
    return None if samples is None else train_task(job.task.name).samples(job, samples, processing)


def _eval_collator(job: Job, processing: Any) -> Any | None:
    """Padded rows where training flattens samples that are not packed.

    Evaluations keep predictions by row, and leave out the rows that fill the ranks' last batches up.
    """
    if not job.data.padding_free or job.data.packing:
        return None
    return make_collator("pad", processing, pad_to_multiple_of=job.data.pad_to_multiple_of)
