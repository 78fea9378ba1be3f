"""Text embeddings with the losses, pooling and batch sampler of sentence-transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import RecipeError
from launcher.rows.own_formats import OWN_FORMATS
from launcher.rows.recognise import refuse_misfit
from launcher.rows.sources import Row
from launcher.tasks import FORMATS, task_named
from launcher.tasks.embedding import BY_RANK, LOSSES, NEGATIVES, SCORED_PAIR, Embedding, prompts_unused
from launcher.train.data.encoded import EncodedBatch
from launcher.train.tasks.task import Evaluated, Shown, TrainTask

if TYPE_CHECKING:
    from launcher.rows.sources import Detected
    from launcher.train.data.encoded import Data, Encoder
    from launcher.train.job import Job


def note_repeated(batch: EncodedBatch, row: Row) -> None:
    """Count a row of a positive pair whose anchor is also one of its other texts."""
    others = (*row.values["positives"], *row.values["negatives"])
    if row.values["anchor"].strip() in (text.strip() for text in others):
        batch.notes["anchor-repeated"] += 1


def fitting(formats: Sequence[str], values: dict[str, Any]) -> dict[str, Any]:
    """A made-up row that the loss takes: the values, or a row of the first of `formats`."""
    if any(FORMATS[name].needed.keys() <= values.keys() for name in formats):
        return values
    draw = random.Random(json.dumps(values))
    return OWN_FORMATS[formats[0]].make(draw, draw.randrange(64))


class TrainEmbedding(TrainTask):
    def encoder(self, job: Job, processing: Any, detected: Detected, labels: Sequence[str] | None) -> Encoder:
        from launcher.train.data.tokenize import max_length_of, overlong_of

        if problem := job.task.misfit(detected.format, job.embedding):
            raise RecipeError(problem)
        drops = overlong_of(job, detected.format) == "drop"
        return EncodeTexts(job, processing, columns_of(job), max_length_of(job), drops)

    def rehearsed(self, job: Job, values: dict[str, Any]) -> dict[str, Any]:
        return fitting(LOSSES[job.embedding.loss].formats, values)

    def samples(self, job: Job, samples: Any, processing: Any) -> Any:
        from launcher.train.contrast import TextRows

        return TextRows(samples, columns_of(job))

    def collator(self, job: Job, processing: Any) -> Any:
        return CollateTexts(processing, columns_of(job))

    def shown(self, processing: Any, sample: Mapping[str, Any], labels: Sequence[str] | None) -> Shown:
        from launcher.train.contrast import parts

        names = ("anchor", "positive", *NEGATIVES[1:])
        texts = zip(names, parts(sample), strict=False)
        pieces = [(f"[{name}] {processing.decode(ids)}\n", True) for name, ids in texts]
        if "score" in sample:
            pieces.append((f"-> {sample['score']:g}", True))
        return pieces, len(sample["input_ids"]), len(sample["input_ids"])

    def check_batch(self, job: Job, tokenizer: Any, data: Data, micro_batch: int) -> None:
        from launcher.train.job import rank
        from launcher.train.model.sentence import modules_of

        # Refuses modules of the checkpoint that are not trained, before it is loaded.
        prompts = {name: text for name, text in modules_of(job).prompts.items() if text}
        if prompts and not job.embedding.prompts and rank() == 0:
            print(f"WARNING: {prompts_unused(prompts)}")

    def trainer(self, job: Job, model: Any, processing: Any, common: dict[str, Any]) -> Any:
        from launcher.train.contrast import Embedder, EmbeddingTrainer
        from launcher.train.model.sentence import modules_of

        modules = modules_of(job)
        width = int(model.config.get_text_config().hidden_size)
        after = modules.make(width)
        called = Embedder(after, after[0].pooling_output_dimension)
        unique = job.embedding.batch_sampler == "no_duplicates"
        return EmbeddingTrainer(
            **common,
            called=called,
            loss=make_loss(job, called),
            unique=unique,
            columns=columns_of(job),
            beside=lambda folder: modules.write(folder, width),
        )

    def scores(self, found: Evaluated) -> dict[str, float]:
        from launcher.train.metrics import regression_scores

        if found.names[0] in BY_RANK:
            return retrieval(found.names, found.predictions, found.targets)
        left, right = found.predictions[:, 0], found.predictions[:, 1]
        return regression_scores(found.names, cosine(left, right), found.targets)

    def reply_to_pair(self, trained: Any, texts: Sequence[str]) -> str:
        """The cosine similarity of a query and a document, each with its prompt."""
        from launcher.train.contrast import Embedder
        from launcher.train.model.sentence import saved_modules

        modules = saved_modules(trained.job, trained.folder)
        after = modules.make(int(trained.model.config.get_text_config().hidden_size))
        called = Embedder(after, after[0].pooling_output_dimension)
        called.inner[:] = [trained.model]
        options = {"truncation": True, "max_length": modules.max_length, "return_tensors": "pt"}
        found = []
        for role, text in zip(("query", "document"), texts, strict=True):
            tokens = trained.processing([modules.prompts.get(role, "") + text], **options).to(trained.device)
            found.append(called(dict(tokens))["sentence_embedding"].float().cpu().numpy())
        return f"{float(cosine(*found)[0]):.4f}"

    def write_beside(self, job: Job, model: Any, folder: Path) -> None:
        from launcher.train.model.sentence import modules_of

        modules_of(job).write(folder, int(model.config.get_text_config().hidden_size))


def columns_of(job: Job) -> tuple[str, ...]:
    """Names of the texts of a sample."""
    if LOSSES[job.embedding.loss].formats == (SCORED_PAIR.name,):
        return ("sentence1", "sentence2")
    return ("anchor", "positive", *(f"negative_{n}" for n in range(1, job.embedding.negatives + 1)))


def make_loss(job: Job, called: Any) -> Any:
    """The loss of the recipe, of sentence-transformers, around `called`."""
    from sentence_transformers.sentence_transformer import losses

    given = {
        "scale": job.embedding.scale,
        "gather_across_devices": job.embedding.gather_across_devices,
        "mini_batch_size": job.embedding.mini_batch_size,
        "triplet_margin": job.embedding.triplet_margin,
    }
    name = job.embedding.loss
    loss = getattr(losses, name)(called, **{key: given[key] for key in LOSSES[name].options})
    dims = job.embedding.matryoshka_dims
    return losses.MatryoshkaLoss(called, loss, dims) if dims else loss


@dataclass(frozen=True, slots=True)
class EncodeTexts:
    """The texts of a row, each with its prompt and the tokenizer's own special tokens, end to end."""

    job: Job
    tokenizer: Any
    columns: tuple[str, ...]
    max_length: int
    drops: bool

    def __call__(self, rows: Sequence[Row]) -> EncodedBatch:
        batch = EncodedBatch(columns={"input_ids": [], "lengths": []})
        for index, row in enumerate(rows):
            lost = batch.tokens_lost
            found = [self._sample(batch, row, texts) for texts in self._texts(row)]
            samples = [sample for sample in found if not isinstance(sample, str)]
            batch.truncated += batch.tokens_lost > lost
            if not samples:
                batch.dropped[next((reason for reason in found if isinstance(reason, str)), "empty")] += 1
                continue
            if "anchor" in row.values:
                note_repeated(batch, row)
            batch.keep(index, *samples)
        return batch

    def _sample(self, batch: EncodedBatch, row: Row, texts: list[str]) -> dict[str, Any] | str:
        """The sample of the texts, or why they are dropped."""
        if not all(text.strip() for text in texts):
            return "empty"
        prompts = self.job.embedding.prompts
        query, document = prompts.get("query", ""), prompts.get("document", "")
        rest = document if "anchor" in row.values else query
        texts = [query + texts[0], *(rest + text for text in texts[1:])]
        ids = [self._ids(text) for text in texts]
        tokens = sum(map(len, ids))
        batch.tokens += tokens
        if max(map(len, ids)) > self.max_length:
            if self.drops:
                return "overlong"
            # The tokenizer cuts, because a text keeps its closing token.
            ids = [self._ids(text, truncation=True, max_length=self.max_length) for text in texts]
            batch.tokens_lost += tokens - sum(map(len, ids))
        if not self._judge(batch, row, ids):
            return "equal"
        sample = {"input_ids": [token for one in ids for token in one], "lengths": [len(one) for one in ids]}
        return sample | ({"score": row.values["score"]} if "score" in row.values else {})

    @staticmethod
    def _judge(batch: EncodedBatch, row: Row, ids: Sequence[list[int]]) -> bool:
        """Note how a row judges pairs. False where its positive is a negative, as the model reads them."""
        first, second, *negatives = [hash(tuple(one)) for one in ids]
        if "score" in row.values:  # the cosine of two texts is the same the other way round
            batch.judged.append((hash((min(first, second), max(first, second))), row.values["score"]))
            return True
        if second in negatives:
            return False
        batch.judged += [(hash((first, second)), 1.0), *((hash((first, one)), 0.0) for one in negatives)]
        return True

    def _ids(self, text: str, **options: Any) -> list[int]:
        found = self.tokenizer(text, return_attention_mask=False, verbose=False, **options)
        return list(found["input_ids"])

    def _texts(self, row: Row) -> list[list[str]]:
        """The texts of each sample of a row: one for each of its positives."""
        values = row.values
        if not self.job.tiny:  # made-up rows have as many negatives as any recipe trains
            refuse_misfit(row, task_named(Embedding.name), self.job.embedding)
        if "score" in values:
            return [[values["sentence1"], values["sentence2"]]]
        negatives = values["negatives"][: len(self.columns) - 2]
        return [[values["anchor"], positive, *negatives] for positive in values["positives"]]


