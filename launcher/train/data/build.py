"""The plan's `data` settings to datasets of token ids, with the counts a report needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.train.data.formats import SHAPES, check_loss_on, find_format, to_canonical
from launcher.train.data.reading import read_rows
from launcher.train.data.tokenize import Tokenise
from launcher.train.job import Job

_COLUMNS = ["input_ids", "attention_mask", "labels"]


@dataclass(frozen=True, slots=True)
class Data:
    """Tokenised rows. `train` and `eval` are `datasets.Dataset`s of input_ids, attention_mask, labels."""

    train: Any
    eval: Any | None
    truncated: int
    """Rows longer than max_length, which lost their end."""
    dropped: int
    """Rows left out because truncation or masking left no token to learn."""

    def counts(self) -> dict[str, int]:
        held_out = 0 if self.eval is None else self.eval.num_rows
        return {
            "train": self.train.num_rows,
            "eval": held_out,
            "truncated": self.truncated,
            "dropped": self.dropped,
        }


def build_data(job: Job, tokenizer: Any) -> Data:
    """Read, format and tokenise the rows of a plan. RecipeError when a source is unusable."""
    if job.tiny:
        from launcher.train.tiny import tiny_sources

        sources = tiny_sources(job.value("data.train"))
    else:
        sources = [(source, read_rows(source["path"])) for source in job.value("data.train")]
    train, truncated, dropped = _encode_all(job, tokenizer, sources)
    held_out = job.value("data.eval")
    if not held_out:
        return Data(train, None, truncated, dropped)
    if isinstance(held_out, Mapping):
        if train.num_rows < 2:
            raise RecipeError(Problem("eval-split", "one row cannot be split", path="data.eval"))
        parts = train.train_test_split(test_size=held_out["split"], seed=job.seed)
        return Data(parts["train"], parts["test"], truncated, dropped)
    if job.tiny:
        from launcher.train.tiny import tiny_sources

        eval_sources = tiny_sources(held_out)
    else:
        eval_sources = [(source, read_rows(source["path"])) for source in held_out]
    evaluation, more_truncated, more_dropped = _encode_all(job, tokenizer, eval_sources)
    return Data(train, evaluation, truncated + more_truncated, dropped + more_dropped)


def _encode_all(
    job: Job, tokenizer: Any, sources: Sequence[tuple[Mapping[str, Any], Any]]
) -> tuple[Any, int, int]:
    """(rows, truncated, dropped) of several sources together."""
    from datasets import concatenate_datasets

    parts, truncated, dropped = [], 0, 0
    for source, rows in sources:
        encoded = encode_source(job, tokenizer, source, rows)
        kept = encoded.filter(_has_targets, input_columns=["targets"])
        truncated += sum(encoded["truncated"])
        dropped += encoded.num_rows - kept.num_rows
        if kept.num_rows == 0:
            raise RecipeError(
                Problem(
                    "no-targets",
                    "no row has a token to learn: the prompts alone fill data.max_length",
                    file=source["path"],
                    path="data.max_length",
                    hint="raise data.max_length, or use data.loss_on: all",
                )
            )
        parts.append(kept.select_columns(_COLUMNS))
    return concatenate_datasets(parts), truncated, dropped


def _has_targets(targets: int) -> bool:
    return targets > 0


def encode_source(job: Job, tokenizer: Any, source: Mapping[str, Any], rows: Any) -> Any:
    """One source as a Dataset of ids and labels, with the columns `truncated` and `targets` beside them."""
    renames = source.get("columns") or {}
    fmt = find_format(rows.column_names, source.get("format") or "auto", renames, source["path"])
    loss_on = check_loss_on(fmt, job.value("data.loss_on"))
    canonical = to_canonical(rows, fmt, renames)
    tokenise = Tokenise(tokenizer, SHAPES[fmt], loss_on, job.value("data.max_length"))
    processes = job.value("data.num_proc")
    if processes is not None and canonical.num_rows < 1000:
        processes = None  # starting processes costs more than the rows
    return canonical.map(
        tokenise,
        remove_columns=canonical.column_names,
        num_proc=processes,
        desc="Tokenising",
    )
