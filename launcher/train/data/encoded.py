"""Samples in columns, the counts of what became of their rows, and samples as text for people."""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from launcher.errors import EffilaunchError
from launcher.rows.class_names import IGNORED
from launcher.rows.prepared_images import LARGEST, PreparedImages
from launcher.rows.sources import bad_row

if TYPE_CHECKING:
    from launcher.rows.sources import Row

TOTALS = ("read", "kept", "truncated", "split", "tokens", "tokens_lost")
"""Numbers that result.json holds of the rows."""
REASONS: Mapping[str, str] = {
    "no-targets": "data.max_length cuts off all tokens of the loss, or data.loss_on leaves none",
    "masked": "the row masks every turn that would contribute to the loss",
    "overlong": "the row is longer than data.max_length, and data.overlong is drop",
    "empty": "the row has no text or no answer",
    "equal": "chosen and rejected, or a positive and a negative of the row are the same",
    "format_row": "the hook leaves the row out",
    "image-cut": "data.max_length would cut an image",
}
"""Why a row is left out -> what that means, for hints."""
NOTES = (
    "turn-masked",
    "empty-turn-masked",
    "inserted-text-masked",
    "reasoning-left-out",
    "field-not-rendered",
    "word-without-token",
    "invalid-tags",
    "without-label",
    "anchor-repeated",
    "contradicting-labels",
    "images-without-mark",
    "image-converted",
    "special-token-in-text",
)
"""What is counted of rows that are kept. Of conversations: turns that the row masks; turns of the assistant
that are empty; turns with text of the template that is masked; turns whose reasoning the template leaves
out; fields of messages that it does not render, each as `field-not-rendered: NAME`. Of labelled words:
those that the tokenizer removes, and rows with tags in an order that their scheme excludes. Texts that have
none of several labels. Rows whose anchor is also one of their other texts; pairs of texts that rows give
different labels. Of rows with images: those that do not say where their images are, which then come first;
images whose colours RGB cannot hold, each as `image-converted: MODE`. Rows whose texts hold a special
token, as `special-token-in-text: TOKEN`."""
ASKED_FOR = ("masked", "overlong", "format_row")
"""Reasons that the row, the recipe (`data.overlong: drop`) or its hook gives: no loss of data."""
SHOWN_CHARACTERS = 2000

Piece = tuple[str, bool]
"""(text, whether it contributes to the loss)"""


