"""Which layers of a sequence of kinds a shallow model has."""

from __future__ import annotations

import pytest

from launcher.train.trace.repeats import ALIKE, Repeats, find_repeats

DENSE_FIRST = [0, 0, 0, *[1] * 20]
EVERY_FOURTH = [0, 0, 0, 1] * 12
GRANITE = [int(i in (5, 15, 25, 35)) for i in range(40)]


@pytest.mark.parametrize(
    ("kinds", "repeats"),
    [
        ([0] * 12, ALIKE),
        ([0], ALIKE),
        (DENSE_FIRST, Repeats(4, 1, 1)),
        (EVERY_FOURTH, Repeats(6, 4, 2)),
        (GRANITE, Repeats(15, 10, 5)),
        ([0, 1], Repeats(2, 1, 0)),
        ([0, 1, 0, 0, 1, 1, 0, 1, 0, 0], Repeats(3, 4, 3)),
        ([0, 1, 0, 1, 1, 0, 1], Repeats(7, 1, 0)),
    ],
)
def test_layers_before_and_after_whole_periods(kinds: list[int], repeats: Repeats) -> None:
    assert find_repeats(kinds) == repeats


@pytest.mark.parametrize("kinds", [[0] * 9, DENSE_FIRST, EVERY_FOURTH, GRANITE, [0, 1, 0, 0, 1]])
def test_the_whole_depth_is_all_layers_and_less_has_every_kind_at_both_ends(kinds: list[int]) -> None:
    repeats, count = find_repeats(kinds), len(kinds)
    depth = repeats.depth(count)
    assert repeats.chosen(count, depth) == list(range(count))
    least = repeats.chosen(count, 2)
    for kind in set(kinds):
        every = [i for i, one in enumerate(kinds) if one == kind]
        assert every[0] in least
        assert every[-1] in least
    for fewer in range(2, depth):
        added = repeats.chosen(count, fewer + 1)
        assert len(added) - len(repeats.chosen(count, fewer)) == repeats.period


def test_a_period_is_one_place() -> None:
    repeats = find_repeats(EVERY_FOURTH)
    places = [repeats.place(i, 16) for i in range(16)]
    assert [place for place, _, _ in places[:6]] == [f"first{i}" for i in range(6)]
    assert places[6:10] == [
        ("middle", True, False), ("middle", False, False), ("middle", False, False), ("middle", False, True),
    ]  # fmt: skip
    assert [place for place, _, _ in places[14:]] == ["last1", "last0"]
