"""Rerankers: a score for a query with a document, learned with the cross-encoder losses of
sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from launcher.errors import Problem
from launcher.tasks.embedding import (
    BY_RANK,
    BY_SCORE,
    COLUMNS_KEPT,
    NEGATIVES,
    POSITIVE_PAIR,
    Loss,
    contrast_problems,
    loss_misfit,
    section_problems,
)
from launcher.tasks.rows import RowFormat
from launcher.tasks.task import Task

_DOCUMENTS = ("passages", "docs", "candidates", "texts")
RELEVANCE = RowFormat(
    "relevance",
    "queries with a document and its relevance",
    {"query": "text", "document": "text", "score": "score"},
    related={"query": ("question", "anchor"), "document": ("passage", "answer", "text")},
    other_names={"document": "passage", "score": "label"},
)
RANKING = RowFormat(
    "ranking",
    "queries with a list of documents and their relevance",
    {"query": "text", "documents": "list", "labels": "list"},
    related={"query": ("question", "anchor"), "documents": _DOCUMENTS, "labels": ("scores", "relevance")},
    other_names={"documents": "docs", "labels": "scores"},
)
_LISTS = (RANKING.name, POSITIVE_PAIR.name)
LOSSES: Mapping[str, Loss] = {
    "BinaryCrossEntropyLoss": Loss((RELEVANCE.name,), {}),
    "MSELoss": Loss((RELEVANCE.name,), {}),
    "LambdaLoss": Loss(_LISTS, {"documents": 8}, over="ordered pairs"),
    "ListNetLoss": Loss(_LISTS, {"documents": 8}),
    "RankNetLoss": Loss(_LISTS, {"documents": 8}, over="ordered pairs"),
}
SCORER: Mapping[str, Any] = {
    "transformer_task": "sequence-classification",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    "module_output_name": "scores",
}
"""What sentence-transformers 6.2 reads of a CrossEncoder's model in sentence_bert_config.json."""
_METRICS = {
    RELEVANCE.name: (*BY_RANK[:2], *BY_SCORE),
    RANKING.name: BY_RANK[:2],
    POSITIVE_PAIR.name: BY_RANK[:2],
}


def as_list(values: Mapping[str, Any]) -> tuple[str, list[str], list[float]]:
    """Query, documents and labels of a canonical row; of a positive pair a positive has the label 1."""
    if "anchor" not in values:
        return values["query"], values["documents"], values["labels"]
    documents = [*values["positives"], *values["negatives"]]
    labels = [*[1.0] * len(values["positives"]), *[0.0] * len(values["negatives"])]
    return values["anchor"], documents, labels


def is_empty(query: str, documents: Sequence[str]) -> bool:
    """Whether a row has nothing to rank: no documents, or an empty text."""
    return not documents or not all(text.strip() for text in (query, *documents))


def _width(held: object) -> int:
    """Documents in a column of a row."""
    return len(held) if isinstance(held, list | tuple) else int(bool(held))


class Reranker(Task):
    name = "reranker"
    hooks = ("format_row", "compute_metrics", "callbacks", "optimizer", "prepare_model")
    aliases = ("rerank", "cross-encoder", "crossencoder", "ranker")
    packages = ("sentence_transformers",)
    extra = "embedding"
    section: ClassVar[str] = "reranker"
    row_formats = (RELEVANCE, RANKING, POSITIVE_PAIR)
    unread_columns = dict.fromkeys(("score", "label", "labels", "scores"), "how relevant a document is")
    own_padding = "each query with its document is padded to the longest one of the batch"
    decides_samples = ("documents", "loss")
    architectures = ("encoder", "decoder")
    model_class = "AutoModelForSequenceClassification"
    num_labels = 1
    peft_task = "SEQ_CLS"
    untraceable = "the loss compares the documents of a row, which a trace of the model alone does not see"
    trainer_defaults = COLUMNS_KEPT
    metrics = (*BY_RANK[:2], *BY_SCORE)
    metric_packages = dict.fromkeys(BY_SCORE, ("scipy", "scipy"))
    goals = {"ranking": ("relevance", "ranking", "positive-pair")}
    first_metrics = {"ranking": ("ndcg@10", "mrr@10")}
    first_models = ("cross-encoder/ms-marco-MiniLM-L12-v2",)
    compares_texts = True
    pipeline = "text-ranking"
    tags = ("sentence-transformers", "cross-encoder", "reranker")
    library = "sentence-transformers"
    example_code = (
        "from sentence_transformers import CrossEncoder\n\n"
        "model = CrossEncoder(PLACE)\n"
        "print(model.predict([TEXTS]))"
    )

    def first_keys(self, rows: Mapping[str, Sequence[object]]) -> dict[str, tuple[object, str]]:
        lists = ("documents",) if "documents" in rows else ("positive", *NEGATIVES, "negatives")
        if not {"documents", "anchor"} & rows.keys():
            return {"data.metrics": (["spearman"], "a split separates the documents of a query: not ranked")}
        keys: dict[str, object] = {"loss": "LambdaLoss"}
        longest = sum(max(map(_width, rows[name]), default=0) for name in lists if name in rows)
        if longest > LOSSES["LambdaLoss"].options["documents"]:
            keys["documents"] = longest
        return {self.section: (keys, "the rows are queries with a list of documents")}

    def check_trainer(self, trainer: Mapping[str, Any]) -> list[Problem]:
        return contrast_problems(trainer)

    def check_section(self, given: Mapping[str, Any], rest: Mapping[str, Any]) -> list[Problem]:
        return [*section_problems(self.section, LOSSES, _METRICS, given, rest)]

    def misfit(self, form: str, section: Any) -> Problem | None:
        return loss_misfit(self.section, LOSSES, section.loss, form)

    def row_misfit(self, values: Mapping[str, Any], section: Any) -> Problem | None:
        query, documents, labels = as_list(values)
        if is_empty(query, documents):  # left out
            return None
        if len(documents) > section.documents:
            message = f"the row has {len(documents)} documents, memory is planned for {section.documents}"
            return Problem("documents", message, hint=f"set reranker.documents: {len(documents)}")
        if section.loss == "BinaryCrossEntropyLoss" and not 0 <= labels[0] <= 1:
            message = f"the score is {labels[0]:g}, and BinaryCrossEntropyLoss takes 0 to 1"
            hint = "divide the scores by their largest value, or use MSELoss"
            return Problem("score-range", message, hint=hint)
        if section.documents == 1:
            return None
        if min(labels) < 0:
            return Problem("score-range", f"a label is {min(labels):g}, expected 0 or more")
        if len(documents) < 2 or len(set(labels)) < 2:
            message = f"all {len(documents)} documents of the row have the same label: nothing is ranked"
            return Problem("one-label", message, hint="give each row documents of different labels")
        return None

    def section_values(self, given: Any) -> dict[str, tuple[Any, str]]:
        name = getattr(given, "loss", next(iter(LOSSES)))
        usual = LOSSES[name].options.get("documents", 1)
        why = (
            "a row has one document"
            if usual == 1
            else "the most documents of a row; memory is planned for it"
        )
        return {
            "loss": (name, "schema default"),
            "documents": (getattr(given, "documents", None) or usual, why),
        }

    def loss_over(self, settings: Any) -> str:
        return LOSSES[settings.reranker.loss].over

    def sequences(self, settings: Any) -> int:
        return int(settings.reranker.documents)
