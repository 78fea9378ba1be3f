"""Which task rows belong to, by their columns, also where this version has no such task.

Rows are recognised one by one. What counts is a column that holds something: Parquet and CSV files give
every row the columns of all others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from launcher.recipe.field_tables import TASK_FORMATS
from launcher.tasks.dpo import DPO
from launcher.tasks.reward import Reward
from launcher.tasks.token_classification import TokenClassification

MEDIA = frozenset({"image", "images", "video", "videos", "audio", "audios", "speech"})
_MEDIA_ENDINGS = ("_path", "_paths", "_url", "_urls", "_file", "_files", "_bytes")
COMPARED = frozenset({"positive_messages", "negative_messages"})
"""Columns of conversations that `messages` are compared with: ms-swift's rows for embedding and reranker."""
_KTO_LABELS = frozenset({"label", "desirable", "is_desirable", "kto_label", "kto_tag", "thumbs_up"})
_FLAGS = ("true", "false", "0", "1", "desirable", "undesirable")
_ANSWERS = frozenset(
    {"messages", "conversations", "conversation", "completion", "response", "output", "answer"}
)
_ASKED = frozenset({*_ANSWERS, "text", "texts", "prompt", "question", "instruction", "query", "caption"})


@dataclass(frozen=True, slots=True)
class Kind:
    """Rows of one task."""

    task: str
    what: str
    """What the rows are, for messages."""
    fits: Callable[[Mapping[str, Any]], bool]
    """Whether a row is one; its columns in lower case with `_`, empty ones left out."""


def is_empty(value: Any) -> bool:
    """Whether a column holds nothing in this row."""
    return value is None or (isinstance(value, str | bytes | list | tuple | dict) and not value) or (
        isinstance(value, str) and value.strip() in ("", "[]", "{}", "null", "None")
    )  # fmt: skip


@cache
def plain_name(column: str) -> str:
    """A column's name in lower case, its words joined by `_`: `systemPrompt` is system_prompt."""
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])|[-. ]", "_", column.strip()).lower()


def is_flag(value: Any) -> bool:
    """Whether a value says yes or no, as labels of KTO do."""
    if isinstance(value, bool):
        return True
    return value in (0, 1) if isinstance(value, int | float) else str(value).strip().lower() in _FLAGS


def is_kto_label(name: str, value: Any) -> bool:
    return name in _KTO_LABELS and (name.startswith("kto") or is_flag(value))


def is_media(name: str) -> bool:
    """Whether a column of this name holds images, video or sound."""
    ending = next((end for end in _MEDIA_ENDINGS if name.endswith(end)), "")
    return name.removesuffix(ending) in MEDIA


def is_side(name: str, side: str) -> bool:
    """Whether a column of this name holds the `chosen` or `rejected` answer of a preference pair."""
    return side in name.split("_")


def _kto(row: Mapping[str, Any]) -> bool:
    return bool(_ANSWERS & row.keys()) and any(is_kto_label(name, value) for name, value in row.items())


def _token_labels(row: Mapping[str, Any]) -> bool:
    words = row.get("tokens", row.get("words"))
    tags = [name for name in row if name.endswith("tags") or name in ("labels", "ner", "pos")]
    return isinstance(words, list | tuple) and any(isinstance(row[name], list | tuple) for name in tags)


def _media(row: Mapping[str, Any]) -> bool:
    return any(map(is_media, row)) and bool(_ASKED & row.keys())


def _preference(row: Mapping[str, Any]) -> bool:
    return any(is_side(name, "rejected") and is_content(value) for name, value in row.items())


def is_content(value: Any) -> bool:
    return isinstance(value, str | list | tuple | dict)


def _reranker(row: Mapping[str, Any]) -> bool:
    lists = [row.get(name) for name in ("passages", "documents", "docs", "candidates")]
    return "query" in row and (any(lists) or {"positives", "negatives"} <= row.keys() or "passage" in row)


def _embedding(row: Mapping[str, Any]) -> bool:
    if COMPARED & row.keys():
        return True
    pairs = ("anchor", "positive"), ("query", "positive"), ("query", "pos"), ("question", "positive")
    scored = {"sentence1", "sentence2", "score"}, {"sentence_a", "sentence_b", "score"}
    return any(set(pair) <= row.keys() for pair in pairs) or any(names <= row.keys() for names in scored)


def _steps(row: Mapping[str, Any]) -> bool:
    return all(isinstance(row.get(name), list | tuple) for name in ("completions", "labels"))


def _scored(row: Mapping[str, Any]) -> bool:
    return Reward.name in row and bool(_ANSWERS & row.keys())  # a number for each answer


def _grpo(row: Mapping[str, Any]) -> bool:
    checks = {"ground_truth", "reward_model", "verification_info", "reward_fn", "reward_spec"}
    return bool({"prompt", "problem", "question", "messages"} & row.keys()) and bool(checks & row.keys())


KINDS = (
    Kind(TokenClassification.name, "words with a label each", _token_labels),
    Kind(DPO.name, "preference rows (a chosen and a rejected answer)", _preference),
    Kind("kto", "answers with a label that says good or bad", _kto),
    Kind("image-text-to-text", "conversations about images, video or sound", _media),
    Kind("reranker", "queries with documents to rank", _reranker),
    Kind("embedding", "pairs of texts that are alike", _embedding),
    Kind("grpo", "prompts with what their answers are checked against", _grpo),
    Kind("prm", "answers with a label for each step", _steps),
    Kind("regression", "answers with a reward each", _scored),
)
"""The first one that fits a row is meant."""


def kind_of(values: Mapping[str, Any]) -> Kind | None:
    """The kind of a row; None where its columns show none of these tasks."""
    row = {plain_name(str(name)): value for name, value in values.items() if not is_empty(value)}
    return next((kind for kind in KINDS if kind.fits(row)), None)


def where_to(task: str) -> str:
    """What to do with rows of a task: the hint of an error."""
    if task in TASK_FORMATS:
        return f"write `task: {task}`"
    return f"this version has no task {task}: train them with a tool that has it"
