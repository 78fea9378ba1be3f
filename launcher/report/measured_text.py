"""What a run took beside what was predicted, as plain text. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.report.tables import gib, table


def measured_lines(memory: Mapping[str, Any]) -> list[str]:
    """The peak and its error in one line, then a row a part; `memory` of result.json."""
    lines = [
        f"  memory    predicted {gib(memory['predicted'])}, measured {gib(memory['measured'])}"
        f"{_error(memory['predicted'], memory['measured'])} ({memory['method']})"
    ]
    named = {
        **memory["components"],
        "loading": memory["load"],
        "evaluating": memory["eval"],
        "saving": memory["save"],
        "host": memory["host"],
    }
    rows = [("", "predicted", "measured")]
    for name, pair in named.items():
        if pair["measured"]:
            rows.append((name, gib(pair["predicted"]), gib(pair["measured"])))
    lines += table(rows, indent=" " * 12)
    tokens = memory["tokens"]
    if tokens["largest"] and tokens["planned"] and tokens["largest"] < tokens["planned"]:
        lines.append(
            f"            the longest batch had {tokens['largest']:,} of the {tokens['planned']:,} tokens "
            "that were planned for"
        )
    return lines


def _error(predicted: int | None, measured: int) -> str:
    """By how much a run took more or less than predicted."""
    if not predicted:
        return ""
    share = measured / predicted - 1
    return f": {abs(share):.1%} {'more' if share > 0 else 'less'}"
