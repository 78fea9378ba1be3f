"""Rerankers with the cross-encoder losses of sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher.errors import Problem, RecipeError
from launcher.rows.recognise import refuse_misfit
from launcher.rows.sources import Row
from launcher.tasks import task_named
from launcher.tasks.embedding import BY_RANK, BY_SCORE, NEGATIVES
from launcher.tasks.reranker import LOSSES, Reranker, as_list, is_empty
from launcher.train.data.encoded import EncodedBatch, refuse_padded_end
from launcher.train.tasks.embedding import best_first, fitting, note_repeated, rank_scores
from launcher.train.tasks.task import Evaluated, Shown, TrainTask

if TYPE_CHECKING:
    from pathlib import Path

    from launcher.rows.sources import Detected
    from launcher.train.data.encoded import Data, Encoder
    from launcher.train.job import Job


class TrainReranker(TrainTask):
    def encoder(self, job: Job, processing: Any, detected: Detected, labels: Sequence[str] | None) -> Encoder:
        from launcher.train.data.tokenize import max_length_of, overlong_of

        if problem := job.task.misfit(detected.format, job.reranker):
            raise RecipeError(problem)
        drops = overlong_of(job, detected.format) == "drop"
        return EncodeDocuments(processing, job.reranker, max_length_of(job), drops)

    def rehearsed(self, job: Job, values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: value
            for name, value in fitting(LOSSES[job.reranker.loss].formats, values).items()
            if name not in NEGATIVES[2:]
        }

    def samples(self, job: Job, samples: Any, processing: Any) -> Any:
        return samples

    def collator(self, job: Job, processing: Any) -> Any:
        return CollateDocuments(processing)

    def shown(self, processing: Any, sample: Mapping[str, Any], labels: Sequence[str] | None) -> Shown:
        from launcher.train.contrast import parts

        pieces = [
            (f"{processing.decode(ids)} -> {label:g}\n", True)
            for ids, label in zip(parts(sample), sample["relevance"], strict=True)
        ]
        return pieces, len(sample["input_ids"]), len(sample["input_ids"])

    def check_batch(self, job: Job, tokenizer: Any, data: Data, micro_batch: int) -> None:
        """RecipeError where metrics of ranking have no query with documents of different labels."""
        named = [name for name in job.data.metrics if name in BY_RANK]
        if not named or data.eval is None:
            return
        labels: dict[int, set[float]] = {}
        for number, relevance in zip(data.eval["query"], data.eval["relevance"], strict=True):
            seen = labels.setdefault(number[0], set())
            seen.update(relevance)
            if len(seen) > 1:
                return
        message = f"includes {named[0]}, but no held-out query has documents of different labels"
        hint = "give data.eval a file with several documents of each query, or use spearman"
        raise RecipeError(Problem("nothing-ranked", message, path="data.metrics", hint=hint))

    def trainer(self, job: Job, model: Any, processing: Any, common: dict[str, Any]) -> Any:
        from sentence_transformers.cross_encoder import losses

        from launcher.train.contrast import RerankerTrainer, Scorer
        from launcher.train.model.sentence import write_scorer

        called = Scorer()
        lists = "documents" in LOSSES[job.reranker.loss].options
        # All pairs of a micro-batch at a time: ranks with other numbers of documents would run other numbers
        # of forward passes, and wait for each other for ever.
        options = {"mini_batch_size": -1} if lists else {}
        loss = getattr(losses, job.reranker.loss)(called, **options)
        return RerankerTrainer(
            **common, called=called, loss=loss, lists=lists, beside=lambda folder: write_scorer(job, folder)
        )

    def scores(self, found: Evaluated) -> dict[str, float]:
        (labels, queries), predicted = found.targets, found.predictions
        return ranked_scores(found.names, predicted, labels, queries)

    def reply_to_pair(self, trained: Any, texts: Sequence[str]) -> str:
        """The score of a document (second text) for a query, as CrossEncoder.predict gives it."""
        import torch

        from launcher.train.model.sentence import IDENTITY, activation_of

        model, length = trained.model, trained.job.data.max_length
        inputs = trained.processing(*texts, truncation=True, max_length=length, return_tensors="pt")
        score = model(**inputs.to(trained.device)).logits[0, 0].float()
        return f"{float(score if activation_of(trained.job) == IDENTITY else torch.sigmoid(score)):.4f}"

    def write_beside(self, job: Job, model: Any, folder: Path) -> None:
        from launcher.train.model.sentence import write_scorer

        write_scorer(job, folder)


@dataclass(frozen=True, slots=True)
class EncodeDocuments:
    """A query with each of its documents as the tokenizer joins two texts, end to end."""

    tokenizer: Any
    section: Any
    """`reranker` of the plan."""
    max_length: int
    drops: bool

    def __call__(self, rows: Sequence[Row]) -> EncodedBatch:
        batch = EncodedBatch(columns={"input_ids": [], "lengths": [], "relevance": []})
        for index, row in enumerate(rows):
            query, documents, labels = as_list(row.values)
            if is_empty(query, documents):
                batch.dropped["empty"] += 1
                continue
            refuse_misfit(row, task_named(Reranker.name), self.section)
            sample = self._call([query] * len(documents), documents)
            lengths = [len(one) for one in sample["input_ids"]]
            batch.tokens += sum(lengths)
            if max(lengths) > self.max_length:
                if self.drops:
                    batch.dropped["overlong"] += 1
                    continue
                # The tokenizer cuts, the longer of the two texts first, and keeps its closing tokens.
                options = {"truncation": True, "max_length": self.max_length}
                sample = self._call([query] * len(documents), documents, **options)
                batch.truncated += 1
                batch.tokens_lost += sum(lengths)
                lengths = [len(one) for one in sample["input_ids"]]
                batch.tokens_lost -= sum(lengths)
            for ids in sample["input_ids"]:
                refuse_padded_end(self.tokenizer, row, ids)
            pairs = [hash(tuple(ids)) for ids in sample["input_ids"]]
            judged = list(zip(pairs, labels, strict=True))
            if len(set(judged)) > len(set(pairs)):  # a document with two labels
                batch.dropped["equal"] += 1
                continue
            batch.judged += judged
            if "anchor" in row.values:
                note_repeated(batch, row)
            flat = {name: [token for one in values for token in one] for name, values in sample.items()}
            # Of the text: the dataset says which rows ask the same.
            number = [hash(tuple(self.tokenizer(query, verbose=False)["input_ids"])) & 0x7FFFFFFF]
            batch.keep(index, {**flat, "lengths": lengths, "relevance": labels, "query": number})
        return batch

    def _call(self, queries: Sequence[str], documents: Sequence[str], **options: Any) -> dict[str, Any]:
        found = self.tokenizer(
            queries, list(documents), return_attention_mask=False, verbose=False, **options
        )
        return dict(found)


@dataclass(frozen=True, slots=True)
class CollateDocuments:
    """Samples to one batch of all their pairs, with how many each has, their labels and their queries."""

    tokenizer: Any

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        import torch

        from launcher.train.contrast import parts

        names = [name for name in ("input_ids", "token_type_ids") if name in samples[0]]
        columns = {name: [one for sample in samples for one in parts(sample, name)] for name in names}
        batch = dict(self.tokenizer.pad(columns, return_tensors="pt"))
        sizes, width = [len(row) for row in columns["input_ids"]], batch["input_ids"].shape[1]
        left = self.tokenizer.padding_side == "left"
        return batch | {
            # Read by the host, and so left there.
            "counts": [len(sample["lengths"]) for sample in samples],
            "spans": [(width - size, width) if left else (0, size) for size in sizes],
            "labels": torch.tensor([one for sample in samples for one in sample["relevance"]]),
            "queries": torch.tensor([sample["query"][0] for sample in samples]),
        }


def ranked_scores(names: Sequence[str], predicted: Any, labels: Any, queries: Any) -> dict[str, float]:
    """Scores of ranking the documents of each query. predicted, labels: [rows, documents], NaN or -100 where
    a row has fewer; queries: numbers [rows]: rows of the same query are one list. Queries whose documents all
    have the same label have no order, and do not count."""
    import numpy as np

    from launcher.train.metrics import regression_scores

    there = ~np.isnan(predicted) & ~np.isnan(labels) & ~((predicted == -100) & (labels == -100))
    found: dict[str, float] = {}
    if by_score := [name for name in names if name in BY_SCORE]:
        found |= regression_scores(by_score, predicted[there], labels[there])
    ranks: dict[str, list[float]] = {name: [] for name in names if name not in BY_SCORE}
    for query in np.unique(queries) if ranks else ():
        mask = there & (queries == query)[:, None]
        relevant = labels[mask][best_first(predicted[mask], labels[mask])].tolist()
        if len(set(relevant)) > 1:
            rank_scores(ranks, relevant, relevant)
    found |= {name: float(np.mean(values)) if values else 0.0 for name, values in ranks.items()}
    return {name: found[name] for name in names}


TRAIN_TASK = TrainReranker()