@dataclass(slots=True, kw_only=True)
class Tally:
    """What became of rows: kept + the sum of dropped is their number."""

    kept: int = 0
    """Rows that gave at least one sample."""
    truncated: int = 0
    """Rows that lost tokens, those that truncation left without a target included."""
    split: int = 0
    """Rows cut into several samples."""
    tokens: int = 0
    """Tokens before truncation and dropping."""
    tokens_lost: int = 0
    """Tokens cut off by truncation."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Reason -> rows."""
    notes: Counter[str] = field(default_factory=Counter)
    """See NOTES."""
    first_rows: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Note, of some of NOTES -> file and line of the first row that has it."""


@dataclass(slots=True)
class EncodedBatch(Tally):
    """Samples of a batch of rows."""

    columns: dict[str, Any] = field(default_factory=lambda: {"input_ids": [], "labels": []})
    """Equal lengths, one entry per sample: input_ids, labels, and token_type_ids for classification. Lists;
    Arrow arrays of the same once they are on their way to the cache.

    Language models: lists of int, labels -100 where masked. Classification: labels is one int.
    """
    rows: list[int] = field(default_factory=list)
    """For each sample, which row of the batch it came from."""
    pixels: list[int] = field(default_factory=list)
    """For each sample with images beside tokens, how many values the processor makes of them."""
    judged: list[tuple[int, float]] = field(default_factory=list)
    """Of tasks that compare texts: (a hash of the tokens of two texts, the label that a row gives them)."""

    def keep(self, row: int, *samples: Mapping[str, Any]) -> None:
        """Add all samples of a row."""
        self.kept += 1
        for sample in samples:
            self.rows.append(row)
            for name, value in sample.items():
                self.columns.setdefault(name, []).append(value)


Encoder = Callable[[Sequence["Row"]], EncodedBatch]
"""Canonical rows of one format to samples."""


class Collector(EncodedBatch):
    """A batch whose rows come in order, each exactly once, and are fitted to max_length."""

    def __init__(self, max_length: int, overlong: str) -> None:
        """overlong: truncate | split | drop."""
        super().__init__()
        self.max_length, self.overlong = max_length, overlong

    def add(self, ids: list[int], labels: list[int]) -> None:
        """One row. The lists become the collector's own."""
        self.tokens += len(ids)
        if len(ids) > self.max_length:
            if self.overlong == "drop":
                self.dropped["overlong"] += 1
                return
            if self.overlong == "split":
                self._keep_all(cut(ids, self.max_length), cut(labels, self.max_length))
                return
            self.truncated += 1
            self.tokens_lost += len(ids) - self.max_length
            ids, labels = ids[: self.max_length], labels[: self.max_length]
        self._keep_all([ids], [labels])

    def add_documents(self, documents: Sequence[tuple[list[int], list[int]]]) -> None:
        """One row of documents (ids, labels), each of which is a sample of its own, truncated alone."""
        lengths = [len(ids) for ids, _ in documents]
        lost = sum(max(0, length - self.max_length) for length in lengths)
        self.tokens += sum(lengths)
        if lost and self.overlong == "drop":
            self.dropped["overlong"] += 1
            return
        self.truncated += lost > 0
        self.tokens_lost += lost
        self._keep_all(
            *([piece[: self.max_length] for piece in pieces] for pieces in zip(*documents, strict=True))
        )

    def add_pieces(self, pieces: list[list[int]], tokens: int, lost: int = 0) -> None:
        """One row that was cut before, all of whose tokens are targets.

        tokens: the row's tokens before; lost: how many of them the pieces do not hold.
        """
        self.tokens += tokens
        self.tokens_lost += lost
        self.truncated += lost > 0
        self._keep_all(pieces, [list(piece) for piece in pieces])

    def _keep_all(self, inputs: list[list[int]], labels: list[list[int]]) -> None:
        kept = [number for number, piece in enumerate(labels) if has_target(piece)]
        if not kept:
            self.dropped["no-targets"] += 1
            return
        self.rows += [self.kept + self.dropped.total()] * len(kept)
        self.kept += 1
        self.split += len(kept) > 1
        self.columns["input_ids"] += [inputs[number] for number in kept]
        self.columns["labels"] += [labels[number] for number in kept]


def has_target(labels: Sequence[int]) -> bool:
    """Whether a label is a target. The first one never is: a causal model shifts labels by one."""
    return len(labels) > 1 and (labels[-1] != IGNORED or any(label != IGNORED for label in labels[1:]))


def cut(tokens: list[int], max_length: int) -> list[list[int]]:
    """Consecutive chunks of at most max_length that together are `tokens`.

    A last chunk of one token has nothing to predict it from, so it takes one from the chunk before.
    """
    ends = list(range(max_length, len(tokens), max_length))
    if ends and len(tokens) - ends[-1] == 1 and max_length > 2:
        ends[-1] -= 1
    return [tokens[start:end] for start, end in itertools.pairwise([0, *ends, len(tokens)])]


def with_eos(tokenizer: Any, ids: list[int]) -> list[int]:
    """`ids` ending in exactly one EOS (unchanged when the tokenizer has none)."""
    eos = tokenizer.eos_token_id
    return ids if eos is None or (ids and ids[-1] == eos) else [*ids, eos]


def refuse_padded_end(tokenizer: Any, row: Row, ids: Sequence[int]) -> None:
    """RecipeError where a row ends with the pad token: a decoder's classifier reads the last other token."""
    if not ids or ids[-1] != tokenizer.pad_token_id:
        return
    token = tokenizer.pad_token
    message = (
        f"the row ends with {token}, which is also the pad token: the model would read the token before it"
    )
    hint = "`model.add_tokens: ['<|pad|>']` gives the tokenizer a pad token of its own"
    raise bad_row(row, message, hint, code="pad-at-end", path="model.add_tokens")


def texts_of(rows: Sequence[Row], name: str) -> list[str]:
    """One field of every row. RecipeError names the row whose field is no text."""
    texts = [row.values[name] for row in rows]
    for row, text in zip(rows, texts, strict=True):
        if not isinstance(text, str):
            raise bad_row(row, f"{name} holds {type(text).__name__}, expected text", code="not-text")
    return texts


