"""Rows made up for `--tiny`, in the format of a source."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from launcher.recipe.field_tables import TASK_FORMATS
from launcher.rows.own_formats import OWN_FORMATS
from launcher.rows.sources import Row
from launcher.tasks import FORMATS, task_named
from launcher.train.tiny import MAKERS, ROWS


def tiny_rows(source: Mapping[str, Any], task: str, loss_on: str | None = None) -> list[Row]:
    """64 generated rows in the format of a source, with the format's own names as columns.

    For `auto` that is the task's first format that has the fields of the source's `columns` and supports
    `data.loss_on`.
    """
    asked = source.get("format") or "auto"
    fmt = _likely_format(source.get("columns") or {}, task, loss_on) if asked == "auto" else asked
    draw = random.Random(0)
    make = MAKERS.get(fmt) or OWN_FORMATS[fmt].make
    made = (make(draw, index) for index in range(ROWS))
    return [Row(values, str(source["path"]), number) for number, values in enumerate(made, start=1)]


def _likely_format(columns: Mapping[str, str], task: str, loss_on: str | None) -> str:
    for fmt in TASK_FORMATS[task]:
        learns = loss_on is None or loss_on in task_named(task).learns.get(fmt, (loss_on,))
        if learns and set(columns) <= set(FORMATS[fmt].fields):
            return fmt
    return TASK_FORMATS[task][0]
