"""Rows encoded while they are read, for data too large to prepare or without an end."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from launcher.errors import Problem, RecipeError
from launcher.rows.sources import Row
from launcher.train.data.batches import join_documents, pack_lengths
from launcher.train.data.encoded import (
    NOTES,
    REASONS,
    TOTALS,
    Counts,
    Tally,
    dropped_text,
    encode_rows,
    lost_rows,
    result_rows,
)
from launcher.train.data.job_sources import Source, raw_rows, recognise
from launcher.train.data.special_tokens import text_encoder
from launcher.train.hooks import Hooks, load_hooks
from launcher.train.job import Job, rank, world_size

BUFFER = 10_000
"""Rows that are shuffled among each other."""
PACKED_TOGETHER = 64
"""Packs' worth of samples that are packed among each other."""
ENCODED_TOGETHER = 64
SLOTS = 1024
"""Places for counts: one for the process itself, and one for each of its dataloader workers."""
_COLUMNS = ("input_ids", "labels")
_COUNTED = ("train", *TOTALS, *REASONS, *NOTES)

Sample = dict[str, list[int]]
Reader = Callable[[list[int]], Iterator[dict[str, Any]]]
"""Shards to their rows of one source, in the form that datasets carries."""


class Stream(IterableDataset):
    """Samples (or packs) without end; the rows start over, in another order, when they are used up.

    Each process and each dataloader worker reads all rows and encodes only its own share: reading is
    cheap, and no process waits for another one.
    """

    def __init__(self, job: Job, processing: Any, process: int | None = None) -> None:
        """process: whose share it gives, this one's when absent."""
        self._job, self._processing = job, processing
        self._process = rank() if process is None else process
        # A row of its own for each worker: adding to a shared number would lose what another one adds.
        self._counts = torch.zeros((SLOTS, len(_COUNTED)), dtype=torch.int64).share_memory_()
        self.noted = Tally()
        """Notes by their whole names, and the first row of each, of rows that this process encodes itself."""

    def fresh(self) -> Stream:
        """The first process's share from the start, counted apart: a look that is alike everywhere."""
        return Stream(self._job, self._processing, process=0)

    @property
    def totals(self) -> torch.Tensor:
        """What this process and its workers counted up to now."""
        return self._counts.sum(dim=0)

    @property
    def counts(self) -> dict[str, Any]:
        """`totals` by name: samples or packs handed out (`train`), and what became of the rows."""
        return named_counts(self.totals)

    def __iter__(self) -> Iterator[Sample]:
        return self._passes(packing=self._job.data.packing)

    def unpacked(self, passes: int | None = None) -> Iterator[Sample]:
        """Samples as they are before packing, of so many passes over the rows; without end when absent."""
        return self._passes(packing=False, passes=passes)

    def _passes(self, *, packing: bool, passes: int | None = None) -> Iterator[Sample]:
        worker = get_worker_info()
        workers, own, slot = (1, 0, 0) if worker is None else (worker.num_workers, worker.id, 1 + worker.id)
        processes = world_size() * workers
        # All shards of this process: datasets gives each of its workers one of them.
        shards = [self._process * workers + number for number in range(workers)]
        hooks = load_hooks(self._job)
        sources = recognise(self._job, "train", hooks, digest=False)
        readers = [_reader(self._job, source, number, processes) for number, source in enumerate(sources)]
        weights = [float(source.settings["weight"]) for source in sources]
        for epoch in itertools.count() if passes is None else range(passes):
            seed = random.Random(f"{self._job.seed}-{epoch}-{self._process}").getrandbits(32)
            rows = shuffled(readers, weights, shards, seed)
            samples = self._encoded(rows, sources, hooks, slot)
            if packing:
                samples = self._packed(samples, random.Random(f"{seed}-{own}"))
            found = 0
            for sample in samples:
                found += 1
                self._counts[slot, 0] += 1
                yield sample
            if found == 0:
                reasons, meaning = dropped_text(self.counts["dropped"])
                message = "a whole pass over the rows left none to train on for process "
                message += f"{shards[own]} of {processes} ({reasons})"
                raise RecipeError(Problem("nothing-left", message, path="data.train", hint=meaning))

    def _packed(self, samples: Iterator[Sample], draw: random.Random) -> Iterator[Sample]:
        length = self._job.data.max_length
        while group := _take_tokens(samples, PACKED_TOGETHER * length):
            packs = pack_lengths([len(sample["input_ids"]) for sample in group], length)
            order = list(range(len(packs)))
            draw.shuffle(order)
            for number in order:
                chosen = [group[i] for i in packs[number]]
                yield join_documents({name: [sample[name] for sample in chosen] for name in _COLUMNS})

    def _encoded(
        self, rows: Iterator[tuple[int, Row]], sources: Sequence[Source], hooks: Hooks, slot: int
    ) -> Iterator[Sample]:
        encoders = [text_encoder(self._job, self._processing, s.detected, None) for s in sources]
        later = [source.later(self._job) for source in sources]
        while group := list(itertools.islice(rows, ENCODED_TOGETHER)):
            found: list[Sample] = []
            counts = Counts()
            counts.read = len(group)
            # Neighbours of one source are encoded together; the order of the rows stays.
            for source, members in itertools.groupby(group, key=lambda pair: pair[0]):
                formed = [sources[source].form(self._job, row, hooks, later[source]) for _, row in members]
                kept = [row for row in formed if row is not None]
                counts.dropped["format_row"] += len(formed) - len(kept)
                encoded = encode_rows(encoders[source], kept)
                counts.add(encoded)
                names = list(encoded.columns)
                columns = zip(*encoded.columns.values(), strict=True)
                found.extend(dict(zip(names, values, strict=True)) for values in columns)
            numbers = [
                *(getattr(counts, name) for name in TOTALS),
                *(counts.dropped[name] for name in REASONS),
                *(sum(n for key, n in counts.notes.items() if key.startswith(name)) for name in NOTES),
            ]
            self._counts[slot, 1:] += torch.tensor(numbers)
            self.noted.notes.update(counts.notes)
            self.noted.first_rows = {**counts.first_rows, **self.noted.first_rows}
            yield from found
        for one in later:
            one.end()


