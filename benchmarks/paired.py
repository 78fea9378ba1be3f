"""Statistics of interleaved runs: what one side takes beside another, with how sure that is."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

DRAWS = 4_000


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast, with its 95 % interval."""

    value: float
    low: float
    high: float


def typical(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of each step: its median over the rounds, which one slow moment of the machine does not move.

    ValueError when there is no round, or their steps differ in number.
    """
    if not rounds:
        raise ValueError("no round that was finished")
    return [statistics.median(step) for step in zip(*rounds, strict=True)]


def ratio_of(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], seed: int = 0) -> Ratio:
    """Speed of `ours` over that of `theirs`: seconds of the same steps, round by round.

    The value compares the times of all steps as they are typical; steps differ in their work, so a long
    one counts for more. The interval is the bootstrap's over rounds, each with both sides. ValueError when
    the rounds, or the steps of a round, do not pair.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} and {len(theirs)} rounds do not pair")
    if [len(one) for one in ours] != [len(one) for one in theirs]:
        raise ValueError("the steps of a round do not pair")
    value = sum(typical(theirs)) / sum(typical(ours))
    draw, found = random.Random(seed), []
    for _ in range(DRAWS):
        drawn = draw.choices(range(len(ours)), k=len(ours))
        found.append(sum(typical([theirs[n] for n in drawn])) / sum(typical([ours[n] for n in drawn])))
    found.sort()
    return Ratio(value, found[round(0.025 * (DRAWS - 1))], found[round(0.975 * (DRAWS - 1))])
