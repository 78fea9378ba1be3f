"""The gate before step 1: a run whose batches teach nothing, or not what was asked, does not start."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.rows.class_names import IGNORED
from launcher.train.data.encoded import Data, decode_pieces, dropped_text, lost_rows, mark_pieces
from launcher.train.data.image_chat import image_pieces
from launcher.train.data.special_tokens import warning
from launcher.train.data.tokenize import loss_on_of
from launcher.train.hooks import OwnCollator
from launcher.train.job import Job
from launcher.train.tasks import train_task

LOOKED_AT = 32
"""Samples of the first batches that are looked at: enough to distinguish a rule from an accident."""
SAMPLED = 1000
"""Rows of a stream that truncation is judged by."""


def check_first_batch(job: Job, tokenizer: Any, data: Data, micro_batch: int) -> None:
    """RecipeError, with the sample shown, when the first batch is not what the recipe asks for."""
    train_task(job.task.name).check_batch(job, tokenizer, data, micro_batch)


def check_targets(
    tokenizer: Any, data: Data, micro_batch: int, *, first: int = 0
) -> Sequence[Mapping[str, Any]]:
    """The samples that were looked at, before they are packed. RecipeError where the collated batch lost
    target tokens, or has none.

    first: labels at the start of a row that no model predicts.
    """
    batch, samples = _look(data, micro_batch)
    assert data.collate is not None, "these tasks have a collator of ours"
    collated = data.collate([dict(sample) for sample in batch])
    own = isinstance(data.collate, OwnCollator)
    if own and getattr(collated.get("labels"), "ndim", 0) < 2:
        return samples  # the file decides what is learned
    kept = int((collated["labels"][:, first:] != IGNORED).sum())
    expected = sum(label != IGNORED for sample in batch for label in sample["labels"][first:])
    if kept == 0:
        raise _stop(
            "no-targets", "no token of the first batch carries loss", tokenizer, batch[0], "data.loss_on",
            "look at the rows: `effilaunch prepare RECIPE --show 3`",
        )  # fmt: skip
    if kept < expected and not own:
        raise _stop(
            "targets-lost", f"the batch keeps {kept} of {expected} target tokens", tokenizer, batch[0],
            "model.tokenizer", "a pad token that is also a real token masks it; name another pad token",
        )  # fmt: skip
    return samples


def check_steps(data: Data, micro_batch: int, processes: int, *, drop_last: bool) -> None:
    """RecipeError when dataloader_drop_last leaves not one whole batch for every process.

    The Trainer would warn and return without a step. How long a stream is nobody knows.
    """
    if not drop_last or not isinstance(data.train, Sized) or len(data.train) >= micro_batch * processes:
        return
    message = f"{len(data.train)} samples are fewer than {processes} batches of {micro_batch}, one for each "
    message += "process, and smaller ones are dropped"
    path = "trainer.dataloader_drop_last"
    hint = "remove it, give more rows, or lower trainer.per_device_train_batch_size"
    raise RecipeError(Problem("no-steps", message, path=path, hint=hint))


def _look(data: Data, micro_batch: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(a micro-batch as it is trained, samples before packing), the same on every process.

    One that alone refused its share would leave the others waiting for it.
    """
    if data.streaming:
        batch = list(itertools.islice(data.train.fresh(), micro_batch))
        return batch, list(itertools.islice(data.train.fresh().unpacked(), LOOKED_AT))
    batch = [data.train[index] for index in range(min(micro_batch, len(data.train)))]
    if data.samples is None:
        return batch, batch
    return batch, [data.samples[index] for index in range(min(LOOKED_AT, len(data.samples)))]


