"""A class for each word of a text: named entities, parts of speech."""

from __future__ import annotations

from launcher.tasks.rows import RowFormat
from launcher.tasks.task import Task

WORDS = RowFormat(
    "tokens",
    "labelled words",
    {"tokens": "list", "labels": "list"},
    related={"tokens": ("words",), "labels": ("tags", "ner", "pos")},
)
_SEQEVAL = ("seqeval", "seqeval")
_NO_SPLIT = "whose words would lose their context; use truncate or drop"


class TokenClassification(Task):
    name = "token-classification"
    loss_unit = "targets"
    aliases = ("ner", "named-entity-recognition", "pos", "token-cls", "tagging")
    row_formats = (WORDS,)
    overlong = {"split": _NO_SPLIT}
    classifies = True
    architectures = ("encoder", "decoder")
    model_class = "AutoModelForTokenClassification"
    head = "token-classifier"
    peft_task = "TOKEN_CLS"
    metrics = ("accuracy", "f1", "precision", "recall")
    metric_packages = dict.fromkeys(metrics[1:], _SEQEVAL)
    keeps_token_predictions = True
    goals = {"classify": ("tokens",)}
    first_models = ("google-bert/bert-large-uncased",)
    first_metrics = {"classify": ("f1",)}
    pipeline = "token-classification"
    example_input = "Ada Lovelace lived in London."
