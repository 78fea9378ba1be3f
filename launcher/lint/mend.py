"""A mended text: the findings' own edits, so that layout and order stay."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import attrgetter

from launcher.lint.check import Rule, lint_text
from launcher.lint.finding import Edit, Finding

ROUNDS = 20
"""A mended key may show the next mistake; each round mends what can be mended at once."""


def mended(text: str, file: str, *more: Rule) -> tuple[str, list[Finding]]:
    """The mended text, and what is left to say of it. Nothing that has two readings is guessed."""
    left = lint_text(text, file, *more)
    for _ in range(ROUNDS):
        groups = [finding for finding in left if finding.edits]
        # First what is no strict JSON: without its only key, `{"a": 1,}` would be no JSON at all.
        form = [finding for finding in groups if finding.code.startswith("ds-json")]
        changed = applied(text, [finding.edits for finding in form or groups])
        if changed == text:
            break
        text, left = changed, lint_text(changed, file, *more)
    return text, left


def applied(text: str, groups: Sequence[Sequence[Edit]]) -> str:
    """The text after all edits of each group that touches none of the groups before it."""
    taken: list[Edit] = []  # by their place; no two touch
    for group in groups:
        if not any(_touches(edit, taken) for edit in group):
            for edit in group:
                insort(taken, edit, key=_start)
    parts, at = [], 0
    for edit in taken:
        parts += [text[at : edit.start], edit.text]
        at = edit.end
    return "".join([*parts, text[at:]])


_start = attrgetter("start")


def _touches(edit: Edit, taken: Sequence[Edit]) -> bool:
    """Whether one of the edits, sorted by their place, overlaps this one or ends where it starts."""
    after = bisect_left(taken, edit.start, key=_start)
    before = after > 0 and taken[after - 1].end >= edit.start
    return before or (after < len(taken) and taken[after].start <= edit.end)
