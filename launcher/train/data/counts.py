"""What became of the rows: nothing is dropped or cut in silence."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.train.data.encoded import IGNORED, EncodedBatch

TOTALS = ("read", "kept", "truncated", "split", "tokens", "tokens_lost")
"""Numbers that result.json holds of the rows."""
REASONS = ("no-targets", "masked", "overlong", "empty", "format_row")
"""Why a row is left out; masked: it masks every turn that would be learned."""
NOTES = (
    "turn-masked",
    "inserted-text-masked",
    "reasoning-left-out",
    "field-not-rendered",
    "word-without-token",
)
"""What is counted of rows that are kept. Of conversations: turns that the row masks; turns with text of the
template that is not learned; turns whose reasoning the template leaves out; fields of messages that it does
not render, each as `field-not-rendered: NAME`. Of labelled words: those that the tokenizer removes."""
ASKED_FOR = ("masked", "overlong", "format_row")
"""Of these, what leaves rows out because the row, the recipe or its hook says so: `data.overlong: drop` those
that are too long, and format_row those for which it returns None."""


class Counts:
    """Running totals over one split."""

    def __init__(self) -> None:
        self.read = self.kept = self.truncated = self.split = 0
        self.tokens = self.tokens_lost = self.targets = 0
        self.dropped: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self._lengths = array("i")

    def add(self, batch: EncodedBatch) -> None:
        self.kept += batch.kept
        self.truncated += batch.truncated
        self.split += batch.split
        self.tokens += batch.tokens
        self.tokens_lost += batch.tokens_lost
        self.dropped.update(batch.dropped)
        self.notes.update(batch.notes)
        lengths, targets = lengths_and_targets(batch.columns)
        self._lengths.extend(lengths)
        self.targets += targets

    def drop(self, reason: str, rows: int) -> None:
        self.dropped[reason] += rows

    def since(self, read: int, dropped: Mapping[str, int]) -> dict[str, Any]:
        """Rows read and dropped by reason after so many were: those of one source."""
        own = self.dropped - Counter(dropped)
        return {"rows": self.read - read, "dropped": dict(sorted(own.items()))}

    def to_json(self) -> dict[str, Any]:
        """Rows read, kept, truncated, split and dropped by reason; tokens before and lost to truncation."""
        return {
            "read": self.read,
            "kept": self.kept,
            "truncated": self.truncated,
            "split": self.split,
            "dropped": dict(sorted(self.dropped.items())),
            "notes": dict(sorted(self.notes.items())),
            "tokens": self.tokens,
            "tokens_lost": self.tokens_lost,
            "targets": self.targets,
        }

    def lengths(self) -> dict[str, float] | None:
        """Tokens of a sample: mean, median, 95th percentile and maximum; None for data without tokens."""
        if not self._lengths:
            return None
        import numpy as np

        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        return {
            "mean": round(float(lengths.mean()), 2),
            "p50": float(np.percentile(lengths, 50)),
            "p95": float(np.percentile(lengths, 95)),
            "max": int(lengths.max()),
        }


def lengths_and_targets(columns: Mapping[str, Any]) -> tuple[array[int], int]:
    """Tokens of each sample of a batch, and how many of its labels are learnt; its columns are lists or
    what `arrow_columns` makes of them."""
    ids, labels = columns.get("input_ids", []), columns.get("labels", [])
    if isinstance(ids, list):
        learnt = [row for row in labels if isinstance(row, list)]
        return array("i", map(len, ids)), sum(len(row) - row.count(IGNORED) for row in learnt)
    import numpy as np

    lengths = array("i", ids.value_lengths().to_numpy().tobytes())
    if not hasattr(labels, "offsets"):  # one class for each sample
        return lengths, 0
    return lengths, int(np.count_nonzero(labels.flatten().to_numpy() != IGNORED))


def lost_rows(dropped: Mapping[str, int]) -> int:
    """Rows that were dropped although nobody asked for it."""
    return sum(rows for reason, rows in dropped.items() if reason not in ASKED_FOR)


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
