"""Statistics of interleaved runs: what one side takes beside another, with how sure that is."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

DRAWS = 10_000


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast, with its 95 % interval."""

    value: float
    low: float
    high: float


def ratio_of(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], seed: int = 0) -> Ratio:
    """Speed of `ours` over that of `theirs`: seconds of the same steps, round by round.

    A round's ratio is the median over its steps, which one slow moment of the machine does not move; the
    value is the geometric mean of the rounds. The interval is the bootstrap's, over rounds and the steps
    of each. ValueError when the rounds, or the steps of a round, do not pair.
    """
    logs = [
        [math.log(slow / fast) for fast, slow in zip(mine, other, strict=True)]
        for mine, other in zip(ours, theirs, strict=True)
    ]
    if not logs:
        raise ValueError("no round that both sides finished")
    draw = random.Random(seed)

    def resampled() -> float:
        rounds = draw.choices(logs, k=len(logs))
        return statistics.fmean(statistics.median(draw.choices(steps, k=len(steps))) for steps in rounds)

    means = sorted(resampled() for _ in range(DRAWS))
    low, high = means[round(0.025 * (DRAWS - 1))], means[round(0.975 * (DRAWS - 1))]
    return Ratio(math.exp(statistics.fmean(map(statistics.median, logs))), math.exp(low), math.exp(high))
