"""Batches without a text twice: what each rank gets where texts are repeated."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers.base.sampler import NoDuplicatesBatchSampler

from launcher.errors import RecipeError
from launcher.train.contrast import RankBatches, TextRows


class Samples(list):
    column_names = ("input_ids", "lengths", "score")


def shares(texts, ranks, size=8, *, drop_last=False, epoch=0):
    """The batches of each rank. texts: two numbers a row, each a text of one token."""
    samples = Samples({"input_ids": list(pair), "lengths": [1, 1], "score": 1.0} for pair in texts)
    found = []
    for rank in range(ranks):
        rows = TextRows(samples, ("sentence1", "sentence2"), scored=False)
        inner = NoDuplicatesBatchSampler(
            rows, batch_size=size, drop_last=drop_last, generator=torch.Generator(), seed=1
        )
        batches = RankBatches(inner, ranks, rank)
        batches.set_epoch(epoch)
        found.append(list(batches))
        assert len(found[-1]) == len(batches)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_rank_has_as_many_batches_of_equal_sizes(ranks, drop_last):
    for kinds in (9, 12) if drop_last else (1, 2, 9):
        texts = [(100 + number, min(number, kinds - 1)) for number in range(40)]
        found = shares(texts, ranks, drop_last=drop_last)
        steps = 5 // ranks if drop_last else -(-5 // ranks)
        assert {len(batches) for batches in found} <= {steps}
        for step in zip(*found, strict=True):
            assert len({len(batch) for batch in step}) == 1
            for batch in step:
                ends = [texts[row][1] for row in batch]
                assert len(set(ends)) == len(ends)


def test_rows_without_repeated_texts_are_all_read_once_and_anew_in_each_epoch(capsys):
    texts = [(number, 100 + number) for number in range(32)]
    first, second = (shares(texts, 2, epoch=epoch) for epoch in (0, 1))
    for found in (first, second):
        assert sorted(row for batches in found for batch in batches for row in batch) == list(range(32))
    assert first != second
    assert "WARNING" not in capsys.readouterr().out


def test_rows_that_no_step_has_are_counted(capsys):
    ((*batches,),) = shares([(100 + number, 0) for number in range(16)], 1)
    assert [len(batch) for batch in batches] == [1, 1]
    assert "epoch 1: 14 of 16 rows are not trained" in capsys.readouterr().out


def test_a_last_batch_of_one_row_is_counted_too(capsys):
    ((*batches,),) = shares([(number, 100 + number) for number in range(17)], 1)
    assert [len(batch) for batch in batches] == [8, 8, 1]
    said = capsys.readouterr().out
    assert "0 of 17 rows are not trained" in said
    assert "1 of 3 micro-batches" in said
    shares([(number, 100 + number) for number in range(4)], 1, size=1)
    assert "WARNING" not in capsys.readouterr().out


def test_a_run_without_a_single_whole_batch_is_refused():
    with pytest.raises(RecipeError) as failed:
        shares([(100 + number, 0) for number in range(16)], 1, drop_last=True)
    assert [problem.code for problem in failed.value.problems] == ["no-negatives"]
