"""Names of classes: those of all rows, and those that files declare for whole numbers (`ClassLabel`).

Parquet and Arrow files have them in their schema. A column of lists has those of its items.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.files.safe_files import parse_json
from launcher.rows.files import file_schema
from launcher.rows.sources import Row, bad_row, source_files

IGNORED = -100
"""The label of a token, in rows of a word, that does not contribute to the loss."""
Names = Mapping[str, tuple[str, ...]]
"""Column -> names by number."""
_FIELDS = ("label", "labels")
_INTEGER = re.compile(r"-?\d+")
DECIMAL = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")
REGRESSION_HINT = "scores of texts: task sequence-classification with `data.problem_type: regression`"


def declared(source: Mapping[str, Any]) -> Names:
    """Names of all columns of a source whose files declare some.

    RecipeError where two files of it declare others: one number would mean two classes.
    """
    found: Names | None = None
    for file in source_files(source):
        names = of_features(_file_features(file))
        if found is not None and names != found:
            message = "declares other classes (ClassLabel) than the files before it"
            hint = "read the files as one source for each list of classes, or write the names into the rows"
            raise RecipeError(Problem("labels", message, file=str(file), hint=hint))
        found = names
    return found or {}


def _file_features(file: Path) -> Any:
    schema = file_schema(file)
    stored = (schema.metadata or {}).get(b"huggingface") if schema is not None else None
    try:
        whole = parse_json(stored.decode()) if stored else {}
        return whole["info"]["features"] if stored else {}
    except (ValueError, KeyError, TypeError):
        return {}


def of_features(features: Any) -> Names:
    """Names of the columns that declare some. features: as `datasets.Features.to_dict` gives them."""
    found = {}
    for column, feature in features.items() if isinstance(features, Mapping) else ():
        if isinstance(feature, list) and feature:  # as older versions write a list
            feature = feature[0]
        elif isinstance(feature, Mapping) and "feature" in feature:
            feature = feature["feature"]
        names = feature.get("names") if isinstance(feature, Mapping) else None
        if isinstance(names, list) and names and len(set(map(str, names))) == len(names):
            found[str(column)] = tuple(map(str, names))
    return found


def of_labels(names: Names, columns: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the column that holds the labels; empty without any. columns: field -> column."""
    return next((names[columns[field]] for field in _FIELDS if columns.get(field) in names), ())


def with_names(row: Row, names: Sequence[str]) -> Row:
    """A canonical row with names in place of whole-number labels. RecipeError for a number without one."""
    field = next(field for field in _FIELDS if field in row.values)
    value = row.values[field]
    if isinstance(value, list | tuple):
        return Row({**row.values, field: [_named(row, item, names) for item in value]}, row.file, row.number)
    return Row({**row.values, field: _named(row, value, names)}, row.file, row.number)


def _named(row: Row, label: Any, names: Sequence[str]) -> Any:
    if not isinstance(label, int) or isinstance(label, bool) or label == IGNORED:
        return label
    if not 0 <= label < len(names):
        message = f"label {label} is none of the {len(names)} classes that the data set declares"
        raise bad_row(row, message, "-1 marks rows without a label: leave them out")
    return names[label]


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
    if all(DECIMAL.fullmatch(name) for name in names):  # from a CSV, where all is text
        message = "the labels are decimal numbers, and classes are whole numbers or names"
        raise RecipeError(Problem("labels", message, file=file, hint=REGRESSION_HINT))
    return tuple(sorted(names))


def label_twins(labels: Iterable[str]) -> list[list[str]]:
    """Labels that differ only in case and spaces."""
    alike: dict[str, list[str]] = {}
    for label in labels:
        alike.setdefault(" ".join(label.split()).casefold(), []).append(label)
    return [names for names in alike.values() if len(names) > 1]
