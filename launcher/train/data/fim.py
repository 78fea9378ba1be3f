"""Fill-in-the-middle: text cut at two random characters and reordered, so that a model learns to fill in.

PSM: <prefix> before <suffix> after <middle> between EOS. SPM: <prefix><suffix> after <middle> before
between EOS, which is the order StarCoder's training and the paper on the method use.

A document longer than max_length is cut first and every chunk reordered on its own. The other way
round, a chunk holds a sentinel whose counterpart is in another sample: it shows a middle without its
surroundings. StarCoder's training does the same, on the windows of its context. So each reordered
sample is whole, and its EOS is true: the middle has reached what comes after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

from launcher.errors import Problem, RecipeError
from launcher.train.data.encoded import (
    Collector,
    EncodedBatch,
    cut,
    texts_of,
    token_ids,
    with_eos,
)

if TYPE_CHECKING:
    from launcher.rows.sources import Row

SENTINELS: tuple[tuple[str, str, str], ...] = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StarCoder2, Granite, StableCode
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 (DeepSeek-Coder)
)
"""The tokens before what comes first, what comes last and what is to be filled in, of known families."""

_GROWTH = 8
"""Tokens kept free: text cut at two characters more takes some tokens more than it took whole."""
_ANCHOR = "☺"


def find_sentinels(tokenizer: Any) -> tuple[int, int, int]:
    """Ids of the (prefix, suffix, middle) tokens. RecipeError when the vocabulary has no known set."""
    vocabulary = tokenizer.get_vocab()
    for names in SENTINELS:
        if all(name in vocabulary for name in names):
            prefix, suffix, middle = (vocabulary[name] for name in names)
            return prefix, suffix, middle
    known = "; ".join(" ".join(names) for names in SENTINELS)
    message = f"the tokenizer has none of the known sets of fill-in-the-middle tokens: {known}"
    hint = "use a model that was trained to fill in, or leave data.fim out"
    raise RecipeError(Problem("fim-tokens-missing", message, path="data.fim", hint=hint))


@dataclass(frozen=True, slots=True)
class Cut:
    """A text in three parts, and their order in the sample."""

    prefix: str
    middle: str
    suffix: str
    spm: bool

    @property
    def ordered(self) -> tuple[str, str, str]:
        """The parts in the order of the sample."""
        if self.spm:
            return self.suffix, self.prefix, self.middle
        return self.prefix, self.suffix, self.middle


def draw(text: str, rate: float, spm_rate: float, seed: str) -> Cut | None:
    """Whether and where `text` is cut, the same for the same seed. None: it stays as it is."""
    random = Random(seed)
    if random.random() >= rate:
        return None
    spm = random.random() < spm_rate
    first, last = sorted(random.randint(0, len(text)) for _ in range(2))
    return Cut(text[:first], text[first:last], text[last:], spm)


@dataclass(slots=True)
class _Sample:
    """What becomes of one document or one chunk of it."""

    plain: list[int]
    """Its ids when it is not reordered."""
    cut: Cut | None
    starts_document: bool
    parts: list[list[int]]
    """Ids of the three parts, in order."""


class EncodeFim:
    """Encoder of text rows of which a share, `rate`, becomes fill-in-the-middle."""

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        overlong: str,
        rate: float,
        spm_rate: float,
        seed: int,
        sentinels: tuple[int, int, int],
    ) -> None:
        """RecipeError when max_length leaves no space, or the tokenizer reports no places of tokens."""
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.overlong = overlong
        self.rate = rate
        self.spm_rate = spm_rate
        self.seed = seed
        self.sentinels = sentinels
        self._lead = _lead(tokenizer)
        self._free = max_length - len(self._lead) - len(sentinels) - 1 - _GROWTH
        if self._free < _GROWTH:
            least = max_length - self._free + _GROWTH
            message = f"{max_length} tokens are too few for fill-in-the-middle, at least {least} are needed"
            raise RecipeError(Problem("fim-room", message, path="data.max_length"))
        if not tokenizer.is_fast:
            message = "the tokenizer does not report where in the text a token is, so text cannot be cut"
            hint = "use a model with a tokenizer.json"
            raise RecipeError(Problem("tokenizer-offsets", message, path="data.fim", hint=hint))
        self._anchor = _anchor(tokenizer)

    def __call__(self, rows: Sequence[Row]) -> EncodedBatch:
        found = Collector(self.max_length, self.overlong)
        if not rows:
            return found
        texts = texts_of(rows, "text")
        encoded = self.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        documents = [
            (self._samples(row, text, ids, [start for start, _ in places]), len(ids))
            for row, text, ids, places in zip(
                rows, texts, encoded["input_ids"], encoded["offset_mapping"], strict=True
            )
        ]
        self._encode_parts([sample for samples, _ in documents for sample in samples])
        for text, (samples, length) in zip(texts, documents, strict=True):
            if not text.strip():
                found.dropped["empty"] += 1
                continue
            self._collect(found, samples, length)
        return found

    def _collect(self, found: Collector, samples: list[_Sample], length: int) -> None:
        """length: tokens of the document's text, without BOS and EOS."""
        pieces = [self._ids(sample) for sample in samples]
        if len(pieces) == 1 and pieces[0] is samples[0].plain:
            found.add(pieces[0], list(pieces[0]))
            return
        whole = len(self._lead) + length + 1
        is_cut = self.overlong == "truncate" and whole > self.max_length
        found.add_pieces(pieces, whole, length - self._free if is_cut else 0)

    def _samples(self, row: Row, text: str, ids: list[int], starts: list[int]) -> list[_Sample]:
        """The document in one piece, or in chunks with space for the sentinels."""
        plain = with_eos(self.tokenizer, self._lead + ids)
        fits = len(plain) <= self.max_length
        if fits or self.overlong != "split":
            kept = text
            if not fits:
                if self.overlong == "drop":
                    return [_Sample(plain, None, True, [])]
                # Cut before it is reordered, so that the middle, which stands last, is not what is lost.
                kept = text[: starts[self._free]]
            return [_Sample(plain, self._draw(row, kept, 0), True, [])]
        samples = []
        bounds = _clean_bounds([len(chunk) for chunk in cut(ids, self._free)], starts, len(ids))
        for number, (first, last) in enumerate(bounds):
            begins = 0 if number == 0 else starts[first]
            ends = starts[last] if last < len(ids) else len(text)
            chunk = ids[first:last]
            if number == 0:
                chunk = self._lead + chunk
            if last == len(ids):
                chunk = with_eos(self.tokenizer, chunk)
            samples.append(_Sample(chunk, self._draw(row, text[begins:ends], number), number == 0, []))
        return samples

    def _draw(self, row: Row, text: str, number: int) -> Cut | None:
        return draw(text, self.rate, self.spm_rate, f"{self.seed}:{row.file}:{row.number}:{number}")

    def _encode_parts(self, samples: list[_Sample]) -> None:
        """Ids of the parts of all cut samples, with one call."""
        wanted = [sample for sample in samples if sample.cut is not None]
        texts = []
        for sample in wanted:
            assert sample.cut is not None, "only these are wanted"
            first = (1 if sample.cut.spm else 0) if sample.starts_document else None
            for place, part in enumerate(sample.cut.ordered):
                texts.append(part if place == first or not part else self._anchor_text + part)
        encoded = iter(token_ids(self.tokenizer, texts, add_special_tokens=False))
        for sample in wanted:
            sample.parts = [self._without_anchor(next(encoded)) for _ in range(3)]

    @property
    def _anchor_text(self) -> str:
        return _ANCHOR if self._anchor else ""

    def _without_anchor(self, ids: list[int]) -> list[int]:
        size = len(self._anchor)
        return ids[size:] if size and ids[:size] == self._anchor else ids

    def _ids(self, sample: _Sample) -> list[int]:
        """The sample's ids; plain where reordering it makes it longer than max_length."""
        if sample.cut is None:
            return sample.plain
        prefix, suffix, middle = self.sentinels
        first, second, third = sample.parts
        if sample.cut.spm:
            ids = [*self._lead, prefix, suffix, *first, middle, *second, *third]
        else:
            ids = [*self._lead, prefix, *first, suffix, *second, middle, *third]
        ids = with_eos(self.tokenizer, ids)
        return ids if len(ids) <= self.max_length else sample.plain


