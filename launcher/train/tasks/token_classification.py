"""A class for each word. The first token of a word has its label; no other token contributes to the loss."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from launcher.errors import Problem, RecipeError
from launcher.rows.class_names import IGNORED
from launcher.rows.formats import label_id
from launcher.rows.sources import Row
from launcher.train.data.encoded import EncodedBatch
from launcher.train.tasks.task import Evaluated, Shown, TrainTask

if TYPE_CHECKING:
    from launcher.rows.sources import Detected
    from launcher.train.data.encoded import Encoder
    from launcher.train.job import Job

_ENTITY = re.compile(r"O|[BIESLU]-.+")
_OPENS, _INSIDE, _CLOSES, _SINGLE = "B", "I", "LE", "US"
"""Prefixes of the first word of an entity, of words inside, of its last word, of an entity of one word."""
_OF_SEQEVAL = {"L": "E", "U": "S"}
"""First letter of a label -> the one that seqeval knows for it: it reads BILOU labels as no entities."""


class TrainTokenClassification(TrainTask):
    def encoder(self, job: Job, processing: Any, detected: Detected, labels: Sequence[str] | None) -> Encoder:
        from launcher.train.data.tokenize import max_length_of, overlong_of

        if not processing.is_fast:
            message = "the tokenizer does not report where its tokens are in the text: it is not a fast one"
            raise RecipeError(Problem("slow-tokenizer", message, path="model.tokenizer"))
        drops = overlong_of(job, detected.format) == "drop"
        return EncodeWords(processing, max_length_of(job), drops, tuple(labels or ()))

    def shown(self, processing: Any, sample: Mapping[str, Any], labels: Sequence[str] | None) -> Shown:
        assert labels is not None, "every word has a class"
        ids, targets = sample["input_ids"], sample["labels"]
        starts = [number for number, label in enumerate(targets) if label != IGNORED]
        pieces = [(processing.decode(ids[: starts[0]]), False)]
        for start, end in pairwise([*starts, len(ids)]):
            pieces += [(processing.decode(ids[start:end]), False), (f"/{labels[targets[start]]} ", True)]
        return pieces, len(ids), len(starts)

    def scores(self, found: Evaluated) -> dict[str, float]:
        assert found.labels is not None, "the rows of training name the labels"
        return word_scores(found.names, found.predictions, found.targets, found.labels)

    def reply(self, model: Any, processing: Any, prompt: str, inputs: Any) -> str:
        """Each word between spaces with its label, a line a word."""
        words = prompt.split()
        encoded, owners = encode_words(processing, words)
        ids = inputs["input_ids"].new_tensor([encoded["input_ids"]])
        guesses = model(input_ids=ids).logits[0].argmax(dim=-1).tolist()
        found = {owner: guess for owner, guess in zip(owners, guesses, strict=True) if owner is not None}
        names = model.config.id2label
        return "\n".join(f"{word}\t{names[found[n]] if n in found else '-'}" for n, word in enumerate(words))


def encode_words(
    tokenizer: Any, words: Sequence[str], **options: Any
) -> tuple[dict[str, Any], list[int | None]]:
    """(encoded words with a space between each, for each token the word that it is the first of, else None).

    The tokens are those of the text as a pipeline reads it, not of the words one by one.
    """
    text = " ".join(words)
    ends = list(accumulate(len(word) + 1 for word in words))
    encoded = dict(
        tokenizer(text, return_offsets_mapping=True, return_attention_mask=False, verbose=False, **options)
    )
    owners: list[int | None] = []
    word, seen = 0, -1
    for start, end in encoded.pop("offset_mapping"):
        start += len(text[start:end]) - len(text[start:end].lstrip())
        if start >= end:  # special tokens, and spaces of their own
            owners.append(None)
            continue
        while ends[word] <= start:
            word += 1
        owners.append(word if word > seen else None)
        seen = max(seen, word)
    return encoded, owners


def is_scheme(labels: Sequence[str]) -> bool:
    """Whether labels are tags of entities with their beginnings: IOB2, IOBES or BILOU."""
    return all(map(_ENTITY.fullmatch, labels)) and any(label[0] in _OPENS + _SINGLE for label in labels)


def is_valid(tags: Sequence[str], *, closed: bool) -> bool:
    """Whether tags follow their scheme: an entity begins with B, goes on with I of the same kind, and, in
    schemes with an end (`closed`: IOBES, BILOU), ends with E or L. A single one has S or U."""
    inside: str | None = None
    for tag in (*tags, "O"):
        prefix, _, kind = tag.partition("-")
        continues = prefix in (_INSIDE, *_CLOSES)
        if continues and inside != kind:
            return False
        if closed and inside is not None and not continues:
            return False
        inside = kind if prefix in (_OPENS, _INSIDE) else None
    return True


@dataclass(frozen=True, slots=True)
class EncodeWords:
    """Words and their labels to input_ids and labels; a label is at the first token of its word.

    A word of which no token is left (control characters that the tokenizer removes) is counted under
    `word-without-token`, one that max_length cuts off under the truncated tokens. A row whose tags are in an
    order that their scheme excludes is kept and counted under `invalid-tags`.
    """

    tokenizer: Any
    max_length: int
    drops: bool
    """Whether longer rows are left out; else the end of them is."""
    labels: tuple[str, ...]
    is_scheme: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_scheme", is_scheme(self.labels))

    def __call__(self, rows: Sequence[Row]) -> EncodedBatch:
        batch = EncodedBatch()
        for index, row in enumerate(rows):
            sample = self._sample(batch, row)
            if isinstance(sample, str):
                batch.dropped[sample] += 1
            else:
                batch.keep(index, sample)
        return batch

    def _sample(self, batch: EncodedBatch, row: Row) -> dict[str, Any] | str:
        """The row's sample, or why it has none; its tokens are counted."""
        words = row.values["tokens"]
        ids = [
            IGNORED if label == IGNORED else label_id(row, label, self.labels)
            for label in row.values["labels"]
        ]
        if not "".join(words).strip():
            return "empty"
        encoded, owners = encode_words(self.tokenizer, words)
        length = len(owners)
        batch.tokens += length
        absent = len(words) - sum(owner is not None for owner in owners)
        if length > self.max_length:
            if self.drops:
                return "overlong"
            encoded, owners = encode_words(self.tokenizer, words, truncation=True, max_length=self.max_length)
            batch.truncated += 1
            batch.tokens_lost += length - self.max_length
        encoded["labels"] = [IGNORED if owner is None else ids[owner] for owner in owners]
        if all(label == IGNORED for label in encoded["labels"]):
            return "no-targets"
        if absent:
            batch.notes["word-without-token"] += absent
        if self.is_scheme:
            # A word without a label is outside, as in the metrics.
            tags = ["O" if number == IGNORED else self.labels[number] for number in ids]
            closed = any(label[0] in _CLOSES + _SINGLE for label in self.labels)
            batch.notes.update({"invalid-tags": 1} if not is_valid(tags, closed=closed) else {})
        return encoded


