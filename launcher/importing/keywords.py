"""The keywords of one call of a script."""

from __future__ import annotations

import ast
from typing import Any

from launcher.importing.found import Effect, Reading
from launcher.importing.syntax import Function, text_of
from launcher.importing.values import Dotted, Source, Unresolved, Value


def keywords_of(
    reading: Reading, source: Source, call: ast.Call, scope: Function | None
) -> dict[str, tuple[Value | None, ast.expr]]:
    """The keywords of a call, `**NAME` put in; None for a value that is known only when the script runs."""
    found: dict[str, tuple[Value | None, ast.expr]] = {}
    for keyword in call.keywords:
        try:
            value = source.value(keyword.value, scope)
        except Unresolved:
            value = None
        if keyword.arg is not None:
            found[keyword.arg] = (value, keyword.value)
        elif value is None or not isinstance(value.value, dict):
            said = f"**{text_of(keyword.value)}"
            reading.drop(said, "", keyword.value.lineno, Effect.NEEDED, "known only when the script runs",
                         "write these keywords out")  # fmt: skip
        else:
            found |= {
                str(name): (Value(item, value.note), keyword.value) for name, item in value.value.items()
            }
    return found


def plain(value: Any) -> Any:
    """`steps` of IntervalStrategy.STEPS; other values as they are."""
    if isinstance(value, Dotted):
        return str(value).rpartition(".")[2].lower()
    return value


def positional(call: ast.Call, at: int = 0) -> ast.expr | None:
    """An argument by its place, None where there is none."""
    return call.args[at] if len(call.args) > at and not isinstance(call.args[at], ast.Starred) else None
