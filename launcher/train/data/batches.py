"""Samples to batches: packs of at most `max_length` tokens, and the collators.

Packing is best-fit decreasing: the longest sample first, each into the fullest pack with enough space. It
is exact, and fast because equal samples move together: a pack with r free tokens takes r // length of them
before the next one is looked at, so ranges of packs change in one arithmetic step.

Labels come with the samples and are never derived from token ids, so a pad token that is also the end of a
text stays a target. Batches of packs have no attention mask: with one, transformers ignores position_ids, and
documents see each other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening, DataCollatorWithPadding

from launcher.rows.class_names import IGNORED
from launcher.train.job import Job
from launcher.train.progress import LEAST_S, Progress

_WORD = 9
"""Bits of an index within one word of the set of free sizes; 2**9 bits keep both levels small."""
Sample = Mapping[str, Any]
Batch = Mapping[str, Any]
Collator = Callable[[Sequence[Sample]], Batch]


@dataclass(frozen=True, slots=True)
class Packs:
    """Which rows share a pack. Packs come in the order of their first row, rows in ascending order."""

    order: Any
    """int64 [rows]: row indices, pack after pack."""
    offsets: Any
    """int64 [packs + 1]: where each pack starts in `order`."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Any:
        """Row indices of one pack, int64 [rows of the pack]. IndexError beyond the last pack."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"pack {index} of {len(self)}")
        index %= len(self)
        return self.order[self.offsets[index] : self.offsets[index + 1]]


def pack_lengths(lengths: Any, max_length: int) -> Packs:
    """Best-fit decreasing over `lengths` (tokens of each row) into packs of `max_length` tokens.

    Every row lands in exactly one pack; the same lengths always give the same packs. A row of length
    zero takes no space and joins the pack of the longest row. ValueError for a length outside 0..max_length.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}, expected at least 1")
    if sizes.size == 0:
        return Packs(np.empty(0, np.int64), np.zeros(1, np.int64))
    if sizes.min() < 0 or sizes.max() > max_length:
        row = int(np.argmax((sizes < 0) | (sizes > max_length)))
        raise ValueError(f"row {row} has {sizes[row]} tokens, expected 0 to {max_length}")
    # One sort of unique keys instead of a stable argsort: several times as fast.
    keys = (max_length - sizes) * sizes.size + np.arange(sizes.size)
    keys.sort()
    by_length = keys % sizes.size
    pack_of = np.empty_like(sizes)
    pack_of[by_length] = _expand(_moves(np.bincount(sizes)[::-1].tolist(), max_length))
    return _in_row_order(pack_of)


def _moves(counts: list[int], max_length: int) -> list[tuple[int, int, int]]:
    """Steps (first pack, packs, samples per pack), in order of decreasing length.

    `counts[i]` samples have length len(counts) - 1 - i. Packs are numbered as they are opened, and a
    range of packs with equal free space moves as one.
    """
    rooms = _Rooms(max_length)
    moves: list[tuple[int, int, int]] = []
    opened = 0
    longest = len(counts) - 1
    for length, left in zip(range(longest, 0, -1), counts, strict=False):
        while left:
            room = rooms.smallest(length)
            if room < 0:
                first, packs, room = opened, -(-left // (max_length // length)), max_length
                opened += packs
            else:
                first, packs = rooms.pop(room)
            each = room // length
            used, rest = divmod(left, each)
            used = min(used, packs)
            if used:
                moves.append((first, used, each))
                rooms.push(room - each * length, first, used)
                left -= used * each
            if used < packs and left:
                # The last samples of this length fill one pack in part.
                moves.append((first + used, 1, rest))
                rooms.push(room - rest * length, first + used, 1)
                left, used = 0, used + 1
            if used < packs:
                rooms.push(room, first + used, packs - used)
    if counts[longest]:
        moves.append((0, 1, counts[longest]))
    return moves


class _Rooms:
    """Ranges of packs by their free tokens, with a fast search for the next fit.

    The set of rooms is a two-level bit mask: with one flat mask, every search would copy max_length bits.
    """

    def __init__(self, max_length: int) -> None:
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        self._words = [0] * ((max_length >> _WORD) + 1)
        self._full = 0

    def push(self, room: int, first: int, packs: int) -> None:
        ranges = self._ranges.setdefault(room, [])
        if not ranges:
            word = room >> _WORD
            self._words[word] |= 1 << (room & ((1 << _WORD) - 1))
            self._full |= 1 << word
        ranges.append((first, packs))

    def pop(self, room: int) -> tuple[int, int]:
        """The range of that room that was pushed last."""
        ranges = self._ranges[room]
        taken = ranges.pop()
        if not ranges:
            word = room >> _WORD
            self._words[word] ^= 1 << (room & ((1 << _WORD) - 1))
            if not self._words[word]:
                self._full ^= 1 << word
        return taken

    def smallest(self, least: int) -> int:
        """The smallest room of at least `least` tokens, -1 where there is none."""
        word = least >> _WORD
        bits = self._words[word] >> (least & ((1 << _WORD) - 1))
        if bits:
            return least + (bits & -bits).bit_length() - 1
        words = self._full >> (word + 1)
        if not words:
            return -1
        word += (words & -words).bit_length()
        bits = self._words[word]
        return (word << _WORD) + (bits & -bits).bit_length() - 1


def _expand(moves: list[tuple[int, int, int]]) -> Any:
    """The pack of every sample in order of decreasing length, int64 [samples]."""
    first, packs, each = np.array(moves, dtype=np.int64).T
    samples = packs * each
    within = np.arange(samples.sum()) - np.repeat(np.cumsum(samples) - samples, samples)
    return np.repeat(first, samples) + within // np.repeat(each, samples)


def _in_row_order(pack_of: Any) -> Packs:
    """Packs numbered by their first row, from any numbering 0..n-1 of the packs, int64 [rows]."""
    rows = np.arange(pack_of.size)
    packs = int(pack_of.max()) + 1
    first_row: Any = np.empty(packs, np.int64)
    first_row[pack_of[::-1]] = rows[::-1]  # the last assignment to a pack stays: its first row
    rank: Any = np.empty(packs, np.int64)
    rank[np.argsort(first_row)] = np.arange(packs)
    keys = rank[pack_of] * pack_of.size + rows
    keys.sort()
    offsets: Any = np.zeros(packs + 1, np.int64)
    np.cumsum(np.bincount(rank[pack_of], minlength=packs), out=offsets[1:])
    return Packs(keys % pack_of.size, offsets)


class PackedRows(Dataset):
    """Packs as samples of a map-style dataset. Pickles with its rows, for dataloader workers.

    `rows` is a `datasets.Dataset` (or alike) with the columns input_ids and labels: `rows[[i, j]]`
    is a mapping of lists.
    """

    def __init__(self, rows: Any, packs: Packs) -> None:
        self.rows = rows
        self.packs = packs

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        """One pack: input_ids, labels and position_ids of equal length, at most max_length tokens."""
        return join_documents(self.rows[self.packs[index].tolist()])


def join_documents(documents: Mapping[str, Sequence[list[int]]]) -> dict[str, list[int]]:
    """Documents one after another; positions restart at 0, which is what keeps them apart.

    The first label of each is dropped: a causal model would predict it from the document before.
    """
    input_ids: list[int] = []
    labels: list[int] = []
    position_ids: list[int] = []
    for ids, targets in zip(documents["input_ids"], documents["labels"], strict=True):
        input_ids += ids
        labels += [IGNORED, *targets[1:]] if ids else []
        position_ids += range(len(ids))
    return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}


