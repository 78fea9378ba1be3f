"""Parts of results of sentence-transformers, and scores of rankings."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("sentence_transformers")

from launcher.train.model.sentence import _MODES, _pooling_of
from launcher.train.tasks.reranker import ranked_scores


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_old_files_of_the_pooling_mean_what_the_library_reads_in_them():
    from sentence_transformers.sentence_transformer.modules import Pooling

    for name, mode in _MODES.items():
        old = {"pooling_mode_mean_tokens": False, name: True}
        assert _pooling_of(old)["pooling_mode"] == mode
        assert Pooling(4, **old).pooling_mode == Pooling(4, pooling_mode=mode).pooling_mode


def test_scores_that_are_nan_rank_nothing():
    predicted, labels = np.full((2, 2), np.nan), np.array([[1.0, 0.0], [0.0, 1.0]])
    predicted[1] = [0.1, 0.9]
    found = ranked_scores(("mrr@10",), predicted, labels, np.array([1, 2]))
    assert found == {"mrr@10": 1.0}
