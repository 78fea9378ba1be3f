"""A class, several labels, or scores for each text or pair of texts."""

from __future__ import annotations

from launcher.tasks.rows import LABEL_WORDS, TEXT_WORDS, RowFormat
from launcher.tasks.task import WITHOUT_CLASSIFIER, Task

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
        "text": TEXT_WORDS,
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
    without_class = WITHOUT_CLASSIFIER
    peft_task = "SEQ_CLS"
    data_keys = frozenset({"problem_type"})
    problem_metrics = {
        SINGLE: CLASS_METRICS,
        REGRESSION: (*SCORE_ERRORS, "r2", "pearson", "spearman"),
        MULTI: LABEL_METRICS,
    }
    metrics = tuple(dict.fromkeys(name for names in problem_metrics.values() for name in names))
    smaller_is_better = SCORE_ERRORS
    metric_packages = {**CLASS_PACKAGES, "f1_micro": SKLEARN, "spearman": ("scipy", "scipy")}
    known_as = {"transformers": ("run_glue.py", "run_classification.py")}
    goals = {"classify": ("classification",)}
    first_metrics = {"classify": ("accuracy", "f1")}
    pipeline = "text-classification"
