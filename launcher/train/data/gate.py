"""The gate before step 1: a run whose batches teach nothing, or not what was asked, does not start."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.train.data.build import Data
from launcher.train.data.samples import decode_pieces, mark_pieces
from launcher.train.job import Job

IGNORED = -100
LOOKED_AT = 32
"""Samples of the first batches that are looked at: enough to tell a rule from an accident."""
TOKEN_TASKS = ("causal-lm", "seq2seq-lm")


def check_first_batch(job: Job, tokenizer: Any, data: Data, micro_batch: int) -> None:
    """RecipeError, with the sample shown, when the first batch is not what the recipe asks for.

    Looks at what the Trainer gets: the samples before they are packed, and the collated batch.
    """
    if job.value("task") not in TOKEN_TASKS:
        return
    batch = _first(data.train.fresh() if data.streaming else data.train, micro_batch)
    samples = _first(data.samples, LOOKED_AT) if data.samples is not None else batch
    assert data.collate is not None, "these tasks have a collator of ours"
    collated = data.collate([dict(sample) for sample in batch])
    learnt = int((collated["labels"] != IGNORED).sum())
    expected = sum(_learnt(sample) for sample in batch)
    if learnt == 0:
        raise _stop(
            "no-targets", "no token of the first batch carries loss", tokenizer, batch[0], "data.loss_on",
            "look at the rows: `effilaunch prepare RECIPE --show 3`",
        )  # fmt: skip
    if learnt < expected:
        raise _stop(
            "targets-lost", f"the batch keeps {learnt} of {expected} learnt tokens", tokenizer, batch[0],
            "model.tokenizer", "a pad token that is also a real token masks it; name another pad token",
        )  # fmt: skip
    if job.value("task") == "causal-lm":
        _check_masks(job, tokenizer, samples)


def _check_masks(job: Job, tokenizer: Any, samples: Sequence[Mapping[str, Any]]) -> None:
    asked = job.value("data.loss_on")
    if asked in ("completion", "assistant") and all(_all_learnt(sample) for sample in samples):
        raise _stop(
            "mask-without-effect", f"loss_on {asked} masks no token of the first {len(samples)} samples",
            tokenizer, samples[0], "data.loss_on", "use loss_on: all, or rows with something to mask",
        )  # fmt: skip
    ends = [sample for sample in samples if len(sample["input_ids"]) < job.value("data.max_length")]
    if ends and tokenizer.eos_token_id is not None and not any(_end_learnt(tokenizer, s) for s in ends):
        raise _stop(
            "eos-masked", "no sample of the first batch teaches the model to stop: its end carries no loss",
            tokenizer, ends[0], "data.loss_on", "the chat template must mark the end of the assistant's turn",
        )  # fmt: skip


def check_truncation(job: Job, record: Mapping[str, Any]) -> None:
    """RecipeError when truncation took more than `data.max_truncated` of the tokens."""
    for name, split in record["splits"].items():
        counts = split["counts"]
        allowed = job.value("data.max_truncated", 1.0)
        if not counts["tokens"] or counts["tokens_lost"] / counts["tokens"] <= allowed:
            continue
        share = counts["tokens_lost"] / counts["tokens"]
        raise RecipeError(
            Problem(
                "too-much-truncated",
                f"{share:.1%} of the {name} tokens were cut off, in {counts['truncated']:,} of "
                f"{counts['read']:,} rows; at most {allowed:.0%} may be",
                path="data.max_length",
                hint="raise data.max_length, use data.overlong: drop (or split, for text), "
                "or accept it with data.max_truncated",
            )
        )


def _first(rows: Any, count: int) -> list[dict[str, Any]]:
    if hasattr(rows, "__len__"):
        return [rows[index] for index in range(min(count, len(rows)))]
    return list(itertools.islice(iter(rows), count))


def _learnt(sample: Mapping[str, Any]) -> int:
    return sum(label != IGNORED for label in sample["labels"])


def _all_learnt(sample: Mapping[str, Any]) -> bool:
    return all(label != IGNORED for label in sample["labels"][1:])


def _end_learnt(tokenizer: Any, sample: Mapping[str, Any]) -> bool:
    """Whether the last learnt token is one that ends a text or a turn."""
    last = next((label for label in reversed(sample["labels"]) if label != IGNORED), None)
    return last in end_tokens(tokenizer)


def end_tokens(tokenizer: Any) -> set[int]:
    """Ids of EOS and of the special tokens that templates end turns with."""
    special = {key for key, token in tokenizer.added_tokens_decoder.items() if token.special}
    return special | {tokenizer.eos_token_id}


def _stop(
    code: str, message: str, tokenizer: Any, sample: Mapping[str, Any], path: str, hint: str
) -> RecipeError:
    shown = mark_pieces(decode_pieces(tokenizer, sample["input_ids"], sample["labels"]))
    return RecipeError(Problem(code, f"{message}\n  the sample: {shown}\n ", path=path, hint=hint))