def packed_rows(job: Job, samples: Any) -> PackedRows:
    """The samples as packs of at most data.max_length tokens."""
    with Progress("Packing the samples", least_s=LEAST_S):
        packs = pack_lengths(sample_lengths(samples), job.data.max_length)
    return PackedRows(samples, packs)


def sample_lengths(samples: Any) -> Any:
    """Tokens of each sample, from the offsets of the file alone."""
    import pyarrow.compute as pc

    lengths = pc.list_value_length(samples.with_format("arrow")["input_ids"][:])
    return np.asarray(lengths)


def make_collator(
    kind: Literal["pad", "packed", "flatten"], tokenizer: Any, *, pad_to_multiple_of: int | None = None
) -> Collator:
    """How samples become a batch; every collator pickles, for dataloader workers.

    pad: rows padded on the right, with attention_mask; labels may be lists (padded with -100) or single
    classes. packed: samples of `PackedRows` stacked to the longest; no attention mask. flatten: one row
    [1, tokens of all samples], for samples with or without position_ids, and the documents' bounds.
    pad_to_multiple_of: of the tokens of a row, for packs and flattened rows by a document of its own.
    """
    if kind == "pad":
        return PadRows(tokenizer, pad_to_multiple_of)
    if kind == "packed":
        return StackPacks(tokenizer.pad_token_id, pad_to_multiple_of)
    return Flatten(tokenizer.pad_token_id, pad_to_multiple_of)


class PadRows:
    """Rows padded on the right to the longest. The attention mask follows from lengths, never from ids."""

    def __init__(self, tokenizer: Any, pad_to_multiple_of: int | None = None) -> None:
        right = copy.copy(tokenizer)  # chat tokenizers often pad on the left, which generation needs
        right.padding_side = "right"
        if "attention_mask" not in right.model_input_names:
            right.model_input_names = [*right.model_input_names, "attention_mask"]
        self._sequences = DataCollatorForSeq2Seq(right, pad_to_multiple_of=pad_to_multiple_of)
        self._classes = DataCollatorWithPadding(right, pad_to_multiple_of=pad_to_multiple_of)

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """input_ids and attention_mask [batch, longest], labels [batch, longest label] or [batch]; of
        several scores or labels a sample float32 [batch, labels]."""
        labels = samples[0].get("labels")
        per_token = isinstance(labels, list) and not (labels and isinstance(labels[0], float))
        batch: Batch = (self._sequences if per_token else self._classes)(samples)
        return batch


class StackPacks:
    """Packs stacked to the longest; a padded tail is a document of its own without targets."""

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
    """All documents of a batch in one row; a padded tail is a document of its own without targets.

    Packs are taken apart first: transformers' collator numbers each sample from 0 and would let the
    documents of a pack see each other. Kernels need the bounds, not only position_ids: GPT-BigCode does
    not hand the latter to them.
    """

    def __init__(self, pad_token_id: int | None, pad_to_multiple_of: int | None = None) -> None:
        self._pad = pad_token_id
        self._multiple = pad_to_multiple_of or 1
        self._join = DataCollatorWithFlattening(return_position_ids=True, return_flash_attn_kwargs=True)

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """input_ids, labels and position_ids, each int64 [1, tokens]; cu_seq_lens_*, int32
        [1 + documents]; max_length_*, int."""
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