def check_masks(
    job: Job, tokenizer: Any, samples: Sequence[Mapping[str, Any]], formats: Sequence[str]
) -> None:
    # The first samples may all be of one source; one without masks does not show how others are masked.
    parts = {loss_on_of(job.task, name, job.data.loss_on) for name in formats}
    if parts and "all" not in parts and all(IGNORED not in sample["labels"][1:] for sample in samples):
        asked = " or ".join(sorted(parts))
        raise _stop(
            "mask-without-effect", f"loss_on {asked} masks no token of the first {len(samples)} samples",
            tokenizer, samples[0], "data.loss_on", "use loss_on: all, or rows with something to mask",
        )  # fmt: skip
    # A sample of max_length may have lost its end, and a piece of a long text may have none.
    whole = [sample for sample in samples if len(sample["input_ids"]) < job.data.max_length]
    ends = end_tokens(tokenizer)
    ended = [sample for sample in whole if ends.intersection(sample["input_ids"][1:])]
    if ended and not any(ends.intersection(sample["labels"][1:]) for sample in ended):
        raise _stop(
            "eos-masked", "no sample of the first batch teaches the model to stop: its end carries no loss",
            tokenizer, ended[0], "data.loss_on",
            "the chat template must mark the end of the assistant's turn",
        )  # fmt: skip


def check_truncation(job: Job, record: Mapping[str, Any]) -> None:
    """RecipeError when truncation took more than `data.max_truncated` of the tokens of a prepared split."""
    for name, split in record["splits"].items():
        _refuse_loss(job, split["counts"], f"the {name} tokens")


def check_dropped(job: Job, record: Mapping[str, Any]) -> None:
    """RecipeError when more than `data.max_dropped` of a source's rows were dropped, unasked."""
    for split in record["splits"].values():
        for source in split["sources"]:
            _refuse_dropped(job, source["rows"], source["dropped"], str(source["path"]))


def check_stream(job: Job, processing: Any) -> None:
    """`check_truncation` and `check_dropped` for rows that are streamed, on the first of them: nobody knows
    the others yet."""
    from launcher.train.data.stream import Stream

    stream = Stream(job, processing)
    for _ in stream.unpacked(passes=1):
        if stream.counts["read"] >= SAMPLED:
            break
    counts = stream.counts
    if found := warning(job, stream.noted.notes, stream.noted.first_rows):
        print(f"WARNING: in the first {counts['read']:,} rows of the stream, {found}")
    _refuse_loss(job, counts, "the tokens in a sample of the streamed rows")
    _refuse_dropped(job, counts["read"], counts["dropped"], "data.train, the first rows of the stream")


def _refuse_loss(job: Job, counts: Mapping[str, Any], what: str) -> None:
    allowed = job.data.max_truncated
    share = counts["tokens_lost"] / counts["tokens"] if counts["tokens"] else 0.0
    if share <= allowed:
        return
    rows = f"in {counts['truncated']:,} of {counts['read']:,} rows"
    message = f"{share:.1%} of {what} were cut off, {rows}; at most {allowed:.0%} may be"
    hint = "raise data.max_length, use data.overlong: drop (or split, for text), or accept it with "
    hint += "data.max_truncated"
    raise RecipeError(Problem("too-much-truncated", message, path="data.max_length", hint=hint))


def _refuse_dropped(job: Job, read: int, dropped: Mapping[str, int], file: str) -> None:
    allowed, lost = job.data.max_dropped, lost_rows(dropped)
    if lost <= allowed * read:
        return
    reasons, meaning = dropped_text(dropped)
    message = f"{lost:,} of {read:,} rows ({lost / read:.1%}) were dropped ({reasons}); at most "
    message += f"{allowed:.0%} may be"
    hint = f"{meaning}; correct the rows, or raise data.max_dropped"
    raise RecipeError(Problem("too-much-dropped", message, file=file, path="data.max_dropped", hint=hint))


def end_tokens(tokenizer: Any) -> set[int]:
    """Ids of EOS and of the special tokens that templates end turns with."""
    special = {key for key, token in tokenizer.added_tokens_decoder.items() if token.special}
    return special | {tokenizer.eos_token_id}


def _stop(
    code: str, message: str, tokenizer: Any, sample: Mapping[str, Any], path: str, hint: str
) -> RecipeError:
    if "image_spans" in sample:
        pieces = image_pieces(tokenizer, sample)
    else:
        pieces = decode_pieces(tokenizer, sample["input_ids"], sample["labels"])
    shown = mark_pieces(pieces)
    return RecipeError(Problem(code, f"{message}\n  the sample: {shown}\n ", path=path, hint=hint))
