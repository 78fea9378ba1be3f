"""Labels of texts as classes, scores or several labels: names, targets, and rows that are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from every import every
from factories import plan

from launcher.errors import RecipeError
from launcher.rows.sources import Row
from launcher.rows.targets import PROBLEM_TYPES
from launcher.tasks.sequence_classification import MULTI, REGRESSION, SINGLE
from launcher.train.metrics import label_scores, regression_scores

pytest.importorskip("numpy")


def rows(*labels) -> list[Row]:
    return [Row({"text": "a", "label": label}, "x.jsonl", number) for number, label in enumerate(labels, 1)]


def read(kind: str, *labels):
    """(Names, targets) of rows with these labels."""
    found = rows(*labels)
    names = PROBLEM_TYPES[kind].names(iter(found))
    return names, [PROBLEM_TYPES[kind].target(names, row) for row in found]


@pytest.mark.parametrize(
    ("kind", "labels", "names", "targets"),
    [
        (SINGLE, ["b", "a", "b"], ("a", "b"), [1, 0, 1]),
        (SINGLE, [1, 5, 3], ("1", "3", "5"), [0, 2, 1]),
        (SINGLE, ["[other]", "[", "a"], ("[", "[other]", "a"), [1, 0, 2]),
        (REGRESSION, [1, 2.5, "3e1", "-1"], ("LABEL_0",), [1.0, 2.5, 30.0, -1.0]),
        (REGRESSION, [[1], [2]], ("LABEL_0",), [1.0, 2.0]),
        (REGRESSION, [[1, 0.5], ["2", 1], "[3, 2]"], ("LABEL_0", "LABEL_1"),
         [[1.0, 0.5], [2.0, 1.0], [3.0, 2.0]]),
        (MULTI, [["b", "a"], [], ["c"]], ("a", "b", "c"),
         [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]]),
        (MULTI, ['["b"]', ["a"]], ("a", "b"), [[0.0, 1.0], [1.0, 0.0]]),
        (MULTI, [[0, 1, 1], [1, 0, 0]], ("LABEL_0", "LABEL_1", "LABEL_2"),
         [[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]),
        (MULTI, [[True, False], [1.0, 0.0]], ("LABEL_0", "LABEL_1"), [[1.0, 0.0], [1.0, 0.0]]),
        (MULTI, [[0, 1], [1], [10]], ("0", "1", "10"), [[1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]),
    ],
)  # fmt: skip
def test_labels_become_targets(kind, labels, names, targets):
    found = read(kind, *labels)
    assert found == (names, targets)
    assert [list(map(type, one)) if isinstance(one, list) else type(one) for one in found[1]] == [
        list(map(type, one)) if isinstance(one, list) else type(one) for one in targets
    ]


@every(
    ("kind", "labels", "code", "line"),
    [
        (SINGLE, ["a", 0.5], "bad-row", 2),
        (SINGLE, ["a", ["b"]], "bad-row", 2),
        (SINGLE, ["a", '["x", "y"]'], "bad-row", 2),
        (SINGLE, ["a", " ['x']", "[b]"], "bad-row", 2),
        (SINGLE, ["[1, 0]", "a"], "bad-row", 1),
        (SINGLE, ["a", "a"], "labels", None),
        (SINGLE, ["0.5", "1"], "labels", None),
        (REGRESSION, [1, "good"], "bad-row", 2),
        (REGRESSION, [1, math.nan], "bad-row", 2),
        (REGRESSION, [1, "inf"], "bad-row", 2),
        (REGRESSION, [1, True], "bad-row", 2),
        (REGRESSION, [1, 10**400], "bad-row", 2),
        (REGRESSION, [1, []], "bad-row", 2),
        (REGRESSION, [[1, 2], [1]], "bad-row", 2),
        (REGRESSION, [[1, [2]]], "bad-row", 1),
        (REGRESSION, [2, 2.0, "2"], "labels", None),
        (REGRESSION, [[1, 7], [2, 7]], "labels", None),
        (MULTI, [["a"], "b"], "bad-row", 2),
        (MULTI, [["a"], 1], "bad-row", 2),
        (MULTI, [["a"], ["b", 0.5]], "bad-row", 2),
        (MULTI, [["a"], ["b", None]], "bad-row", 2),
        (MULTI, [["a"], ["b", ""]], "bad-row", 2),
        (MULTI, [["a"], ["b", "b"]], "bad-row", 2),
        (MULTI, [["a"], "[1, "], "bad-row", 2),
        (MULTI, [[1, 0, 0], [0, 1]], "bad-row", 1),
        (MULTI, [[0, 1], [0, 1, 1], ["a"]], "bad-row", 2),
        (MULTI, [["a"], []], "labels", None),
        (MULTI, [[], []], "labels", None),
    ],
)
def test_labels_that_cannot_be_learned_from(kind, labels, code, line):
    with pytest.raises(RecipeError) as caught:
        read(kind, *labels)
    (problem,) = caught.value.problems
    assert (problem.code, problem.file, problem.line) == (code, "x.jsonl", line)


@pytest.mark.parametrize(
    ("kind", "names", "label"),
    [
        (SINGLE, ("a", "b"), "c"),
        (SINGLE, ("a", "b"), ["a"]),
        (REGRESSION, ("LABEL_0", "LABEL_1"), 3.0),
        (MULTI, ("a", "b"), ["a", "c"]),
        (MULTI, ("LABEL_0", "LABEL_1"), [1, 0, 1]),
        (MULTI, ("0", "1"), [1, 0, 1]),
    ],
)
def test_labels_that_only_the_evaluation_has(kind, names, label):
    with pytest.raises(RecipeError) as caught:
        PROBLEM_TYPES[kind].target(names, rows(label)[0])
    assert [(p.code, p.line) for p in caught.value.problems] == [("bad-row", 1)]


def test_scores_of_regression_are_those_of_the_libraries():
    stats, metrics = pytest.importorskip("scipy.stats"), pytest.importorskip("sklearn.metrics")
    draw = np.random.default_rng(0)
    wanted, guesses = draw.normal(size=(50, 2)), draw.normal(size=(50, 2))
    wanted[:10] = wanted[0]  # ties
    names = ("mse", "rmse", "mae", "r2", "pearson", "spearman")
    found = regression_scores(names, guesses.astype(np.float32), wanted.astype(np.float32))
    assert found == pytest.approx(
        {
            "mse": metrics.mean_squared_error(wanted, guesses),
            "rmse": metrics.root_mean_squared_error(wanted, guesses),
            "mae": metrics.mean_absolute_error(wanted, guesses),
            "r2": metrics.r2_score(wanted, guesses),
            "pearson": np.mean([stats.pearsonr(guesses[:, n], wanted[:, n])[0] for n in range(2)]),
            "spearman": np.mean([stats.spearmanr(guesses[:, n], wanted[:, n])[0] for n in range(2)]),
        },
        rel=1e-5,
    )
    one = regression_scores(names, guesses[:, :1], wanted[:, 0])
    assert one["mse"] == pytest.approx(metrics.mean_squared_error(wanted[:, 0], guesses[:, 0]))
    constant = regression_scores(("r2", "pearson", "mae"), np.ones((3, 1)), np.zeros(3))
    assert math.isnan(constant["r2"])
    assert math.isnan(constant["pearson"])
    assert constant["mae"] == 1.0


@pytest.mark.parametrize("more", ["", "early_stopping: {patience: 2}"])
@pytest.mark.parametrize(("metric", "greater"), [("mse", False), ("eval_mae", False), ("pearson", True)])
def test_the_best_checkpoint_is_that_of_the_smallest_error(tmp_path, metric, greater, more):
    text = f"""\
        task: sequence-classification
        model: {{name_or_path: google-bert/bert-large-uncased}}
        data:
          train: [{{path: a.jsonl}}]
          eval: {{split: 0.1}}
          problem_type: regression
          metrics: [mse, mae, pearson]
        trainer:
          max_steps: 4
          save_strategy: epoch
          load_best_model_at_end: true
          metric_for_best_model: {metric}
        {more}
        """
    made = plan(tmp_path, "1xA100-80GB", text)
    assert made.at("data.problem_type") == REGRESSION
    # Without the setting, the Trainer takes the largest value of all but losses.
    known = "trainer.greater_is_better" in made.provenance
    assert (made.at("trainer.greater_is_better") if known else True) is greater


def test_scores_of_several_labels():
    pytest.importorskip("sklearn")
    wanted = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0]], dtype=np.float32)
    logits = np.array([[0.5, -1, -1], [2, -0.1, -1], [-3, 4, 0.0]], dtype=np.float32)
    found = label_scores(("accuracy", "f1", "f1_micro", "precision", "recall"), logits, wanted)
    # By label: 2 of 2 right; 1 of 2 found; 1 predicted that does not apply.
    assert found == pytest.approx({
        "accuracy": 1 / 3, "f1": (1 + 2 / 3 + 0) / 3, "f1_micro": 2 * 3 / (4 + 4), "precision": 2 / 3,
        "recall": (1 + 1 / 2 + 0) / 3,
    })  # fmt: skip
