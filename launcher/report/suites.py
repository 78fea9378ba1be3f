"""Scores of `eval --suite` as rows of text, for the terminal, the report and the model card. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

NONE = "-"


class ScoreRow(NamedTuple):
    """One metric of one task, each score with its standard error."""

    task: str
    metric: str
    base: str
    trained: str
    change: str
    """Of the trained model from the base; with the standard error of a difference of independent scores."""


HEAD = ScoreRow("task", "metric", "base", "trained", "change")


def rows(suites: Any) -> list[ScoreRow]:
    """The rows of `suites` in result.json; what has another form is left out."""
    found = suites if isinstance(suites, Mapping) else {}
    return [row for task, suite in found.items() for row in _rows(str(task), suite)]


def _rows(task: str, suite: Any) -> Iterator[ScoreRow]:
    metrics = suite.get("metrics") if isinstance(suite, Mapping) else None
    for metric in metrics if isinstance(metrics, list) else ():
        if not isinstance(metric, Mapping):
            continue
        base, trained = _score(metric, "base"), _score(metric, "trained")
        name = str(metric.get("metric"))
        name += f" ({metric['filter']})" if metric.get("filter") else ""
        yield ScoreRow(task, name, _text(base), _text(trained), _change(base, trained))


def settings(suites: Any) -> list[tuple[str, str]]:
    """Task and how it was asked."""
    found = suites if isinstance(suites, Mapping) else {}
    return [(str(task), _settings(suite)) for task, suite in found.items() if isinstance(suite, Mapping)]


def _settings(suite: Mapping[str, Any]) -> str:
    samples, shots = suite.get("samples"), suite.get("fewshot")
    parts = [
        f"lm-eval {suite.get('lm_eval')}, version {suite.get('version')} of the task",
        f"{samples} samples" if samples is not None else "",
        f"the first {suite['limit']} asked for" if suite.get("limit") else "",
        f"{shots} examples in the prompt" if shots is not None else "",
        "with the chat template" if suite.get("chat_template") else "without a chat template",
        f"in {suite.get('dtype')}",
        f"seed {suite['seed']}" if suite.get("seed") is not None else "",
    ]
    return ", ".join(part for part in parts if part)


Score = tuple[float | None, float | None]
"""Value and standard error."""


def _score(metric: Mapping[str, Any], whose: str) -> Score:
    value, error = (metric.get(name) for name in (whose, f"{whose}_stderr"))
    return (
        float(value) if isinstance(value, int | float) else None,
        float(error) if isinstance(error, int | float) else None,
    )


def _text(score: Score) -> str:
    value, error = score
    if value is None:
        return NONE
    return f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")


def _change(base: Score, trained: Score) -> str:
    if base[0] is None or trained[0] is None:
        return NONE
    error = None if base[1] is None or trained[1] is None else math.hypot(base[1], trained[1])
    return f"{trained[0] - base[0]:+.4f}" + ("" if error is None else f" ± {error:.4f}")
