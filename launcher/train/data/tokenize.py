"""Canonical rows to samples of token ids and labels, a batch of rows at a time.

Labels are made before padding, so that EOS is a target even where it also pads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher.errors import Problem, RecipeError
from launcher.rows.class_names import IGNORED
from launcher.rows.sources import bad_row
from launcher.tasks.rows import TOKEN_IDS
from launcher.tasks.task import Task
from launcher.train.data.chat import EncodeChat, template_origin
from launcher.train.data.encoded import (
    Collector,
    EncodedBatch,
    Encoder,
    refuse_padded_end,
    texts_of,
    token_ids,
    with_eos,
)
from launcher.train.data.fim import EncodeFim, find_sentinels

if TYPE_CHECKING:
    from launcher.rows.sources import Detected, Row
    from launcher.train.job import Job


def make_encoder(job: Job, tokenizer: Any, detected: Detected) -> Encoder:
    """The encoder of a causal language model for rows of one format.

    RecipeError where data.loss_on, data.overlong or data.fim do not go with the format or tokenizer.
    """
    max_length, overlong = max_length_of(job), overlong_of(job, detected.format)
    loss_on = loss_on_of(job.task, detected.format, job.data.loss_on)
    if job.data.fim is not None and detected.format != "text":
        message = f"the rows are {detected.format}; only text has a middle to fill in"
        raise RecipeError(Problem("fim-format", message, path="data.fim", hint="remove data.fim"))
    if detected.format == "chat":
        inserted, origin = bool(job.data.loss_on_inserted), template_origin(job)
        return EncodeChat(tokenizer, max_length, overlong, loss_on, loss_on_inserted=inserted, origin=origin)
    if detected.format == TOKEN_IDS.name:
        return EncodeTokenIds(max_length, overlong, vocabulary=max(tokenizer.get_vocab().values()) + 1)
    if detected.format != "text":
        return EncodePairs(tokenizer, max_length, overlong, loss_on)
    fim = job.data.fim
    if fim is None or fim["rate"] == 0:
        return EncodeText(tokenizer, max_length, overlong)
    sentinels = find_sentinels(tokenizer)
    return EncodeFim(tokenizer, max_length, overlong, fim["rate"], fim["spm_rate"], job.seed, sentinels)


def loss_on_of(task: Task, fmt: str, asked: str | None) -> str:
    """Which tokens contribute to the loss for a format; RecipeError when the two do not go together."""
    known = task.learns[fmt]
    if not known:
        if asked is None:
            return "all"  # nothing of it is masked here
        message = f"is {asked}, but {fmt} rows have labels of their own"
        raise RecipeError(Problem("loss-on", message, path="data.loss_on", hint="remove data.loss_on"))
    if asked is None:
        return known[0]
    if asked not in known:
        message = f"{asked} is meaningless for {fmt} rows; expected {' or '.join(known)}"
        raise RecipeError(Problem("loss-on", message, path="data.loss_on"))
    return asked


def max_length_of(job: Job) -> int:
    return int(job.data.max_length)


def overlong_of(job: Job, fmt: str) -> str:
    """truncate | split | drop; the format may be known only now, so `split` is checked here too."""
    asked: str | None = job.data.overlong
    if asked is None:
        return "split" if fmt == "text" else "truncate"
    if asked == "split" and fmt != "text":
        message = f"{fmt} rows cannot be split: what follows a cut has lost its beginning"
        hint = "use truncate or drop"
        raise RecipeError(Problem("overlong-split", message, path="data.overlong", hint=hint))
    return asked


@dataclass(frozen=True, slots=True)
class EncodeText:
    """Plain text: every token is a target, one EOS at the true end."""

    tokenizer: Any
    max_length: int
    overlong: str

    def __call__(self, rows: Sequence[Row]) -> EncodedBatch:
        found = Collector(self.max_length, self.overlong)
        texts = texts_of(rows, "text")
        for text, ids in zip(texts, token_ids(self.tokenizer, texts), strict=True):
            if not text.strip():
                found.dropped["empty"] += 1
                continue
            ids = with_eos(self.tokenizer, ids)
            found.add(ids, list(ids))
        return found


@dataclass(frozen=True, slots=True)
class EncodeTokenIds:
    """Rows that are tokenised already, as they are: nothing is added to them."""

    max_length: int
    overlong: str
    vocabulary: int
    """Ids of the tokenizer are below it."""

    def __call__(self, rows: Sequence[Row]) -> EncodedBatch:
        found = Collector(self.max_length, self.overlong)
        for row in rows:
            documents = row.values["documents"]
            for ids, _ in documents:
                other = next((one for one in ids if not 0 <= one < self.vocabulary), None)
                if other is not None:
                    message = f"input_ids holds {other}, and the tokenizer's ids are below {self.vocabulary}"
                    hint = "tokenise the rows with the tokenizer of this model"
                    raise bad_row(row, message, hint, code="unknown-token")
            if not any(ids for ids, _ in documents):
                found.dropped["empty"] += 1
                continue
            found.add_documents(documents)
        return found


@dataclass(frozen=True, slots=True)
class EncodePairs:
    """Prompt and completion, tokenised apart so that the border between them is exact."""

    tokenizer: Any
    max_length: int
    overlong: str
    loss_on: str
    """completion | all"""

    def __call__(self, rows: Sequence[Row]) -> EncodedBatch:
        found = Collector(self.max_length, self.overlong)
        completions = texts_of(rows, "completion")
        prompts = token_ids(self.tokenizer, texts_of(rows, "prompt"))
        answers = token_ids(self.tokenizer, completions, add_special_tokens=False)
        for completion, prompt, answer in zip(completions, prompts, answers, strict=True):
            if not completion.strip():
                found.dropped["empty"] += 1  # an empty answer would teach the model to write nothing
                continue
            if len(prompt) > 1 and prompt[-1] == self.tokenizer.eos_token_id:
                prompt = prompt[:-1]  # some tokenizers add an EOS, which would end the prompt
            answer = with_eos(self.tokenizer, answer)
            ids = prompt + answer
            found.add(ids, list(ids) if self.loss_on == "all" else [IGNORED] * len(prompt) + answer)
        return found


@dataclass(frozen=True, slots=True)
class EncodeSeq2Seq:
    """Prompt for the encoder, completion for the decoder, each cut at max_length."""

    tokenizer: Any
    max_length: int
    overlong: str

    def __call__(self, rows: Sequence[Row]) -> EncodedBatch:
        batch = EncodedBatch()
        prompts, completions = texts_of(rows, "prompt"), texts_of(rows, "completion")
        pairs = zip(
            prompts, completions, token_ids(self.tokenizer, prompts), self._targets(completions), strict=True
        )
        for index, (prompt, completion, ids, target) in enumerate(pairs):
            if not completion.strip():
                batch.dropped["empty"] += 1
                continue
            batch.tokens += len(ids) + len(target)
            lost = max(0, len(ids) - self.max_length) + max(0, len(target) - self.max_length)
            if lost and self.overlong == "drop":
                batch.dropped["overlong"] += 1
                continue
            if not target:
                batch.dropped["no-targets"] += 1
                continue
            if len(ids) > self.max_length:
                # The tokenizer cuts, because an encoder's input keeps its closing token.
                ids = self.tokenizer(prompt, truncation=True, max_length=self.max_length)["input_ids"]
            batch.truncated += lost > 0
            batch.tokens_lost += lost
            # A cut target gets no EOS: it does not end here.
            batch.keep(index, {"input_ids": ids, "labels": target[: self.max_length]})
        return batch

    def _targets(self, completions: list[str]) -> list[list[int]]:
        if not completions:
            return []
        encoded = self.tokenizer(text_target=completions, return_attention_mask=False, verbose=False)
        return [with_eos(self.tokenizer, ids) for ids in encoded["input_ids"]]


@dataclass(frozen=True, slots=True)
class EncodeClasses:
    """A text, or a pair of texts, with the tokenizer's own special tokens, and its target."""

    tokenizer: Any
    max_length: int
    overlong: str
    target: Callable[[Row], int | float | list[float]]
    """A canonical row's label as the loss reads it."""
    several: bool = False
    """Whether a row has several labels, or none."""

    def __call__(self, rows: Sequence[Row]) -> EncodedBatch:
        batch = EncodedBatch()
        texts = texts_of(rows, "text")
        pairs = [row.values.get("text_pair") for row in rows]
        encoded = self._encode(texts, pairs)
        for index, (row, text, pair, sample) in enumerate(zip(rows, texts, pairs, encoded, strict=True)):
            if not (text + (pair or "")).strip():
                batch.dropped["empty"] += 1
                continue
            length = len(sample["input_ids"])
            batch.tokens += length
            if length > self.max_length:
                if self.overlong == "drop":
                    batch.dropped["overlong"] += 1
                    continue
                batch.truncated += 1
                batch.tokens_lost += length - self.max_length
                # The tokenizer cuts, the longer of two texts first, and keeps its closing tokens.
                sample = self._call(text, pair, truncation=True, max_length=self.max_length)
            refuse_padded_end(self.tokenizer, row, sample["input_ids"])
            target = self.target(row)
            if self.several and isinstance(target, list) and not any(target):
                batch.notes["without-label"] += 1
            batch.keep(index, {"labels": target, **sample})
        return batch

    def _encode(self, texts: list[str], pairs: list[str | None]) -> list[dict[str, list[int]]]:
        """One dict per row. Rows with and without a second text are two calls: a call takes one kind."""
        found: list[dict[str, list[int]]] = [{} for _ in texts]
        for paired in (False, True):
            chosen = [index for index, pair in enumerate(pairs) if (pair is not None) is paired]
            if not chosen:
                continue
            seconds = [pairs[index] for index in chosen] if paired else None
            columns = self._call([texts[index] for index in chosen], seconds)
            for name, values in columns.items():
                for index, value in zip(chosen, values, strict=True):
                    found[index][name] = value
        return found

    def _call(self, text: Any, pair: Any, **options: Any) -> dict[str, Any]:
        return dict(self.tokenizer(text, pair, return_attention_mask=False, verbose=False, **options))
