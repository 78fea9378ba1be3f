"""Peaks that others measured on GPUs, and what they say fits: records/memory_published.json as plans.

A figure is what torch allocated, what its allocator reserved, or what the device showed as used; it is
compared with the estimate of the same: without context and NCCL's buffers for the first two, without what the
allocator loses between its blocks for the first. The other two are of a whole run: where loading needs more
than training, they are of that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from memory_rows import FORMATS, make
from records import RECORDS, read_record

from launcher.errors import RecipeError
from launcher.machine.hardware import MIB, parse_hardware
from launcher.memory.estimate import MemoryEstimate
from launcher.models.model import read_model_spec
from launcher.models.model_config import shipped_model_config
from launcher.plan.plan import Plan

RECORD = RECORDS / "memory_published.json"


@dataclass(frozen=True, slots=True)
class Published:
    """A row of the record."""

    row: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.row["name"])

    @property
    def half(self) -> str:
        """tuning | held-out, by the name; rows that were looked at before the split say so."""
        odd = hashlib.sha256(self.name.encode()).digest()[0] % 2
        return str(self.row.get("half") or ("held-out" if odd else "tuning"))

    @property
    def counts(self) -> str:
        """allocated | reserved | device: what the figure is of."""
        return str(self.row["figure"]["counts"])

    @property
    def measured_bytes(self) -> int:
        return int(self.row["figure"]["gib"] * 2**30)

    @property
    def alike(self) -> bool:
        """Trained as by transformers' Trainer, and settled by its source; FSDP may be version 1."""
        return not set(self.row["apart"]) - {"fsdp1"}

    def apart(self, estimate: MemoryEstimate) -> int:
        """Bytes to add to an estimate for what a figure counts: tensors alone, or another context."""
        if self.counts != "device":
            return -estimate.components.outside
        published = self.row["figure"].get("context_mib")
        return 0 if published is None else published * MIB - estimate.components.context

    def plan(self) -> Plan:
        if self.counts != "allocated":
            return plan_of_row(self.row)
        recipe = {**self.row["recipe"], "launch": {}}  # nothing is lost between blocks
        return plan_of_row({**self.row, "recipe": recipe})


def plan_of_row(row: Mapping[str, Any]) -> Plan:
    """The plan of the recipe of a row, or of a verdict, on its hardware; also where it does not fit."""
    recipe = json.loads(json.dumps(row["recipe"]))
    task = recipe.setdefault("task", "causal-lm")
    config = {**(shipped_model_config(row["model"]) or {}), **row["config"]}
    recipe.setdefault("model", {})["config"] = config
    form = "text" if task == "causal-lm" else FORMATS.get(task, "prompt-completion")
    recipe.setdefault("data", {})["train"] = [{"path": "random", "format": form}]
    recipe.setdefault("trainer", {})["max_steps"] = 10
    spec = read_model_spec(row["model"], config, "shipped facts", task)
    found = make(recipe, spec, parse_hardware(row["hardware"]))
    if row.get("keeps_gradients"):
        return replace(found, job=replace(found.job, accumulation=None))
    return found


def planned(half: str = "all") -> Iterator[tuple[Published, Plan | RecipeError]]:
    """Rows of one half, or of both, with their plans; a model type without a closed form has an error."""
    for one in map(Published, read_record(RECORD)["rows"]):
        if half not in ("all", one.half):
            continue
        try:
            yield one, one.plan()
        except RecipeError as error:
            yield one, error


def published_verdicts() -> Iterator[Mapping[str, Any]]:
    """What sources say fits (`fits`), or runs out of memory."""
    yield from read_record(RECORD)["verdicts"]