def word_scores(
    names: Sequence[str], predictions: Any, targets: Any, labels: Sequence[str]
) -> dict[str, float]:
    """Scores of labelled words; predictions and targets are ids [rows, length], -100 where there is no word.

    f1, precision and recall are of whole entities (seqeval) where the labels are O, B-…, I-… or those of
    IOBES or BILOU, else macro averages over the labels of words.
    """
    known = targets != IGNORED
    found = {"accuracy": float((predictions == targets)[known].mean()) if known.any() else 0.0}
    asked = [name for name in names if name != "accuracy"]
    if asked and all(_ENTITY.fullmatch(label) for label in labels):
        from seqeval import metrics

        named = [_OF_SEQEVAL.get(label[0], label[0]) + label[1:] for label in labels]
        tags = [
            [[named[number] for number in row[mask]] for row, mask in zip(ids, known, strict=True)]
            for ids in (targets, predictions)
        ]
        for name in asked:
            found[name] = float(getattr(metrics, f"{name}_score")(*tags, zero_division=0))
    elif asked:
        from sklearn import metrics

        for name in asked:
            score = getattr(metrics, f"{name}_score")
            found[name] = float(score(targets[known], predictions[known], average="macro", zero_division=0))
    return {name: found[name] for name in names}


TRAIN_TASK = TrainTokenClassification()