def _reader(job: Job, source: Source, number: int, shards: int) -> Reader:
    """A source's rows by shard: row n belongs to shard n modulo `shards`.

    A source with fewer rows than shards gives each shard one of them, so that none is without it.
    """

    def read(shard: list[int]) -> Iterator[dict[str, Any]]:
        for own in shard:
            found = False
            for turn in itertools.count():
                for index, row in enumerate(raw_rows(job, source.settings)):
                    if (index + turn) % shards == own:
                        found = True
                        yield {"source": number, "row": pickle.dumps(row)}
                if found:
                    break

    return read


def shuffled(
    readers: Sequence[Reader], weights: Sequence[float], shards: list[int], seed: int
) -> Iterator[tuple[int, Row]]:
    """One pass over a process's rows: (source, row), drawn by weight, in a random order within a buffer.

    A source that is used up starts over until each one was read to its end.
    """
    from datasets import Features, IterableDataset, Value, interleave_datasets

    # interleave_datasets brings rows into one Arrow schema: a row gets the columns of others as None, and a
    # list such as [1, "z"] is refused (ArrowInvalid). Bytes pass as they are.
    features = Features({"source": Value("int64"), "row": Value("binary")})
    rows = [IterableDataset.from_generator(r, features, gen_kwargs={"shard": shards}) for r in readers]
    if len(rows) == 1:
        drawn = rows[0]
    else:
        shares = [weight / sum(weights) for weight in weights]
        drawn = interleave_datasets(rows, shares, seed=seed, stopping_strategy="all_exhausted")
    for found in drawn.shuffle(seed=seed, buffer_size=BUFFER):
        yield found["source"], pickle.loads(found["row"])


def _take_tokens(samples: Iterator[Sample], tokens: int) -> list[Sample]:
    """Samples that together hold about that many tokens."""
    group: list[Sample] = []
    held = 0
    for sample in samples:
        group.append(sample)
        held += len(sample["input_ids"])
        if held >= tokens:
            break
    return group


def named_counts(totals: torch.Tensor) -> dict[str, Any]:
    """Totals of a stream in the shape that a prepared split's counts have, with `train` beside them."""
    found = dict(zip(_COUNTED, totals.tolist(), strict=True))
    dropped = {reason: found.pop(reason) for reason in REASONS}
    notes = {name: found.pop(name) for name in NOTES}
    return {
        **found,
        "dropped": {reason: rows for reason, rows in sorted(dropped.items()) if rows},
        "notes": {name: count for name, count in sorted(notes.items()) if count},
    }


def streamed_rows(job: Job, stream: Stream, prepared: Mapping[str, Any]) -> dict[str, Any]:
    """`rows` of result.json, over all processes; every process must call it.

    prepared: the same of the evaluation rows, which are not streamed. Rank 0 warns of much that was lost.
    """
    counts = named_counts(_summed(stream.totals))
    if rank() == 0:
        _warn_of_losses(job, counts)
    evaluated = {**prepared, "dropped": prepared["dropped_reasons"]}
    return result_rows(counts["train"], prepared["eval"], [counts, evaluated])


def _warn_of_losses(job: Job, counts: Mapping[str, Any]) -> None:
    read, allowed = counts["read"], job.data.max_truncated
    cut = counts["tokens_lost"] / counts["tokens"] if counts["tokens"] else 0.0
    if cut > allowed:
        rows = f"in {counts['truncated']:,} of {read:,} rows"
        print(
            f"warning: {cut:.1%} of the streamed tokens were cut, {rows}; data.max_truncated is {allowed:.0%}"
        )
    lost, allowed = lost_rows(counts["dropped"]), job.data.max_dropped
    if lost > allowed * read:
        rows = f"{lost:,} of {read:,} streamed rows ({lost / read:.1%})"
        print(f"warning: {rows} were dropped; data.max_dropped is {allowed:.0%}")


def _summed(totals: torch.Tensor) -> torch.Tensor:
    if not torch.distributed.is_initialized():
        return totals
    summed = totals.to("cuda" if torch.distributed.get_backend() == "nccl" else "cpu")
    torch.distributed.all_reduce(summed)
    return summed.cpu()
