"""Labels of texts to targets, by `data.problem_type`: a class, scores, or several labels of a row.

`names` reads the labels of all training rows and gives the names of the logits; `target` is what the loss
reads of a row: a class id, a score, or a list of scores or of 0.0 and 1.0. RecipeError names file and line.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.recipe.suggestions import listed
from launcher.rows.class_names import collect_labels
from launcher.rows.formats import label_id, label_of
from launcher.rows.sources import Row, bad_row, kind_of, parsed_json
from launcher.tasks.sequence_classification import MULTI, REGRESSION, SINGLE

KEY = "data.problem_type"
Target = int | float | list[float]


@dataclass(frozen=True, slots=True)
class ProblemType:
    """How one value of `data.problem_type` reads labels."""

    names: Callable[[Iterable[Row]], tuple[str, ...]]
    target: Callable[[Sequence[str], Row], Target]


def numbered(count: int) -> tuple[str, ...]:
    """Names of logits that the rows do not name, as transformers gives them."""
    return tuple(f"LABEL_{number}" for number in range(count))


# --- one class


def _class_names(rows: Iterable[Row]) -> tuple[str, ...]:
    def checked() -> Iterator[Row]:
        for row in rows:
            label = row.values["label"]
            if isinstance(label, list | tuple) or _is_written_list(label):
                hint = f"several labels of a row: `{KEY}: {MULTI}`; several scores: `{KEY}: {REGRESSION}`"
                raise bad_row(row, "the label is a list, and a row has one class", hint, path=KEY)
            label_of(row, label, "label")
            yield row

    return collect_labels(checked())


def _is_written_list(label: Any) -> bool:
    """Whether a label is the text of a list, as CSV files have it: JSON's, or Python's of pandas."""
    if not isinstance(label, str) or not label.lstrip().startswith("["):
        return False
    try:
        return isinstance(ast.literal_eval(label.strip()), list)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _class_id(names: Sequence[str], row: Row) -> int:
    label = row.values["label"]
    if isinstance(label, list | tuple):
        raise bad_row(row, "the label is a list, and a row has one class", "correct or delete the row")
    return label_id(row, label_of(row, label, "label"), names)


# --- scores


def _score_names(rows: Iterable[Row]) -> tuple[str, ...]:
    first: list[float] = []
    constant: list[bool] = []
    file = None
    for row in rows:
        scores = _scores(row)
        if file is None:
            first, constant = scores, [True] * len(scores)
        _check_width(row, scores, len(first))
        constant = [same and score == seen for same, score, seen in zip(constant, scores, first, strict=True)]
        file = row.file
    if any(constant):
        number = constant.index(True)
        what = "score" if len(first) == 1 else f"score {number + 1} of {len(first)}"
        message = f"every row has the {what} {first[number]:g}: there is nothing to learn"
        raise RecipeError(Problem("labels", message, file=file, hint="regression needs scores that differ"))
    return numbered(len(first))


def _score(names: Sequence[str], row: Row) -> float | list[float]:
    scores = _scores(row)
    _check_width(row, scores, len(names))
    return scores[0] if len(scores) == 1 else scores


def _scores(row: Row) -> list[float]:
    label = _listed(row)
    given = list(label) if isinstance(label, list | tuple) else [label]
    if not given:
        raise bad_row(row, "the label is an empty list, expected a number or numbers", "delete the row")
    return [_number(row, value) for value in given]


def _number(row: Row, value: Any) -> float:
    """A finite number, also as the text of a CSV file."""
    number = math.nan
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
    if not math.isfinite(number):
        held = repr(value) if isinstance(value, str | float) else kind_of(value)
        hint = f"correct or delete the row; for classes remove `{KEY}`"
        raise bad_row(row, f"the label is {held}, expected a finite number", hint)
    return number


def _check_width(row: Row, values: Sequence[Any], expected: int) -> None:
    if len(values) != expected:
        message = f"the label has {len(values)} numbers, that of the first training row {expected}"
        raise bad_row(row, message, "give each row the same number of them")


# --- several labels


def _label_names(rows: Iterable[Row]) -> tuple[str, ...]:
    """Those that rows name, in the order of collect_labels; of rows of 0 and 1 alike long, numbered ones."""
    named: set[str] = set()
    widths: set[int] = set()
    flags, file = True, None
    twice: Row | None = None
    for row in rows:
        labels = _labels(row)
        twice = row if twice is None and _twice(labels) else twice
        file = row.file
        widths.add(len(labels))
        flags = flags and _are_flags(labels)
        named.update(map(str, labels))
    if flags and len(widths) == 1 and min(widths) > 1:
        return numbered(min(widths))
    if twice is not None:  # 0 and 1 of every label, but not in every row as many of them
        raise _named_twice(twice)
    if len(named) < 2:
        message = f"the rows have {f'no label but {named.pop()!r}' if named else 'no labels'}"
        hint = f"{MULTI} needs two labels or more; for one class of a row remove `{KEY}`"
        raise RecipeError(Problem("labels", message, file=file, hint=hint))
    return collect_labels([Row({"labels": sorted(named)}, str(file), 1)])


def _label_flags(names: Sequence[str], row: Row) -> list[float]:
    """1.0 for each label of the row, in the order of their ids."""
    labels = _labels(row)
    if tuple(names) == numbered(len(names)) and _are_flags(labels):
        _check_width(row, labels, len(names))
        return [float(label) for label in labels]
    if _twice(labels):
        raise _named_twice(row)
    absent = [str(label) for label in labels if str(label) not in names]
    if absent:
        message = f"label {absent[0]!r} is not among the training labels {listed(names)}"
        raise bad_row(row, message, "labels come from data.train; correct the row or leave it out")
    held = set(map(str, labels))
    return [float(name in held) for name in names]


def _labels(row: Row) -> list[Any]:
    labels = _listed(row)
    if not isinstance(labels, list | tuple):
        message = f"the label is {kind_of(labels)}, expected a list of labels"
        raise bad_row(row, message, f"write a list, also of one label; for one class remove `{KEY}`")
    for label in labels:
        if not isinstance(label, str | int) and label not in (0.0, 1.0):
            raise bad_row(row, f"the list of labels holds {kind_of(label)}, expected names or 0 and 1")
        if label == "":
            raise bad_row(row, "the list of labels holds an empty name", "correct or delete the row")
    if not _are_flags(labels) and _twice(labels):
        raise _named_twice(row)
    return list(labels)


def _twice(labels: Sequence[Any]) -> bool:
    return len(set(map(str, labels))) != len(labels)


def _named_twice(row: Row) -> RecipeError:
    hint = "remove one of them; lists of 0 and 1 need as many of them in every row"
    return bad_row(row, f"a label is in the list twice: {listed(map(str, _listed(row)))}", hint)


def _are_flags(labels: Sequence[Any]) -> bool:
    return all(not isinstance(label, str) and label in (0, 1) for label in labels)


def _listed(row: Row) -> Any:
    """The label; the list that a CSV file holds as JSON text."""
    label = row.values["label"]
    is_list = isinstance(label, str) and label.lstrip().startswith("[")
    return parsed_json(row, "the label", label) if is_list else label


PROBLEM_TYPES: Mapping[str, ProblemType] = {
    SINGLE: ProblemType(_class_names, _class_id),
    REGRESSION: ProblemType(_score_names, _score),
    MULTI: ProblemType(_label_names, _label_flags),
}


def label_names(problem_type: str | None, rows: Iterable[Row]) -> tuple[str, ...]:
    """Names of the labels of all training rows; problem_type: None for a task that has one alone.

    RecipeError where the rows cannot be learned from.
    """
    return collect_labels(rows) if problem_type is None else PROBLEM_TYPES[problem_type].names(rows)
