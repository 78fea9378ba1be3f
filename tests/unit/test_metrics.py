"""Named metrics: their values on cases counted by hand, their packages, and what clashes."""

from __future__ import annotations

import importlib
import math
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("numpy")

import numpy as np

from launcher.errors import MachineError, RecipeError
from launcher.recipe.field_tables import METRICS
from launcher.tasks import task_named
from launcher.train.job import Job
from launcher.train.metrics import (
    argmax_tokens,
    asked_metrics,
    check_metrics,
    class_scores,
    make_scores,
    text_scores,
    token_accuracy,
)
from launcher.train.tasks import train_task
from launcher.train.tasks.task import Evaluated

LABELS = ("O", "B-A", "I-A", "B-B", "I-B")


def scores_of(task, processing=None):
    return lambda names, *found: train_task(task).scores(Evaluated(names, *found, processing, LABELS))


CLASSES = scores_of("sequence-classification")


def job(tmp_path, task: str, names: list[str]) -> Job:
    settings = {"task": task, "data.metrics": names}
    return Job(tmp_path, {"settings": {key: {"value": value} for key, value in settings.items()}})


def prediction(predictions, labels):
    return SimpleNamespace(predictions=np.array(predictions), label_ids=np.array(labels))


def one_hot(classes: list[int], count: int):
    return np.eye(count)[classes]


def test_token_accuracy_looks_one_token_ahead_and_at_learnt_tokens_only():
    labels = np.array([[-100, -100, 7, 8, 2], [5, 6, -100, -100, -100]])
    guesses = np.array([[0, 7, 9, 2, 1], [6, 6, 6, 6, 6]])
    # 7 right, 8 wrong, 2 right; in the second row the first label is nobody's target, 6 right.
    assert token_accuracy(guesses, labels) == pytest.approx(3 / 4)
    assert token_accuracy(guesses, np.full_like(labels, -100)) == 0.0


def test_class_scores_are_macro_averages():
    wanted = np.array([0, 0, 0, 1, 2])
    found = class_scores(
        ["accuracy", "f1", "precision", "recall", "matthews_correlation"],
        one_hot([0, 0, 1, 1, 0], 3),
        wanted,
    )
    assert found["accuracy"] == pytest.approx(3 / 5)
    assert found["precision"] == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)
    assert found["recall"] == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert found["f1"] == pytest.approx((2 / 3 + 2 / 3 + 0) / 3)
    assert found["matthews_correlation"] == pytest.approx((3 * 5 - 11) / math.sqrt((25 - 13) * (25 - 11)))


def test_text_scores():
    written = ["the cat sat on the mat ", "a dog"]
    wanted = ["the cat sat on the mat", "a small dog"]
    names = ["exact_match", "bleu", "chrf", "rouge1", "rouge2", "rougeL"]
    found = text_scores(names, written, wanted)
    assert sorted(found) == sorted(names)
    assert found["exact_match"] == 0.5
    # Second text: 2 of 2 words written are wanted, 2 of 3 wanted are written; no pair of words agrees.
    assert found["rouge1"] == pytest.approx((1 + 0.8) / 2)
    assert found["rougeL"] == pytest.approx((1 + 0.8) / 2)
    assert found["rouge2"] == pytest.approx(0.5)
    # 8 of 8 words, 5 of 6 pairs, all triples and fours; 8 words written for 9 wanted.
    assert found["bleu"] == pytest.approx(100 * math.exp(1 - 9 / 8) * (5 / 6) ** 0.25)
    assert text_scores(["bleu", "chrf"], wanted, wanted) == pytest.approx({"bleu": 100.0, "chrf": 100.0})
    assert 0 < found["chrf"] < 100


# What embeddings and rerankers can compute depends on their rows: tests/contract/test_embedding.py.
@pytest.mark.parametrize("task", [name for name in METRICS if name not in ("embedding", "reranker")])
def test_every_name_of_the_vocabulary_is_computed(tmp_path, task):
    if task == "sequence-classification":  # by data.problem_type: tests/unit/test_targets.py
        names = list(task_named(task).problem_metrics["single_label_classification"])
    else:
        names = [name for name in METRICS[task] if name != "perplexity"]
    check_metrics(job(tmp_path, task, list(METRICS[task])))
    work = job(tmp_path, task, names)
    words = SimpleNamespace(pad_token_id=0, batch_decode=lambda ids, **_: ["w " * int(r.sum()) for r in ids])
    scores = make_scores(work, scores_of(task, words), None)
    if not names:
        assert scores is None
        return
    if task in ("sequence-classification", "image-classification"):
        found = scores(prediction(one_hot([0, 1], 2), [0, 1]))
    else:
        found = scores(prediction([[3, 2, 0], [1, 2, 4]], [[3, 2, -100], [1, 2, 4]]))
    assert sorted(found) == sorted(names)
    assert all(isinstance(value, float) for value in found.values())


def test_a_name_of_another_task_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"causal-lm has no metric 'bleu'; it has perplexity, accuracy"):
        asked_metrics(job(tmp_path, "causal-lm", ["bleu"]))


def test_missing_packages_are_named_once_each_before_the_run(tmp_path, monkeypatch):
    for module in ("sacrebleu", "rouge_score"):
        monkeypatch.setitem(sys.modules, module, None)  # as Python itself marks what cannot be imported
    work = job(tmp_path, "seq2seq-lm", ["bleu", "chrf", "rouge1", "exact_match"])
    with pytest.raises(MachineError) as caught:
        check_metrics(work)
    assert [problem.message.partition(",")[0] for problem in caught.value.problems] == [
        "the metric bleu needs sacrebleu",
        "the metric rouge1 needs rouge-score",
    ]
    assert {problem.hint for problem in caught.value.problems} == {"pip install 'effilaunch[metrics]'"}
    check_metrics(job(tmp_path, "seq2seq-lm", ["exact_match", "perplexity"]))
    monkeypatch.undo()
    assert importlib.import_module("sacrebleu")


def test_own_metrics_stand_beside_the_named_ones(tmp_path):
    work = job(tmp_path, "sequence-classification", ["accuracy"])
    given = prediction(one_hot([0, 1], 2), [0, 0])
    found = make_scores(work, CLASSES, lambda p: {"eval_rows": len(p.label_ids), "half": np.float32(0.5)})(
        given
    )
    assert found == {"accuracy": 0.5, "rows": 2.0, "half": 0.5}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"accuracy": 1.0}, "'accuracy', which is measured already"),
        ({"eval_accuracy": 1.0}, "'eval_accuracy', which is measured already"),
        ({"loss": 1.0}, "'loss', which is measured already"),
        ({"perplexity": 1.0}, "'perplexity', which is measured already"),
        ({"words": "many"}, "str for 'words', expected a number"),
        ([1.0], "compute_metrics returned list, expected a dict of numbers"),
        (None, "compute_metrics returned NoneType"),
    ],
)
def test_own_metrics_that_cannot_stand_are_refused(tmp_path, returned, message):
    work = job(tmp_path, "sequence-classification", ["accuracy"])
    scores = make_scores(work, CLASSES, lambda _: returned)
    with pytest.raises(RecipeError, match=message):
        scores(prediction(one_hot([0], 2), [0]))


def test_logits_are_found_among_other_outputs():
    torch = pytest.importorskip("torch")
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 0, 2]]), 4).float()
    expected = [[1, 0, 2]]
    assert argmax_tokens(logits, None).tolist() == expected
    assert argmax_tokens((torch.tensor(0.5), logits), None).tolist() == expected
    assert argmax_tokens((logits, torch.zeros(1, 3, 8)), None).tolist() == expected
