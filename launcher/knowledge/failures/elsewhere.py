"""The fix of a failure for a log of another tool: the arguments of its script in place of recipe keys."""

from __future__ import annotations

import re

from launcher.knowledge.failures.catalogue import Failure

_KEYS: tuple[tuple[str, str], ...] = (
    (r"launch\.env\.(\w+): '?([\w:]+)'?", r"\1=\2"),
    (r" under launch\.env", ""),
    (r"trainer\.(\w+): true", r"\1=True"),
    (r"trainer\.(\w+): false", r"\1=False"),
    (r"trainer\.(\w+): ('?\w+'?)", r"\1=\2"),
    (r"model\.attn_implementation: sdpa", 'attn_implementation="sdpa"'),
    (r"adapter\.target_modules: all-linear", 'target_modules="all-linear"'),
    (r"(?:trainer|model|data|sharding)\.(\w+)\b(?!\()", r"\1"),
    (r",? as (?:`effilaunch run`|the plan) does(?: for CPU work)?", ""),
)
"""Expression -> what it is elsewhere, in this order."""


def fix_elsewhere(failure: Failure) -> str:
    """What to do about it without a recipe."""
    if failure.elsewhere:
        return failure.elsewhere
    text = failure.fix
    for expression, other in _KEYS:
        text = re.sub(expression, other, text)
    return text
