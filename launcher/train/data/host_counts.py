"""What the host counts in a batch before it is on the device, from where it could only be read by waiting.

A collator counts; the Trainer hands the numbers to the tensors that they are about. Where a tensor came
without them (another collator, an evaluation, a copy) they are read from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from launcher.rows.class_names import IGNORED
from launcher.train.upstream.torch_seams import assert_on_device

KEY = "host_counts"
_TARGETS, _LENGTHS, _SEVERAL = "target_count", "document_lengths", "several_documents"


@dataclass(frozen=True, slots=True)
class HostCounts:
    """Of one batch of next-token labels. Libraries that move batches leave objects of a class as they are."""

    targets: int | None
    """Labels that contribute to the loss, the first of a row not counted; None where they are not counted."""
    lengths: list[int] | None
    """Tokens of each document of a flattened row."""
    several: bool | None
    """Whether a row holds several documents; None without positions [rows, tokens]."""


class CountOnHost:
    """A collator that also counts, targets only where the loss asks. Pickles, for dataloader workers."""

    def __init__(self, collate: Callable[..., Any], *, targets: bool) -> None:
        self._collate, self._targets = collate, targets

    def __call__(self, samples: Sequence[Any]) -> Any:
        """The batch, with HostCounts under KEY."""
        batch = self._collate(samples)
        labels, bounds = batch.get("labels"), batch.get("cu_seq_lens_q")
        counted = self._targets and labels is not None and labels.dim() == 2
        targets = int((labels[:, 1:] != IGNORED).sum()) if counted else None
        positions = batch.get("position_ids")
        in_rows = positions is not None and positions.dim() == 2
        several = bool((positions[:, 1:] == 0).any()) if in_rows else None
        batch[KEY] = HostCounts(targets, None if bounds is None else document_lengths(bounds), several)
        return batch


def hand_over(batch: Any) -> None:
    """Take the counts out of a batch, which is on the device now, and give each tensor its own.

    batch: a mapping; of GRPO a list of rows, which has none.
    """
    if KEY not in batch:
        return
    counts = batch.pop(KEY)
    for name, what, known in (
        ("labels", _TARGETS, counts.targets),
        ("cu_seq_lens_q", _LENGTHS, counts.lengths),
        ("position_ids", _SEVERAL, counts.several),
    ):
        if known is not None:
            setattr(batch[name], what, known)


def target_places(targets: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Indices of the targets [n] that are not masked. labels: the batch's tensor that they came from."""
    counted: int | None = getattr(labels, _TARGETS, None)
    learned = targets != IGNORED
    if counted is None:
        return learned.nonzero().squeeze(1)
    assert_on_device(learned.sum() == counted)
    return learned.nonzero_static(size=counted).squeeze(1)


def document_lengths(bounds: torch.Tensor) -> list[int]:
    """Tokens of each document; read from the device once at most, as all layers get this one tensor."""
    known: list[int] | None = getattr(bounds, _LENGTHS, None)
    if known is None:
        known = [end - start for start, end in pairwise(bounds.tolist())]
        setattr(bounds, _LENGTHS, known)
    return known


def holds_several(positions: torch.Tensor) -> bool | None:
    """Whether a row of these positions [rows, tokens] holds several documents; None where nobody counted."""
    known: bool | None = getattr(positions, _SEVERAL, None)
    return known


def as_one_document(positions: torch.Tensor) -> torch.Tensor:
    """The same positions, known to be of one document in each row."""
    setattr(positions, _SEVERAL, False)
    return positions
