"""Row formats that several tasks read. A format of one task alone is in the module of that task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FieldKind = Literal["text", "text or messages", "messages", "tools", "label", "list", "image"]
"""What the column of a field holds; `launcher/train/data/detection.py` tells them apart."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The fields of a row."""

    name: str
    what: str
    """What the rows are, for messages: `labelled texts`."""
    needed: Mapping[str, FieldKind]
    optional: Mapping[str, FieldKind] = field(default_factory=dict)

    @property
    def fields(self) -> tuple[str, ...]:
        """All fields, those that a row must have first."""
        return (*self.needed, *self.optional)


TEXT = RowFormat("text", "texts", {"text": "text"})
INSTRUCTION = RowFormat(
    "instruction", "instructions", {"instruction": "text", "output": "text"}, {"input": "text"}
)
PROMPT_COMPLETION = RowFormat(
    "prompt-completion",
    "prompts and completions",
    {"prompt": "text or messages", "completion": "text or messages"},
)
CHAT = RowFormat("chat", "chat messages", {"messages": "messages"}, {"tools": "tools"})
PREFERENCE = RowFormat(
    "preference",
    "pairs of answers",
    {"chosen": "text or messages", "rejected": "text or messages"},
    {"prompt": "text or messages", "tools": "tools"},
)
