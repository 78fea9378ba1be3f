"""Rows that are tokenised already: their documents, checked but for the vocabulary."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from launcher.rows.class_names import IGNORED
from launcher.rows.sources import Row, bad_row, kind_of

_ALIGNED = f"a label is the id of its own place, or {IGNORED}: the model shifts them itself"
_NO_PADDING = f"leave padding out, or give it attention_mask 0 and the label {IGNORED}"
_POSITIONS = "leave position_ids out; those of joined documents begin with 0 at each document"


def shape_token_ids(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    """{documents: a list of (input_ids, labels), each as long as the other}, without padding.

    A row whose position_ids begin again with 0 holds several documents.
    """
    ids, labels = _integers(row, columns["input_ids"]), _integers(row, columns["labels"])
    given = {"labels": labels}
    for name in ("attention_mask", "position_ids"):
        if name in columns and row.values.get(columns[name]) is not None:
            given[name] = _integers(row, columns[name])
    for name, values in given.items():
        if len(values) != len(ids):
            message = f"{columns[name]} has {len(values)} values for {len(ids)} of {columns['input_ids']}"
            raise bad_row(row, message, "give one for each token")
    wrong = [at for at, label in enumerate(labels) if label not in (IGNORED, ids[at])]
    mask = given.get("attention_mask", [1] * len(ids))
    begin, end = _unpadded(row, columns, mask)
    if any(label != IGNORED for label in (*labels[:begin], *labels[end:])):
        raise bad_row(row, f"{columns['labels']} holds labels of padding", _NO_PADDING)
    if wrong:
        at = wrong[0]
        message = f"{columns['labels']}[{at}] is {labels[at]}, and {columns['input_ids']}[{at}] is {ids[at]}"
        raise bad_row(row, message, _ALIGNED)
    starts = _starts(row, columns, given.get("position_ids", [])[begin:end])
    bounds = pairwise([*(begin + start for start in starts), end])
    return {"documents": [(ids[start:stop], labels[start:stop]) for start, stop in bounds]}


def _integers(row: Row, column: str) -> list[int]:
    """The whole numbers of a column."""
    value = row.values.get(column)
    if not isinstance(value, list | tuple):
        raise bad_row(row, f"column {column} holds {kind_of(value)}, expected a list of whole numbers")
    others = [one for one in value if type(one) is not int]
    if others:
        raise bad_row(row, f"the list in column {column} holds {kind_of(others[0])}, expected whole numbers")
    return list(value)


def _unpadded(row: Row, columns: Mapping[str, str], mask: list[int]) -> tuple[int, int]:
    """Where the tokens that are no padding begin and end."""
    begin = mask.index(1) if 1 in mask else len(mask)
    end = len(mask) - mask[::-1].index(1) if 1 in mask else begin
    if set(mask) - {0, 1} or 0 in mask[begin:end]:
        message = f"{columns['attention_mask']} hides tokens between others; expected 0 for padding alone"
        raise bad_row(row, message, "leave the tokens out, or mask their labels")
    return begin, end


def _starts(row: Row, columns: Mapping[str, str], positions: list[int]) -> list[int]:
    """Where documents begin; at the first token without positions."""
    starts = [at for at, position in enumerate(positions) if position == 0] or [0]
    expected = [at for start, stop in pairwise([*starts, len(positions)]) for at in range(stop - start)]
    if positions and (starts[0] != 0 or positions != expected):
        message = f"{columns['position_ids']} does not count the tokens of each document from 0"
        raise bad_row(row, message, _POSITIONS)
    return starts


def made_up_token_ids(draw: random.Random, index: int) -> dict[str, Any]:
    """A row of ids that every tokenizer has: a question of three tokens, and its answer."""
    ids = [draw.randint(5, 30) for _ in range(8)]
    return {"input_ids": ids, "labels": [IGNORED] * 3 + ids[3:]}