def token_ids(tokenizer: Any, texts: list[str], **options: Any) -> list[list[int]]:
    """Ids of all texts; nothing is cut or padded, and no mask is made."""
    if not texts:
        return []
    backend = _plain_backend(tokenizer)
    called = texts if backend is None else texts[:1]
    encoded = tokenizer(
        called, return_attention_mask=False, return_token_type_ids=False, verbose=False, **options
    )
    ids = list(encoded["input_ids"])
    if backend is not None:
        # The call above has set truncation, padding and special tokens; the rest needs no offsets of
        # characters and no BatchEncoding, which take a fifth of the time.
        rest = backend.encode_batch_fast(texts[1:], **options)
        ids += [encoding.ids for encoding in rest]
    return ids


def _plain_backend(tokenizer: Any) -> Any | None:
    """The Rust tokenizer where transformers' call hands texts to it as they are; None for classes that do
    something of their own with them, or have no such tokenizer."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    own = any(
        getattr(kind, name, None) is not getattr(PreTrainedTokenizerFast, name)
        for name in ("__call__", "_encode_plus", "_convert_encoding")
    )
    backend = None if own else tokenizer.backend_tokenizer
    return backend if hasattr(backend, "encode_batch_fast") else None


def encode_rows(encoder: Encoder, rows: Sequence[Row]) -> EncodedBatch:
    """The encoder's batch; an error of a library gets the place of the row that causes it."""
    try:
        return encoder(rows)
    except (EffilaunchError, MemoryError):
        raise
    except Exception:
        for row in rows:
            try:
                encoder([row])
            except EffilaunchError:
                raise
            except Exception as error:
                message = f"the row cannot be encoded: {type(error).__name__}: {error}"
                raise bad_row(row, message, "fix or remove the row", code="row-failed") from error
        raise


