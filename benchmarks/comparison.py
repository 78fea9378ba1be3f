"""Measured beside predicted: errors and their summary, ranges, rank correlation, and missed targets."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

TIERS = {"t0": "closed form (T0)", "t1": "trace (T1)"}


@dataclass(frozen=True, slots=True)
class Compared:
    """One row: bytes, or seconds, measured and predicted."""

    name: str
    half: str
    """Its group: a half of a grid, or where it was measured."""
    measured: float
    t0: float
    low: float
    high: float
    components: Mapping[str, int] = field(default_factory=dict)
    """Of T0."""
    t1: float | None = None

    def error(self, tier: str) -> float | None:
        """predicted / measured - 1"""
        predicted = getattr(self, tier)
        return None if predicted is None else predicted / self.measured - 1

    @property
    def is_in_range(self) -> bool:
        return self.low <= self.measured <= self.high


@dataclass(frozen=True, slots=True)
class Summary:
    """Sizes of errors, as shares of what was measured."""

    count: int
    median: float
    p95: float
    """The nearest rank's."""
    maximum: float
    worst: str
    low_share: float
    """Share of the rows whose prediction is below the measurement."""


@dataclass(frozen=True, slots=True)
class Target:
    """What errors of a group shall keep to: a median, and a largest error or a 95th percentile."""

    median: float
    largest: float
    is_p95: bool = False

    def missed(self, name: str, found: Summary) -> list[str]:
        """A sentence for each of the two that is missed."""
        sentences = []
        if found.median > self.median:
            sentences.append(f"{name}: median {found.median:.1%} > {self.median:.0%}")
        what, size = ("p95", found.p95) if self.is_p95 else ("max", found.maximum)
        if size > self.largest:
            sentences.append(f"{name}: {what} {size:.1%} > {self.largest:.0%} ({found.worst})")
        return sentences


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure beside its target."""

    name: str
    found: float | None
    """None: not measured."""
    limit: float
    note: str
    is_least: bool = True

    @property
    def holds(self) -> bool | None:
        if self.found is None:
            return None
        return self.found >= self.limit if self.is_least else self.found <= self.limit

    @property
    def cells(self) -> tuple[str, str, str, str]:
        found = "open" if self.found is None else f"{self.found:.3f}"
        return self.name, found, f"at {'least' if self.is_least else 'most'} {self.limit}", self.note

    @property
    def missed(self) -> list[str]:
        if self.holds is not False:
            return []
        return [f"{self.name}: {self.found:.3f} {'<' if self.is_least else '>'} {self.limit}"]


def summarise(rows: Sequence[Compared], tier: str = "t0") -> Summary | None:
    """None without a row that this tier predicts."""
    known = [(abs(error), error, one.name) for one in rows if (error := one.error(tier)) is not None]
    if not known:
        return None
    sizes = sorted(size for size, _, _ in known)
    worst = max(known)
    return Summary(
        count=len(known),
        median=statistics.median(sizes),
        p95=sizes[math.ceil(0.95 * len(sizes)) - 1],
        maximum=worst[0],
        worst=worst[2],
        low_share=sum(error < 0 for _, error, _ in known) / len(known),
    )


def coverage(rows: Sequence[Compared]) -> float:
    """Share of the rows measured within `low` to `high`."""
    return sum(one.is_in_range for one in rows) / len(rows)


def ranks(values: Sequence[float]) -> list[float]:
    """1 for the smallest; equal values share the mean of their ranks."""
    ordered = sorted(values)
    return [(2 * ordered.index(v) + ordered.count(v) + 1) / 2 for v in values]


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Rank correlation of two equally long sequences; ValueError for fewer than three."""
    if len(one) != len(other) or len(one) < 3:
        raise ValueError(f"{len(one)} and {len(other)} values have no rank correlation")
    a, b = ranks(one), ranks(other)
    middle = (len(a) + 1) / 2
    both = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    spread = math.sqrt(sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b))
    return both / spread


def exit_status(missed: Sequence[str], check: bool) -> int:
    """Prints the sentences; 1 with --check where there is one."""
    for sentence in missed:
        print(f"missed: {sentence}", file=sys.stderr)
    return 1 if check and missed else 0
