"""Canonical rows to samples of token ids and labels, a batch of rows at a time.

Labels are made before padding, so that EOS is learnt even where it also pads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher.errors import Problem, RecipeError
from launcher.tasks.causal_lm import CausalLM
from launcher.train.data.chat import EncodeChat, template_origin
from launcher.train.data.encoded import (
    IGNORED,
    Collector,
    EncodedBatch,
    Encoder,
    texts_of,
    token_ids,
    with_eos,
    without_eos,
)
from launcher.train.data.fim import EncodeFim, find_sentinels

if TYPE_CHECKING:
    from launcher.train.data.formats import Detected
    from launcher.train.data.sources import Row
    from launcher.train.job import Job

__all__ = ["EncodedBatch", "Encoder", "make_encoder"]


def make_encoder(job: Job, tokenizer: Any, detected: Detected) -> Encoder:
    """The encoder of a causal language model for rows of one format.

    RecipeError where data.loss_on, data.overlong or data.fim do not go with the format or tokenizer.
    """
    max_length, overlong = max_length_of(job), overlong_of(job, detected.format)
    loss_on = loss_on_of(detected.format, job.data.loss_on)
    if job.data.fim is not None and detected.format != "text":
        message = f"the rows are {detected.format}; only text has a middle to fill in"
        raise RecipeError(Problem("fim-format", message, path="data.fim", hint="remove data.fim"))
    if detected.format == "chat":
        return EncodeChat(
            tokenizer,
            max_length,
            overlong,
            loss_on,
            loss_on_inserted=bool(job.data.loss_on_inserted),
            origin=template_origin(job),
        )
    if detected.format != "text":
        return EncodePairs(tokenizer, max_length, overlong, loss_on)
    fim = job.data.fim
    if fim is None or fim["rate"] == 0:
        return EncodeText(tokenizer, max_length, overlong)
    sentinels = find_sentinels(tokenizer)
    return EncodeFim(tokenizer, max_length, overlong, fim["rate"], fim["spm_rate"], job.seed, sentinels)


def loss_on_of(fmt: str, asked: str | None) -> str:
    """Which tokens are learnt for a format; RecipeError when the two do not go together."""
    known = CausalLM.learns[fmt]
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
    """Plain text: every token is learnt, one EOS at the true end."""

    tokenizer: Any
    max_length: int
    overlong: str

    def __call__(self, rows: Sequence[Row]) -> EncodedBatch:
        found = Collector(self.max_length, self.overlong)
        for text, ids in _encode_texts(self.tokenizer, rows):
            if not text.strip():
                found.drop("empty")
                continue
            ids = with_eos(self.tokenizer, ids)
            found.add(ids, list(ids))
        return found.batch()


def _encode_texts(tokenizer: Any, rows: Sequence[Row]) -> zip[tuple[str, list[int]]]:
    texts = texts_of(rows, "text")
    return zip(texts, token_ids(tokenizer, texts), strict=True)


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
        prompts, completions = texts_of(rows, "prompt"), texts_of(rows, "completion")
        asked = token_ids(self.tokenizer, prompts)
        answered = token_ids(self.tokenizer, completions, add_special_tokens=False)
        for completion, prompt, answer in zip(completions, asked, answered, strict=True):
            if not completion.strip():
                found.drop("empty")  # an empty answer would teach the model to say nothing
                continue
            prompt = without_eos(self.tokenizer, prompt)
            answer = with_eos(self.tokenizer, answer)
            ids = prompt + answer
            learnt = list(ids) if self.loss_on == "all" else [IGNORED] * len(prompt) + answer
            found.add(ids, learnt)
        return found.batch()


@dataclass(frozen=True, slots=True)
class EncodeSeq2Seq:
    """Prompt for the encoder, completion for the decoder, each cut at max_length."""

    tokenizer: Any
    max_length: int
    overlong: str

    def __call__(self, rows: Sequence[Row]) -> EncodedBatch:
        inputs: list[list[int]] = []
        labels: list[list[int]] = []
        batch = EncodedBatch({"input_ids": inputs, "labels": labels})
        prompts, completions = texts_of(rows, "prompt"), texts_of(rows, "completion")
        asked = token_ids(self.tokenizer, prompts)
        answered = self._targets(completions)
        pairs = zip(prompts, completions, asked, answered, strict=True)
        for index, (prompt, completion, ids, target) in enumerate(pairs):
            if not completion.strip():
                _drop(batch, "empty")
                continue
            batch.tokens += len(ids) + len(target)
            lost = max(0, len(ids) - self.max_length) + max(0, len(target) - self.max_length)
            if lost and self.overlong == "drop":
                _drop(batch, "overlong")
                continue
            if not target:
                _drop(batch, "no-targets")
                continue
            if len(ids) > self.max_length:
                # The tokenizer cuts, because an encoder's input keeps its closing token.
                ids = self.tokenizer(prompt, truncation=True, max_length=self.max_length)["input_ids"]
            batch.kept += 1
            batch.truncated += lost > 0
            batch.tokens_lost += lost
            batch.rows.append(index)
            inputs.append(ids)
            # A cut target gets no EOS: it does not end here.
            labels.append(target[: self.max_length])
        return batch

    def _targets(self, completions: list[str]) -> list[list[int]]:
        if not completions:
            return []
        encoded = self.tokenizer(text_target=completions, return_attention_mask=False, verbose=False)
        return [with_eos(self.tokenizer, ids) for ids in encoded["input_ids"]]


@dataclass(frozen=True, slots=True)
class EncodeClasses:
    """A text, or a pair of texts, with the tokenizer's own special tokens; the label is a class id."""

    tokenizer: Any
    max_length: int
    overlong: str
    labels: tuple[str, ...]

    def __call__(self, rows: Sequence[Row]) -> EncodedBatch:
        from launcher.train.data.formats import label_id

        batch = EncodedBatch({"input_ids": [], "labels": []})
        texts = texts_of(rows, "text")
        pairs = [row.values.get("text_pair") for row in rows]
        encoded = self._encode(texts, pairs)
        for index, (row, text, pair, sample) in enumerate(zip(rows, texts, pairs, encoded, strict=True)):
            if not (text + (pair or "")).strip():
                _drop(batch, "empty")
                continue
            length = len(sample["input_ids"])
            batch.tokens += length
            if length > self.max_length:
                if self.overlong == "drop":
                    _drop(batch, "overlong")
                    continue
                batch.truncated += 1
                batch.tokens_lost += length - self.max_length
                # The tokenizer cuts, the longer of two texts first, and keeps its closing tokens.
                sample = self._call(text, pair, truncation=True, max_length=self.max_length)
            batch.kept += 1
            batch.rows.append(index)
            batch.columns["labels"].append(label_id(row, row.values["label"], self.labels))
            for name, values in sample.items():
                batch.columns.setdefault(name, []).append(values)
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
        encoded = self.tokenizer(text, pair, return_attention_mask=False, verbose=False, **options)
        return dict(encoded)


def _drop(batch: EncodedBatch, reason: str) -> None:
    batch.dropped[reason] = batch.dropped.get(reason, 0) + 1