def _lead(tokenizer: Any) -> list[int]:
    """What the tokenizer writes before a text (its BOS, if any)."""
    ids: list[int] = list(tokenizer("")["input_ids"])
    eos = tokenizer.eos_token_id
    if ids and ids[-1] == eos and (len(ids) > 1 or eos != tokenizer.bos_token_id):
        ids.pop()
    return ids


def _anchor(tokenizer: Any) -> list[int]:
    """Ids of a sign put before parts and taken off again; empty for tokenizers that need none.

    Some tokenizers write a space before every text, which would put one into the middle of a word.
    """
    first = tokenizer.convert_ids_to_tokens(tokenizer("a", add_special_tokens=False)["input_ids"])[0]
    if not first.startswith("▁"):
        return []
    ids: list[int] = tokenizer(_ANCHOR, add_special_tokens=False)["input_ids"]
    return ids


def _clean_bounds(lengths: list[int], starts: list[int], total: int) -> list[tuple[int, int]]:
    """(first, last) token of consecutive chunks, moved so that no character's bytes are torn apart."""
    bounds = [0]
    end = 0
    for length in lengths[:-1]:
        end += length
        clean = end
        while clean > bounds[-1] + 1 and starts[clean] == starts[clean - 1]:
            clean -= 1
        bounds.append(clean)
    bounds.append(total)
    return list(pairwise(bounds))