@dataclass(slots=True)
class Counts(Tally):
    """Running totals over one split."""

    read: int = 0
    targets: int = 0
    _lengths: array[int] = field(default_factory=lambda: array("i"))
    _image_tokens: array[int] = field(default_factory=lambda: array("i"))
    """Tokens of images in each sample, of a task that has both."""
    _images: array[int] = field(default_factory=lambda: array("i"))
    """Images of each such sample."""
    _pixels: array[int] = field(default_factory=lambda: array("q"))
    """Pixel values of each such sample."""
    _pairs: array[int] = field(default_factory=lambda: array("q"))
    _labels: array[float] = field(default_factory=lambda: array("d"))
    """See `judged` of EncodedBatch."""

    def add(self, batch: EncodedBatch) -> None:
        for name in TOTALS[1:]:
            setattr(self, name, getattr(self, name) + getattr(batch, name))
        self.dropped.update(batch.dropped)
        self.notes.update(batch.notes)
        self.first_rows = {**batch.first_rows, **self.first_rows}
        lengths, targets = _lengths_and_targets(batch.columns)
        self._lengths.extend(lengths)
        spans = _spans(batch.columns)
        self._image_tokens.extend(sum(one[1::2]) - sum(one[::2]) for one in spans)
        self._images.extend(len(one) // 2 for one in spans)
        self._pixels.extend(batch.pixels)
        self._pairs.extend(pair for pair, _ in batch.judged)
        self._labels.extend(label for _, label in batch.judged)
        self.targets += targets

    def since(self, read: int, dropped: Mapping[str, int]) -> dict[str, Any]:
        """Rows read and dropped by reason after so many were: those of one source."""
        own = self.dropped - Counter(dropped)
        return {"rows": self.read - read, "dropped": dict(sorted(own.items()))}

    def to_json(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in (*TOTALS, "targets")}
        notes = self.notes + Counter({"contradicting-labels": _contradictions(self._pairs, self._labels)})
        return named | {"dropped": dict(sorted(self.dropped.items())), "notes": dict(sorted(notes.items()))}

    def lengths(self) -> dict[str, float] | None:
        """Tokens of a sample: mean, median, 95th percentile and maximum; None for data without tokens."""
        return _spread(self._lengths)

    def images_of(self, start: int) -> Sequence[int]:
        """Images of each sample from number `start` on, of a task that has both."""
        return self._images[start:]

    def images(self) -> PreparedImages | None:
        """The images of the samples; None for data without images beside tokens."""
        tokens, images = _spread(self._image_tokens), _spread(self._images)
        if tokens is None or images is None:
            return None
        of_image = [
            -(-pixels // count) for pixels, count in zip(self._pixels, self._images, strict=True) if count
        ]
        largest = heapq.nlargest(LARGEST, self._pixels)
        return PreparedImages(len(self._images), tokens, images, tuple(largest), max(of_image, default=0))


def _contradictions(pairs: array[int], labels: array[float]) -> int:
    """How many of the pairs have more than one label."""
    if not pairs:
        return 0
    import numpy as np

    keys, values = np.frombuffer(pairs, dtype=np.int64), np.frombuffer(labels)
    order = np.lexsort((values, keys))
    keys, values = keys[order], values[order]
    differs = (keys[1:] == keys[:-1]) & (values[1:] != values[:-1])
    return len(np.unique(keys[1:][differs]))


def _spread(numbers: array[int]) -> dict[str, float] | None:
    """Mean, median, 95th percentile and maximum; None of nothing."""
    if not numbers:
        return None
    import numpy as np

    values = np.frombuffer(numbers, dtype=np.int32)
    return {
        "mean": round(float(values.mean()), 2),
        "p50": float(np.percentile(values, 50)),
        "p95": float(np.percentile(values, 95)),
        "max": int(values.max()),
    }


def _spans(columns: Mapping[str, Any]) -> list[list[int]]:
    """Of each sample of a batch, first and last token of its images; none for data without images."""
    spans = columns.get("image_spans", [])
    return spans if isinstance(spans, list) else list(spans.to_pylist())


def _lengths_and_targets(columns: Mapping[str, Any]) -> tuple[array[int], int]:
    """Tokens of each sample of a batch, and how many of its labels are targets; the columns are lists or what
    `arrow_columns` makes of them."""
    ids, labels = columns.get("input_ids", []), columns.get("labels", [])
    if isinstance(ids, list):
        masked = [row for row in labels if isinstance(row, list)]
        return array("i", map(len, ids)), sum(len(row) - row.count(IGNORED) for row in masked)
    import numpy as np

    lengths = array("i", ids.value_lengths().to_numpy().tobytes())
    if not hasattr(labels, "offsets"):  # one class for each sample
        return lengths, 0
    return lengths, int(np.count_nonzero(labels.flatten().to_numpy() != IGNORED))


def lost_rows(dropped: Mapping[str, int]) -> int:
    """Rows that were dropped although nobody asked for it."""
    return sum(rows for reason, rows in dropped.items() if reason not in ASKED_FOR)


def dropped_text(dropped: Mapping[str, int]) -> tuple[str, str]:
    """(reasons with their rows, the most first; what they mean), for message and hint of an error."""
    found = sorted((reason for reason, rows in dropped.items() if rows), key=lambda one: -dropped[one])
    counts = ", ".join(f"{reason}: {dropped[reason]:,}" for reason in found)
    return counts, "; ".join(f"{reason}: {REASONS[reason]}" for reason in found)


def result_rows(train: int, evaluation: int, splits: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`rows` of result.json: samples (or packs) of both splits, and the totals of their counts."""
    reasons: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    for counts in splits:
        reasons.update(counts["dropped"])
        notes.update(counts["notes"])
    return {
        "train": train,
        "eval": evaluation,
        **{name: sum(counts[name] for counts in splits) for name in TOTALS},
        "dropped": sum(reasons.values()),
        "dropped_reasons": dict(reasons),
        "notes": dict(notes),
    }


def decode_pieces(tokenizer: Any, ids: Sequence[int], labels: Sequence[int]) -> list[Piece]:
    """The text of a sample, cut wherever targets and masked tokens meet."""
    pieces = []
    flags = [label != IGNORED for label in labels]
    for is_target, run in itertools.groupby(zip(ids, flags, strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False)
        pieces.append((text, is_target))
    return pieces


def mark_pieces(pieces: Sequence[Piece]) -> str:
    """Pieces as one text, the targets between ⟦ and ⟧, cut to a readable length."""
    text = "".join(f"⟦{piece}⟧" if is_target else piece for piece, is_target in pieces)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " …"


@dataclass(frozen=True, slots=True)
class Data:
    """What a Trainer needs to know of the data."""

    train: Any
    """Dataset of samples or packs; an IterableDataset, sharded by itself, when streaming."""
    eval: Any | None
    collate: Any | None
    """Samples to a batch; None: the Trainer's own (trl's)."""
    labels: tuple[str, ...] | None
    """Names of the classes."""
    counts: dict[str, Any]
    """Rows read, kept, truncated and dropped: `rows` of result.json; without those that are streamed."""
    streaming: bool = False
    samples: Any | None = None
    """The training samples before packing, for the first-batch gate."""
    formats: tuple[str, ...] = ()
    """Of the training sources: what they leave unlearnt."""
    collate_eval: Any | None = None
    """Samples to a batch of an evaluation; None: as in training."""
