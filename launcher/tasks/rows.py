"""Row formats that several tasks read. A format of one task alone is in the module of that task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FieldKind = Literal[
    "text", "text or texts", "text or messages", "messages", "tools", "label", "number", "list", "image",
    "images", "score",
]  # fmt: skip
"""What the column of a field holds; `launcher/rows/recognise.py` checks them."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The fields of a row."""

    name: str
    what: str
    """What the rows are, for messages: `labelled texts`."""
    needed: Mapping[str, FieldKind]
    optional: Mapping[str, FieldKind] = field(default_factory=dict)

    related: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Field -> parts of column names that often hold it, for hints of errors alone."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Field -> the column that is read where no row has one of the field's own name."""
    rendered: bool = False
    """Whether its rows are conversations, which a chat template renders."""

    @property
    def fields(self) -> tuple[str, ...]:
        """All fields, those that a row must have first."""
        return (*self.needed, *self.optional)


TEXT_WORDS = ("content", "sentence", "document", "body", "code", "review")
LABEL_WORDS = ("labels", "class", "category", "target", "sentiment")

TEXT = RowFormat("text", "texts", {"text": "text"}, related={"text": TEXT_WORDS})
INSTRUCTION = RowFormat(
    "instruction",
    "instructions",
    {"instruction": "text", "output": "text"},
    {"input": "text"},
    {
        "instruction": ("prompt", "question", "query"),
        "output": ("response", "answer", "completion", "solution"),
        "input": ("context", "passage", "article", "story"),
    },
)
PROMPT_COMPLETION = RowFormat(
    "prompt-completion",
    "prompts and completions",
    {"prompt": "text or messages", "completion": "text or messages"},
    related={
        "prompt": (
            "question",
            "query",
            "instruction",
            "problem",
            "source",
            "article",
            "document",
            "dialogue",
            "text",
        ),
        "completion": (
            "response",
            "answer",
            "output",
            "solution",
            "target",
            "reply",
            "summary",
            "abstract",
            "highlights",
            "translation",
            "code",
            "sql",
            "label",
        ),
    },
)
CHAT = RowFormat(
    "chat",
    "chat messages",
    {"messages": "messages"},
    {"tools": "tools"},
    {"messages": ("conversation", "dialog", "dialogue", "chat", "turns"), "tools": ("functions",)},
    other_names={"messages": "conversations"},
    rendered=True,
)
TOKEN_IDS = RowFormat(
    "token-ids",
    "rows that are tokenised already",
    {"input_ids": "list", "labels": "list"},
    {"attention_mask": "list", "position_ids": "list"},
)
PREFERENCE = RowFormat(
    "preference",
    "pairs of answers",
    {"chosen": "text or messages", "rejected": "text or messages"},
    {"prompt": "text or messages", "tools": "tools", "margin": "number"},
    {
        "chosen": ("preferred", "accepted", "better"),
        "rejected": ("dispreferred", "refused", "worse"),
        "prompt": (*PROMPT_COMPLETION.related["prompt"], "conversations", "input"),
    },
    other_names={"prompt": "input", "chosen": "preferred_output", "rejected": "non_preferred_output"},
)
