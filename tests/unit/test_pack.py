"""Packing of lengths against item-by-item best-fit decreasing, and packs as samples."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

np = pytest.importorskip("numpy")
pytest.importorskip("torch")

from launcher.train.data.batches import PackedRows, pack_lengths  # noqa: E402


def best_fit_decreasing(lengths: list[int], max_length: int) -> Counter[int]:
    """Fills of the packs, one sample after another: quadratic, and plain to see."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [index for index, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=rooms.__getitem__)] -= length
        else:
            rooms.append(max_length - length)
    return Counter(max_length - room for room in rooms)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int]:
    max_length = draw(st.one_of(st.integers(1, 40), st.integers(500, 1600)))
    # Short lengths too: they are what fills one pack many times over.
    length = st.one_of(st.integers(0, max_length), st.integers(0, min(8, max_length)))
    return draw(st.lists(length, max_size=120)), max_length


@settings(max_examples=500, deadline=None)
@given(cases())
@example(([0, 0, 0], 5))
@example(([5, 5, 5], 5))
@example(([1] * 23, 7))
@example(([512, 511, 513, 1023, 1, 1], 1024))
def test_packs_are_those_of_item_by_item_best_fit(case: tuple[list[int], int]) -> None:
    lengths, max_length = case
    packs = pack_lengths(np.array(lengths, dtype=np.int64), max_length)
    fills = [sum(lengths[row] for row in packs[index]) for index in range(len(packs))]
    assert Counter(fills) == best_fit_decreasing(lengths, max_length)
    assert sorted(packs.order.tolist()) == list(range(len(lengths)))
    assert max(fills, default=0) <= max_length


@settings(max_examples=100, deadline=None)
@given(cases())
def test_packs_follow_the_order_of_the_rows(case: tuple[list[int], int]) -> None:
    lengths, max_length = case
    packs = pack_lengths(lengths, max_length)
    members = [packs[index].tolist() for index in range(len(packs))]
    assert all(rows == sorted(rows) for rows in members)
    first = [rows[0] for rows in members]
    assert first == sorted(first)
    again = pack_lengths(lengths, max_length)
    assert (packs.order == again.order).all()
    assert (packs.offsets == again.offsets).all()


@pytest.mark.parametrize("max_length", [1000, 2048, 131072])
def test_many_lengths_fill_packs_nearly_full(max_length: int) -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1, 100_000), 1, max_length).astype(np.int64)
    packs = pack_lengths(lengths, max_length)
    filled = np.add.reduceat(lengths[packs.order], packs.offsets[:-1])
    assert filled.max() <= max_length
    assert np.bincount(packs.order, minlength=lengths.size).tolist() == [1] * lengths.size
    # At 131072 the last pack alone may be a percent of all.
    assert filled.sum() / (len(packs) * max_length) >= (0.995 if max_length < 10_000 else 0.99)


@pytest.mark.parametrize(("lengths", "row"), [([3, 9, 4], 1), ([3, 4, -1], 2)])
def test_a_length_out_of_range_is_named(lengths: list[int], row: int) -> None:
    with pytest.raises(ValueError, match=f"row {row} has {lengths[row]} tokens, expected 0 to 8"):
        pack_lengths(lengths, 8)


def test_a_max_length_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="max_length is 0"):
        pack_lengths([], 0)


def test_no_rows_give_no_packs() -> None:
    packs = pack_lengths([], 8)
    assert len(packs) == 0
    with pytest.raises(IndexError):
        packs[0]


ROWS = {
    "input_ids": [[1, 2, 3], [4], [], [5, 6]],
    "labels": [[1, 2, 3], [4], [], [-100, 6]],
}


def packed_rows(max_length: int) -> PackedRows:
    rows = pytest.importorskip("datasets").Dataset.from_dict(ROWS)
    return PackedRows(rows, pack_lengths([len(ids) for ids in ROWS["input_ids"]], max_length))


def test_documents_of_a_pack_start_anew_and_predict_nothing_across_the_border() -> None:
    samples = packed_rows(6)
    assert len(samples) == 1
    assert samples[0] == {
        "input_ids": [1, 2, 3, 4, 5, 6],
        "labels": [-100, 2, 3, -100, -100, 6],
        "position_ids": [0, 1, 2, 0, 0, 1],
    }


def test_packed_rows_end_and_pickle() -> None:
    samples = pickle.loads(pickle.dumps(packed_rows(3)))
    assert [sample["input_ids"] for sample in samples] == [[1, 2, 3], [4, 5, 6]]
    assert samples[-1] == samples[1]
    with pytest.raises(IndexError):
        samples[2]
