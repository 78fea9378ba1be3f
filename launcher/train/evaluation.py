"""Batches of evaluations: every row once, whatever the evaluation batch and the number of ranks.

accelerate fills the last batches of the ranks with rows that others have already. transformers 5.23 then
weighs every batch alike, scales each rank's loss by the target tokens of all ranks, and leaves out the last
ranks of the last step (Trainer.evaluation_loop, compute_loss): 6.41 of one process is 5.40 of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import Sampler


class EvaluationBatches(Sampler[list[int]]):
    """A rank's batches. All ranks have as many, and as many rows in each: collectives meet.

    What is left over after whole steps is one smaller step; rows that are fewer than the ranks are a step of
    one row each, in which the last ranks have the last row once more.
    """

    def __init__(self, order: Sequence[int], size: int, ranks: int, rank: int) -> None:
        """order: numbers of all rows. size: rows of a rank's batch. ranks: that have rows of their own."""
        self._order, self._size, self._ranks, self._rank = order, size, ranks, rank

    def steps(self) -> list[tuple[int, int]]:
        """(rows of each rank, rows of all ranks that count) of each step."""
        whole, left = divmod(len(self._order), self._size * self._ranks)
        each, rest = divmod(left, self._ranks)
        found = [(self._size, self._size * self._ranks)] * whole
        found += [(each, each * self._ranks)] if each else []
        return found + ([(1, rest)] if rest else [])

    def __len__(self) -> int:
        return len(self.steps())

    def __iter__(self) -> Iterator[list[int]]:
        first = 0
        for rows, counted in self.steps():
            start = first + min(self._rank * rows, counted - rows)
            yield [self._order[number] for number in range(start, start + rows)]
            first += counted


class EvaluationLoader(DataLoaderShard):
    """A rank's loader of `EvaluationBatches`: what is gathered is cut by the Trainer, not by accelerate."""

    def begin(self) -> None:
        super().begin()
        self.remainder = -1  # accelerate's own repeated rows, of which there are none


class LossSum:
    """Sum of the losses of an evaluation, over what they are means of."""

    def __init__(self) -> None:
        self._means: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []

    def add(self, mean: torch.Tensor, count: torch.Tensor) -> None:
        """mean, count: 0-d, of a rank's batch; a count of 0 leaves the batch out."""
        self._means.append(mean.detach().float())
        self._counts.append(count)

    def total(self) -> torch.Tensor:
        """[sum, count] of this rank, float64 on the CPU."""
        means, counts = (torch.stack(values).cpu().double() for values in (self._means, self._counts))
        return torch.stack((torch.where(counts > 0, means * counts, 0.0).sum(), counts.sum()))
