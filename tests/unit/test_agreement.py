"""The steps at which ranks agree: a model of ranks whose clocks run differently, without torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise

import pytest

from launcher.files.rank_status import AGREE_S
from launcher.train.agreement import MOST, Agreement


@dataclass
class Ranks:
    """Ranks that end each step together, each with a clock of its own: rates, offsets, and jumps ahead."""

    rates: list[float]
    offsets: list[float]
    jump: Callable[[], float] = lambda: 0.0
    now: float = 0.0
    agreed: list[int] = field(default_factory=list)
    """Calls at which the ranks agreed."""
    calls: int = 0

    def __post_init__(self) -> None:
        self.jumped = [0.0] * len(self.rates)
        self.ranks = [Agreement(lambda rank=rank: self.clock(rank)) for rank in range(len(self.rates))]

    def clock(self, rank: int) -> float:
        self.jumped[rank] += self.jump()
        return self.offsets[rank] + self.rates[rank] * self.now + self.jumped[rank]

    def end(self, kind: str, seconds: float) -> bool:
        """What took `seconds` ends on all ranks; whether they agree. One alone would wait for ever."""
        self.now += seconds
        self.calls += 1
        due = {rank.is_due(kind) for rank in self.ranks}
        assert len(due) == 1, f"some ranks wait for the others at call {self.calls}"
        if due == {False}:
            return False
        slowest = max(rank.slowest for rank in self.ranks)
        for rank in self.ranks:
            rank.fix_next(slowest)
        self.agreed.append(self.calls)
        return True


def exact(count: int = 2) -> Ranks:
    return Ranks([1.0] * count, [0.0] * count)


def events(draw: random.Random) -> Iterator[tuple[str, float]]:
    """A run: steps whose duration changes, evaluations and saves between them."""
    scale = draw.choice([0.001, 0.05, 0.4, 3.0, 20.0])
    every, batches = draw.randint(1, 40), draw.randint(1, 60)
    saves = draw.randint(1, 40)
    for step in range(1, 1000):
        if draw.random() < 0.02:
            scale = draw.choice([0.001, 0.05, 0.4, 3.0, 20.0])
        yield "step", scale * draw.uniform(0.5, 2.0)
        if step % every == 0:
            yield from (("batch", scale / 3) for _ in range(batches))
        if step % saves == 0:
            yield "save", draw.uniform(0.0, 60.0)


@pytest.mark.parametrize("seed", range(40))
def test_all_ranks_agree_at_the_same_steps_whatever_their_clocks(seed):
    draw = random.Random(seed)
    count = draw.choice([2, 3, 8])
    ranks = Ranks(
        [draw.choice([0.0, 0.01, 0.5, 1.0, 1.001, 7.0, 1000.0]) for _ in range(count)],
        [draw.uniform(-1e9, 1e9) for _ in range(count)],
        lambda: draw.choice([0.0] * 50 + [3600.0]),
    )
    for kind, seconds in islice(events(draw), 600):
        ranks.end(kind, seconds)
    assert ranks.agreed


@pytest.mark.parametrize("seed", range(20))
def test_a_request_waits_for_two_seconds_or_one_step(seed):
    """With clocks that run right, while steps take a similar time; of the slowest rank on any."""
    draw = random.Random(seed)
    scale = draw.choice([0.001, 0.03, 0.2, 1.5, 2.5, 30.0])
    ranks, waited, longest = exact(3), 0.0, 0.0
    for _ in range(400):
        seconds = scale * draw.uniform(0.9, 1.1)
        longest = max(longest, seconds)
        waited += seconds
        if ranks.end("step", seconds):
            assert waited <= max(1.25 * AGREE_S, longest)
            waited = 0.0


def test_steps_that_take_longer_agree_each_time():
    ranks = exact()
    assert all(ranks.end("step", 2.5) for _ in range(20))


def test_quick_steps_agree_seldom():
    """A hundred steps of 0.125 s: twice as many between two each time, then 16."""
    ranks = exact()
    for _ in range(100):
        ranks.end("step", 0.125)
    assert ranks.agreed == [1, 2, 4, 8, 16, 32, 48, 64, 80, 96]
    few = exact()
    for _ in range(1000):
        few.end("step", 0.0001)
    assert few.agreed[-1] - few.agreed[-2] == MOST


def test_the_slowest_rank_decides_and_a_slow_step_is_not_forgotten_at_once():
    ranks = Ranks([1.0, 12.0], [0.0, 5.0])
    for _ in range(60):
        ranks.end("step", 0.125)
    assert ranks.agreed == list(range(1, 61)), "one takes 1.5 s by its clock"
    calm = exact()
    for _ in range(100):
        calm.end("step", 0.1)
    before = len(calm.agreed)
    calm.end("step", 40.0)
    for _ in range(30):
        calm.end("step", 0.1)
    after = calm.agreed[before:]
    assert [b - a for a, b in pairwise(after)][:3] == [1, 2, 4]


def test_the_first_step_the_first_batch_and_every_save_agree_and_count_for_no_step():
    ranks = exact()
    assert ranks.end("step", 300.0), "the first step, which builds kernels"
    for _ in range(100):
        ranks.end("step", 0.1)
    assert ranks.end("batch", 600.0), "an evaluation begins"
    assert ranks.end("batch", 0.1)
    for _ in range(50):
        ranks.end("batch", 0.1)
    assert ranks.end("step", 900.0)
    assert ranks.end("step", 0.1)
    assert not ranks.end("step", 0.1), "the evaluation was no slow step"
    assert ranks.end("save", 500.0)
    assert ranks.end("step", 0.1)
    assert ranks.end("step", 0.1)
    assert not ranks.end("step", 0.1)
