"""Rows encoded while they are read, for data too large to prepare or without an end."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from launcher.errors import Problem, RecipeError
from launcher.train.data.counts import Counts
from launcher.train.data.encode import encoder_for
from launcher.train.data.pack import join_documents, pack_lengths
from launcher.train.data.prepare import Source, recognise
from launcher.train.data.sources import Row
from launcher.train.hooks import load_hooks
from launcher.train.job import Job, rank, world_size

BUFFER = 10_000
"""Rows that are shuffled among each other."""
PACKED_TOGETHER = 64
"""Packs' worth of samples that are packed among each other."""
ENCODED_TOGETHER = 64
_COLUMNS = ("input_ids", "labels")
_TOTALS = ("read", "kept", "truncated", "split", "tokens", "tokens_lost", "targets")


class Stream(IterableDataset):
    """Samples (or packs) without end; the rows start over, in another order, when they are used up.

    Each process and each dataloader worker reads all rows and encodes only its own share: reading is
    cheap, and no process waits for another one.
    """

    def __init__(self, job: Job, processing: Any) -> None:
        self._job, self._processing = job, processing
        self._totals = torch.zeros(len(_TOTALS) + 1, dtype=torch.int64).share_memory_()

    def fresh(self) -> Stream:
        """The same rows from the start, counted apart: for a look at them."""
        return Stream(self._job, self._processing)

    @property
    def counts(self) -> dict[str, Any]:
        """This process's share of `rows` for result.json, up to now; its workers count together."""
        *totals, dropped = self._totals.tolist()
        return {"train": totals[1], "eval": 0, **dict(zip(_TOTALS, totals, strict=True)), "dropped": dropped}

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        worker = get_worker_info()
        workers, own = (1, 0) if worker is None else (worker.num_workers, worker.id)
        shards, shard = world_size() * workers, rank() * workers + own
        hooks = load_hooks(self._job)
        settings = self._job.value("data.train")
        sources = [recognise(self._job, source, hooks, digest=False) for source in settings]
        for epoch in itertools.count():
            draw = random.Random(f"{self._job.seed}-{epoch}")
            found = 0
            for sample in self._samples(sources, hooks, draw, shards, shard):
                found += 1
                yield sample
            if found == 0:
                message = f"a whole pass over the rows gave process {shard} of {shards} nothing to learn"
                raise RecipeError(Problem("no-targets", message, path="data.train"))

    def _samples(
        self, sources: list[Source], hooks: Any, draw: random.Random, shards: int, shard: int
    ) -> Iterator[dict[str, list[int]]]:
        """One pass over the rows."""
        rows = shuffled(interleaved(self._job, sources, hooks, draw), draw)
        mine = ((source, row) for index, (source, row) in enumerate(rows) if index % shards == shard)
        samples = self._encoded(mine, sources)
        if not self._job.value("data.packing"):
            yield from samples
            return
        length = self._job.value("data.max_length")
        while group := _take_tokens(samples, PACKED_TOGETHER * length):
            packs = pack_lengths([len(sample["input_ids"]) for sample in group], length)
            order = list(range(len(packs)))
            draw.shuffle(order)
            for number in order:
                chosen = [group[i] for i in packs[number]]
                yield join_documents({name: [sample[name] for sample in chosen] for name in _COLUMNS})

    def _encoded(
        self, rows: Iterator[tuple[int, Row]], sources: list[Source]
    ) -> Iterator[dict[str, list[int]]]:
        encoders = [encoder_for(self._job, self._processing, s.detected, None) for s in sources]
        while group := list(itertools.islice(rows, ENCODED_TOGETHER)):
            found: list[dict[str, list[int]]] = []
            counts = Counts()
            counts.read = len(group)
            # Neighbours of one source are encoded together; the order of the rows stays.
            for source, members in itertools.groupby(group, key=lambda pair: pair[0]):
                encoded = encoders[source]([row for _, row in members])
                counts.add(encoded)
                names = list(encoded.columns)
                columns = zip(*encoded.columns.values(), strict=True)
                found.extend(dict(zip(names, values, strict=True)) for values in columns)
            numbers = [getattr(counts, name) for name in _TOTALS]
            self._totals += torch.tensor([*numbers, sum(counts.dropped.values())])
            yield from found


def interleaved(
    job: Job, sources: list[Source], hooks: Any, draw: random.Random
) -> Iterator[tuple[int, Row]]:
    """Rows of all sources, each next one drawn by weight, until all are used up."""
    weights = [float(source.settings.get("weight") or 1.0) for source in sources]
    open_rows = {index: source.rows(job, hooks) for index, source in enumerate(sources)}
    while open_rows:
        alive = list(open_rows)
        index = draw.choices(alive, [weights[i] for i in alive])[0]
        row = next(open_rows[index], None)
        if row is None:
            del open_rows[index]
        else:
            yield index, row


def shuffled(rows: Iterator[tuple[int, Row]], draw: random.Random) -> Iterator[tuple[int, Row]]:
    """Rows in an order that is random within a buffer."""
    buffer = list(itertools.islice(rows, BUFFER))
    for row in rows:
        index = draw.randrange(len(buffer))
        yield buffer[index]
        buffer[index] = row
    draw.shuffle(buffer)
    yield from buffer


def _take_tokens(samples: Iterator[dict[str, list[int]]], tokens: int) -> list[dict[str, list[int]]]:
    """Samples that together hold about that many tokens."""
    group: list[dict[str, list[int]]] = []
    held = 0
    for sample in samples:
        group.append(sample)
        held += len(sample["input_ids"])
        if held >= tokens:
            break
    return group