@dataclass(frozen=True, slots=True)
class CollateTexts:
    """Rows of named texts to {NAME_input_ids, NAME_attention_mask: [rows, longest of the column]}."""

    tokenizer: Any
    columns: tuple[str, ...]

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        import torch

        batch: dict[str, Any] = {}
        for name in self.columns:
            ids = [row[name] for row in rows]
            padded = self.tokenizer.pad({"input_ids": ids}, return_tensors="pt")
            batch[f"{name}_input_ids"] = padded["input_ids"]
            batch[f"{name}_attention_mask"] = padded["attention_mask"]
        if "score" in rows[0]:
            batch["score"] = torch.tensor([row["score"] for row in rows], dtype=torch.float32)
        else:  # equal texts have equal numbers
            texts = [[hash(tuple(row[name])) for name in self.columns] for row in rows]
            batch["texts"] = torch.tensor(texts, dtype=torch.int64)
        return batch


def cosine(left: Any, right: Any) -> Any:
    """Cosine similarity of rows."""
    import numpy as np

    norms = np.linalg.norm(left, axis=-1) * np.linalg.norm(right, axis=-1)
    return (left * right).sum(axis=-1) / np.maximum(norms, 1e-12)


def retrieval(names: Sequence[str], embeddings: Any, texts: Any) -> dict[str, float]:
    """Scores of finding the positives of each anchor among all positives and negatives of the rows.

    embeddings: [rows, columns, width]; texts: numbers of the texts [rows, columns]. Equal texts count once.
    """
    import numpy as np

    unit = embeddings / np.maximum(np.linalg.norm(embeddings, axis=-1, keepdims=True), 1e-12)
    queries, first = np.unique(texts[:, 0], return_index=True)
    documents, place = np.unique(texts[:, 1:].reshape(-1), return_index=True)
    corpus = unit[:, 1:].reshape(-1, unit.shape[-1])[place]
    asked = unit[:, 0][first]
    row_of: Any = np.searchsorted(queries, texts[:, 0])
    column_of: Any = np.searchsorted(documents, texts[:, 1])
    found: dict[str, list[float]] = {name: [] for name in names}
    wanted: dict[int, set[int]] = {}
    for row, column in zip(row_of.tolist(), column_of.tolist(), strict=True):
        wanted.setdefault(row, set()).add(column)
    for start in range(0, len(asked), 256):
        similar = asked[start : start + 256] @ corpus.T
        for offset, similarities in enumerate(similar):
            relevant = np.zeros(len(documents))
            relevant[list(wanted[start + offset])] = 1.0
            order = best_first(similarities, relevant)
            rank_scores(found, relevant[order].tolist(), [1.0] * len(wanted[start + offset]))
    return {name: float(np.mean(values)) for name, values in found.items()}


def best_first(scores: Any, relevant: Any) -> Any:
    """Places by score, the highest first; of equal ones those that are relevant last: a model that tells
    nothing apart must not look perfect."""
    import numpy as np

    return np.lexsort((relevant, -scores))


def rank_scores(found: dict[str, list[float]], ranked: Sequence[float], ideal: Sequence[float]) -> None:
    """Add a query's scores. ranked: relevance of its documents, best first; ideal: of all relevant ones."""
    import math

    def dcg(values: Sequence[float]) -> float:
        return sum(value / math.log2(place + 2) for place, value in enumerate(values[:10]))

    best = dcg(sorted(ideal, reverse=True))
    first = next((place for place, value in enumerate(ranked[:10]) if value > 0), None)
    values = {
        "ndcg@10": dcg(ranked) / best if best else 0.0,
        "mrr@10": 0.0 if first is None else 1 / (first + 1),
        "accuracy@1": float(first == 0),
    }
    for name in found:
        found[name].append(values[name])


TRAIN_TASK = TrainEmbedding()
