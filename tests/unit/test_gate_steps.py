"""A run in which every batch would be dropped is refused before the model is loaded."""

from __future__ import annotations

import pytest

from launcher.errors import RecipeError
from launcher.train.data.build import Data
from launcher.train.data.gate import check_steps


def rows(count, *, streaming=False):
    return Data(train=[{}] * count, eval=None, collate=None, labels=None, counts={}, streaming=streaming)


def test_fewer_samples_than_one_batch_for_each_process_are_refused():
    with pytest.raises(RecipeError) as caught:
        check_steps(rows(15), 4, 4, drop_last=True)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("no-steps", "trainer.dataloader_drop_last")
    assert "15 samples are fewer than 4 batches of 4" in problem.message


@pytest.mark.parametrize(
    ("given", "drop_last"), [(rows(16), True), (rows(1), False), (rows(1, streaming=True), True)]
)
def test_what_still_has_a_step_goes_on(given, drop_last):
    check_steps(given, 4, 4, drop_last=drop_last)
