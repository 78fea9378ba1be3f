"""Names of classes: in a row, of all rows in the order of their ids, and the id of one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.recipe.suggestions import listed
from launcher.train.data.encoded import IGNORED
from launcher.train.data.sources import Row, bad_row, kind_of

_INTEGER = re.compile(r"-?\d+")
_DECIMAL = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")
_REGRESSION_HINT = "use whole numbers or names as labels"


def label_of(row: Row, label: Any, column: str) -> str | int | bool:
    """A label as a column holds it, checked. RecipeError names file and line."""
    if isinstance(label, float):
        message = f"label {label} is a decimal number, and regression is not supported"
        raise bad_row(row, message, _REGRESSION_HINT)
    if not isinstance(label, str | int) or label == "":
        held = "nothing" if label == "" else kind_of(label)
        raise bad_row(row, f"column {column} holds {held}, expected a label", "correct or delete the row")
    return label


def collect_labels(rows: Iterable[Row]) -> tuple[str, ...]:
    """Names of all labels in canonical rows ({label} or {labels}), in the order of their ids.

    -100 in {labels} is a word without a label.
    Whole numbers are ordered as numbers, so that 0..n-1 keep their ids; other names alphabetically.
    RecipeError when there are fewer than two, or when they are decimal numbers.
    """
    names: set[str] = set()
    file = None
    for row in rows:
        if "labels" in row.values:
            names.update(str(label) for label in row.values["labels"] if label != IGNORED)
        else:
            names.add(str(row.values["label"]))
        file = row.file
    if len(names) < 2:
        message = f"every row has the label {names.pop()!r}" if names else "there are no rows"
        hint = "classification needs two labels or more"
        raise RecipeError(Problem("labels", message, file=file, hint=hint))
    if all(_INTEGER.fullmatch(name) for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    if all(_DECIMAL.fullmatch(name) for name in names):  # from a CSV, where all is text
        message = "the labels are decimal numbers, and regression is not supported"
        raise RecipeError(Problem("labels", message, file=file, hint=_REGRESSION_HINT))
    return tuple(sorted(names))


def label_id(row: Row, label: Any, labels: Sequence[str]) -> int:
    """The id of a canonical row's label; RecipeError when training knows no such label."""
    name = str(label)
    try:
        return labels.index(name)
    except ValueError:
        message = f"label {name!r} is not among the training labels {listed(labels)}"
        raise bad_row(row, message, "labels come from data.train; correct the row or leave it out") from None
