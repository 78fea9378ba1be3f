"""What lint says of a file: one thing at one place, and the text edits that mend it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning"]
_LONGEST = 2000
"""Characters of a text that are shown; a key may be as long as its file."""


def printable(text: str) -> str:
    """The text on one line, with escapes for what a terminal would not show; the end of a long one is cut."""
    if len(text) > _LONGEST:
        text = text[:_LONGEST] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace the characters from `start` up to `end` of the text."""

    start: int
    end: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a ds_config."""

    file: str
    line: int
    """From 1."""
    column: int
    """In characters, from 1."""
    path: str
    """Dotted path of the key, "" for the whole file."""
    code: str
    message: str
    hint: str | None = None
    severity: Severity = "error"
    """error: the run stops, or trains something else than is written. warning: it has no effect, or passes
    only because DeepSpeed converts it."""
    edits: tuple[Edit, ...] = ()

    def to_json(self) -> dict[str, Any]:
        names = ("file", "line", "column", "path", "code", "message", "hint", "severity")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        text = f"{printable(self.file)}:{self.line}:{self.column}: {self.code}: {self.message}"
        return f"{text} ({self.hint})" if self.hint else text
