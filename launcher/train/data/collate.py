"""Samples to batches: padded, stacked from packs, or flattened into one row without padding.

Labels come with the samples and are never derived from token ids, so a pad token that is also the end
of a text stays a target. Batches of packs hold no attention mask: given one, transformers no longer
looks at position_ids and documents see each other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening, DataCollatorWithPadding

from launcher.train.data.encoded import IGNORED

Sample = Mapping[str, Any]
Batch = Mapping[str, Any]
Collator = Callable[[Sequence[Sample]], Batch]


def make_collator(
    kind: Literal["pad", "packed", "flatten"],
    tokenizer: Any,
    *,
    pad_to_multiple_of: int | None = None,
    model: Any = None,
) -> Collator:
    """How samples become a batch; every collator pickles, for dataloader workers.

    pad: rows padded on the right, with attention_mask; labels may be lists (padded with -100) or single
    classes. `model` gives encoder-decoders their decoder_input_ids.
    packed: samples of `PackedRows` stacked to the longest; no attention mask.
    flatten: one row [1, tokens of all samples], for samples with or without position_ids. The documents'
    bounds are added unless `model` is known to use a kernel that does not read them.
    pad_to_multiple_of: of the tokens of a row, for packs and flattened rows by a document of its own.
    ValueError for another kind.
    """
    if kind == "pad":
        return PadRows(tokenizer, pad_to_multiple_of, model)
    if kind == "packed":
        return StackPacks(tokenizer.pad_token_id, pad_to_multiple_of)
    if kind == "flatten":
        attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
        bounds = attention not in ("eager", "sdpa", "flex_attention")
        return Flatten(tokenizer.pad_token_id, pad_to_multiple_of, bounds=bounds)
    raise ValueError(f"no collator is called {kind!r}; expected pad, packed or flatten")


class PadRows:
    """Rows padded on the right to the longest. The attention mask follows from lengths, never from ids."""

    def __init__(self, tokenizer: Any, pad_to_multiple_of: int | None = None, model: Any = None) -> None:
        right = copy.copy(tokenizer)  # chat tokenizers often pad on the left, which generation needs
        right.padding_side = "right"
        if "attention_mask" not in right.model_input_names:
            right.model_input_names = [*right.model_input_names, "attention_mask"]
        self._sequences = DataCollatorForSeq2Seq(right, model=model, pad_to_multiple_of=pad_to_multiple_of)
        self._classes = DataCollatorWithPadding(right, pad_to_multiple_of=pad_to_multiple_of)

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """input_ids and attention_mask [batch, longest], labels [batch, longest label] or [batch]."""
        per_token = isinstance(samples[0].get("labels"), list)
        batch: Batch = (self._sequences if per_token else self._classes)(samples)
        return batch


class StackPacks:
    """Packs stacked to the longest; a padded tail is a document of its own that is not learnt."""

    def __init__(self, pad_token_id: int, pad_to_multiple_of: int | None = None) -> None:
        self._pad = pad_token_id
        self._multiple = pad_to_multiple_of or 1

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """input_ids, labels and position_ids, each int64 [batch, longest]."""
        longest = max(len(sample["input_ids"]) for sample in samples)
        width = -(-longest // self._multiple) * self._multiple
        columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "position_ids": []}
        for sample in samples:
            tail = width - len(sample["input_ids"])
            columns["input_ids"].append([*sample["input_ids"], *[self._pad] * tail])
            columns["labels"].append([*sample["labels"], *[IGNORED] * tail])
            columns["position_ids"].append([*sample["position_ids"], *range(tail)])
        return {name: torch.tensor(rows, dtype=torch.int64) for name, rows in columns.items()}


class Flatten:
    """All documents of a batch in one row; a padded tail is a document of its own that is not learnt.

    Packs are taken apart first: transformers' collator numbers each sample from 0 and would let the
    documents of a pack see each other. Kernels need the bounds, not only position_ids: GPT-BigCode does
    not hand the latter to them.
    """

    def __init__(
        self, pad_token_id: int | None, pad_to_multiple_of: int | None = None, *, bounds: bool = True
    ) -> None:
        self._pad = pad_token_id
        self._multiple = pad_to_multiple_of or 1
        self._join = DataCollatorWithFlattening(return_position_ids=True, return_flash_attn_kwargs=bounds)

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """input_ids, labels and position_ids, each int64 [1, tokens]; with bounds also cu_seq_lens_*,
        int32 [1 + documents], and max_length_*, int."""
        documents = [document for sample in samples for document in _documents(sample)]
        tail = -sum(len(document["input_ids"]) for document in documents) % self._multiple
        if tail:
            documents.append({"input_ids": [self._pad] * tail, "labels": [IGNORED] * tail})
        batch: Batch = self._join(documents)
        return batch


def _documents(sample: Sample) -> list[Sample]:
    """The documents of a pack, or the sample itself where it has no position_ids; empty ones are left out."""
    ids, labels = sample["input_ids"], sample["labels"]
    if "position_ids" not in sample:
        return [{"input_ids": ids, "labels": labels}] if ids else []
    starts = [index for index, position in enumerate(sample["position_ids"]) if position == 0]
    bounds = pairwise([*starts, len(ids)])
    return [{"input_ids": ids[start:end], "labels": labels[start:end]} for start, end in bounds]
