"""Scores of `eval --suite`, for the terminal, the report and the model card. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from launcher.report.sections import Block, Section, Text, filled, notes_of, table_of
from launcher.report.values import mapping, number, objects

_COLUMNS = {
    "task": "{task}",
    "metric": "{metric}[ ({filter})]",
    "base": "{base}",
    "trained": "{trained}",
    "change": "{change}",
}
_ASKED = (
    "{task}: lm-eval {lm_eval}, version {version} of the task[, {samples} samples][, the first {limit} asked "
    "for][, {fewshot} examples in the prompt], {template} the chat template, in {dtype}[, seed {seed}]"
)
_ABOUT = "± is the standard error; that of a change takes the two scores as independent."


def suites_section(suites: Any) -> Section | None:
    """Each metric of each task, and how it was asked; None without any. suites: that of result.json."""
    found = [
        {**suite, "task": str(task)} for task, suite in mapping(suites).items() if isinstance(suite, Mapping)
    ]
    scopes = [_scope(suite["task"], one) for suite in found for one in objects(suite.get("metrics"))]
    with_template = {True: "with", False: "without"}
    asked = [
        filled(_ASKED, {**suite, "template": with_template[bool(suite.get("chat_template"))]})
        for suite in found
    ]
    table = table_of("Benchmarks", _COLUMNS, scopes, "numbers")
    blocks: list[Block] = [*table, Text([_ABOUT], "small"), *notes_of(asked)]
    return Section("suites", "Benchmarks", blocks) if table else None


def _scope(task: str, metric: Mapping[str, Any]) -> dict[str, Any]:
    """The scores of the trained model and of its base with their standard errors, and their difference."""
    base, trained = _score(metric, "base"), _score(metric, "trained")
    change = _text(_change(base, trained), "+")
    return {**metric, "task": task, "base": _text(base), "trained": _text(trained), "change": change}


Score = tuple[float | None, float | None]
"""Value and standard error."""


def _score(metric: Mapping[str, Any], whose: str) -> Score:
    return number(metric.get(whose)), number(metric.get(f"{whose}_stderr"))


def _change(base: Score, trained: Score) -> Score:
    """The difference of two scores that are independent."""
    if base[0] is None or trained[0] is None:
        return None, None
    error = None if base[1] is None or trained[1] is None else math.hypot(base[1], trained[1])
    return trained[0] - base[0], error


def _text(score: Score, sign: str = "") -> str:
    value, error = score
    return "" if value is None else f"{value:{sign}.4f}" + ("" if error is None else f" ± {error:.4f}")
