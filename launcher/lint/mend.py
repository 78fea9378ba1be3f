"""A mended text: the findings' own edits, so that layout and order stay."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.lint.check import Rule, lint_text
from launcher.lint.finding import Edit, Finding

ROUNDS = 50
"""A mended key may show the next mistake; each round mends what can be mended at once."""


def mended(text: str, file: str, *more: Rule) -> tuple[str, list[Finding]]:
    """The mended text, and what is left to say of it. Nothing that has two readings is guessed."""
    left = lint_text(text, file, *more)
    for _ in range(ROUNDS):
        changed = applied(text, [edits for finding in left if (edits := finding.edits)])
        if changed == text:
            break
        text, left = changed, lint_text(changed, file, *more)
    return text, left


def applied(text: str, groups: Sequence[Sequence[Edit]]) -> str:
    """The text after all edits of each group that touches none of the groups before it."""
    taken: list[Edit] = []
    for group in groups:
        if not any(edit.start <= other.end and other.start <= edit.end for edit in group for other in taken):
            taken += group
    for edit in sorted(taken, key=lambda edit: edit.start, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text
