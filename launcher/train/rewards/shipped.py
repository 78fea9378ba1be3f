"""The reward functions that a recipe names without a file. Each gives a number for every completion.

Completions are text, or the messages of the assistant for prompts that are conversations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?(?:/\d+)?|-?\.\d+")
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_FINAL = re.compile(r"####\s*(\S+)")

Values = list[float | None]


def text_of(completion: Any) -> str:
    """The text of a completion; of messages the last one's."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else ""
    return content if isinstance(content, str) else ""


def exact_match(
    completions: Sequence[Any], *, column: str = "answer", ignore_case: bool = False, **columns: Any
) -> Values:
    """1 where the completion is the reference, apart from white space around it, else 0."""

    def plain(text: object) -> str:
        shown = str(text).strip()
        return shown.casefold() if ignore_case else shown

    pairs = zip(completions, columns[column], strict=True)
    return [float(plain(text_of(given)) == plain(wanted)) for given, wanted in pairs]


def numeric_answer(
    completions: Sequence[Any], *, column: str = "answer", tolerance: float = 1e-6, **columns: Any
) -> Values:
    r"""1 where the completion's final number is the reference's, else 0.

    The final number is the one in \boxed{}, after ####, or the last one. None where the reference has none.
    tolerance: relative.
    """
    values: Values = []
    for given, wanted in zip(completions, columns[column], strict=True):
        reference = wanted if isinstance(wanted, int | float) else final_number(str(wanted))
        found = final_number(text_of(given))
        if reference is None:
            values.append(None)
        elif found is None:
            values.append(0.0)
        else:
            values.append(float(abs(found - reference) <= tolerance * max(1.0, abs(reference))))
    return values


def final_number(text: str) -> float | None:
    """The number that an answer ends with; fractions are divided."""
    marked = [*_BOXED.findall(text), *_FINAL.findall(text)]
    numbers = _NUMBER.findall(marked[-1] if marked else text)
    if not numbers:
        return None
    above, _, below = numbers[-1].replace(",", "").partition("/")
    try:
        return float(above) / (float(below) if below else 1.0)
    except (ValueError, ZeroDivisionError):
        return None


def regular_expression(completions: Sequence[Any], *, pattern: str, **_: Any) -> Values:
    """1 where the pattern is found in the completion, else 0."""
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.search(text_of(given)) is not None) for given in completions]


def format_tags(completions: Sequence[Any], *, tags: Sequence[str] = ("think", "answer"), **_: Any) -> Values:
    """1 where the completion is these elements in this order and nothing else, else 0."""
    parts = (rf"<{re.escape(tag)}>(?:(?!</?{re.escape(tag)}>).)*</{re.escape(tag)}>" for tag in tags)
    whole = re.compile(r"\s*" + r"\s*".join(parts) + r"\s*", re.DOTALL)
    return [float(whole.fullmatch(text_of(given)) is not None) for given in completions]


def length(
    completions: Sequence[Any], *, tokens: float, completion_ids: Sequence[Sequence[int]], **_: Any
) -> Values:
    """1 up to so many tokens, from there falling linearly to 0 at twice as many."""
    return [min(1.0, max(0.0, 2 - len(ids) / tokens)) for ids in completion_ids]


SHIPPED: Mapping[str, Callable[..., Values]] = {
    "exact_match": exact_match,
    "numeric_answer": numeric_answer,
    "regular_expression": regular_expression,
    "format": format_tags,
    "length": length,
}
