"""A class, several labels, or scores for each text or pair of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.tasks.rows import LABEL_WORDS, TEXT_WORDS, RowFormat
from launcher.tasks.task import Task

CLASS_METRICS = ("accuracy", "f1", "precision", "recall", "matthews_correlation")
"""f1, precision and recall are macro averages."""
SKLEARN = ("sklearn", "scikit-learn")
CLASS_PACKAGES = dict.fromkeys(CLASS_METRICS[1:], SKLEARN)
SINGLE, REGRESSION, MULTI = "single_label_classification", "regression", "multi_label_classification"
"""Values of `data.problem_type`, as transformers' configurations spell them."""
SCORE_ERRORS = ("mse", "rmse", "mae")
LABEL_METRICS = ("accuracy", "f1", "f1_micro", "precision", "recall")
"""accuracy: the share of rows of which every label is right; f1, precision and recall are macro averages."""
CLASSIFICATION = RowFormat(
    "classification",
    "labelled texts",
    {"text": "text", "label": "label"},
    {"text_pair": "text"},
    {
        "text": (*TEXT_WORDS, "premise"),
        "label": LABEL_WORDS,
        "text_pair": ("sentence2", "hypothesis", "question2", "text2"),
    },
)


class SequenceClassification(Task):
    name = "sequence-classification"
    aliases = ("text-classification", "classification", "sentiment-analysis", "seq-cls")
    row_formats = (CLASSIFICATION,)
    classifies = True
    architectures = ("decoder", "encoder")
    model_class = "AutoModelForSequenceClassification"
    peft_task = "SEQ_CLS"
    problem_metrics = {
        SINGLE: CLASS_METRICS,
        REGRESSION: (*SCORE_ERRORS, "r2", "pearson", "spearman"),
        MULTI: LABEL_METRICS,
    }
    metrics = tuple(dict.fromkeys(name for names in problem_metrics.values() for name in names))
    smaller_is_better = SCORE_ERRORS
    metric_packages = {**CLASS_PACKAGES, "f1_micro": SKLEARN, "spearman": ("scipy", "scipy")}
    goals = {"classify": ("classification",)}
    first_models = ("google-bert/bert-large-uncased",)
    first_metrics = {"classify": ("accuracy", "f1")}
    problem_first_metrics = {REGRESSION: ["rmse", "spearman"], MULTI: ["f1_micro", "f1"]}
    pipeline = "text-classification"

    def first_keys(self, rows: Mapping[str, Sequence[object]]) -> dict[str, tuple[object, str]]:
        problem = problem_type_of(rows.get("label", ()))
        if problem == SINGLE:
            return {}
        return {
            "data.problem_type": (problem, "by the labels of the first rows"),
            "data.metrics": (self.problem_first_metrics[problem], ""),
        }


def problem_type_of(labels: Sequence[object]) -> str:
    """The problem type that the first labels look like."""
    lists = [label for label in labels if isinstance(label, list | tuple)]
    inner = [item for label in lists for item in label]
    if any(_is_decimal(label) for label in (*labels, *inner)):
        return REGRESSION
    return MULTI if lists else SINGLE


def _is_decimal(label: object) -> bool:
    return isinstance(label, float) and not label.is_integer()
