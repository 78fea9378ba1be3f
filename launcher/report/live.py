"""Render the progress of a run as one line of a terminal or as lines of a log. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.facts.rank_status import amount, of_total
from launcher.report.screen import columns_of, cut, flat
from launcher.report.tables import duration, gib

_BAR = 20
"""Columns of a bar, between its brackets."""
_LONG_S = 5.0
"""A phase without a bar that takes longer is shown with its time."""
_LONG_STEP_S = 30.0
"""The same for a training step."""
_REWARDS = ("rewards/accuracies", "rewards/margins")
"""Metrics of preference training shown next to the loss."""
_OF_AN_EVALUATION = (
    "eval_runtime",
    "eval_samples_per_second",
    "eval_steps_per_second",
    "eval_jit_compilation_time",
)
_DOING = {
    "start": "starting",
    "prepare": "preparing the data",
    "load": "loading",
    "skip": "skipping rows that were trained on",
    "evaluate": "evaluating",
    "save": "saving",
    "finish": "finishing",
}


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in use and planned, bytes."""

    of: str
    """GPU: the fullest device; host: the processes of this machine."""
    used: int
    planned: int


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of a run."""

    phase: str = "start"
    for_s: float = 0.0
    """Seconds since the phase or the step began."""
    step: int = 0
    steps: int | None = None
    left_s: float | None = None
    """Seconds until the last step."""
    loss: float | None = None
    """Of the last row that has one; nan where that was not finite."""
    speed: str = ""
    memory: Memory | None = None
    restarts: int = 0
    title: str = ""
    """What takes long at present, such as loading weights; `done` of `total` in `unit`."""
    done: float = 0
    total: float | None = None
    unit: str = ""


def live_line(now: Moment, columns: int) -> str:
    """As much as fits, the most important first; empty when all ranks have ended."""
    if now.phase == "ended":
        return ""
    if now.steps is None:
        parts = [_doing(now)]
    else:
        parts = [f"step {now.step:,}/{now.steps:,}"]
        parts += [_doing(now)] if now.phase != "train" or now.title else []
        loss = "" if now.loss is None else f"loss {_number(now.loss)}"
        parts += [loss, _left(now), _this_step(now), _memory(now), now.speed]
    parts.append(_restarts(now.restarts))
    return _joined(parts, columns)


def _joined(parts: Sequence[str], columns: int) -> str:
    shown = ""
    for part in filter(None, parts):
        longer = f"{shown} · {part}" if shown else part
        if shown and columns_of(longer) > columns:
            continue
        shown = longer
    return cut(shown, columns)


def _doing(now: Moment) -> str:
    """What takes long: with a bar where its length is known, else with the amount done."""
    if not now.title:
        doing = _DOING.get(now.phase, "")
        return f"{doing}, {duration(now.for_s)}" if doing and now.for_s >= _LONG_S else doing
    title, unit = flat(now.title), flat(now.unit)
    if not now.total:
        return f"{title}: {amount(now.done, unit)}" if now.done else title
    share = min(max(now.done / now.total, 0.0), 1.0)
    bar = "#" * round(_BAR * share)
    return f"{title} [{bar:.<{_BAR}}] {share:.0%}, {of_total(now.done, now.total, unit)}"


def _this_step(now: Moment) -> str:
    shown = now.phase == "train" and not now.title and now.for_s >= _LONG_STEP_S
    return f"this step {duration(now.for_s)} so far" if shown else ""


def _left(now: Moment) -> str:
    return "" if now.left_s is None else f"{duration(now.left_s)} left"


def _memory(now: Moment) -> str:
    memory = now.memory
    return "" if memory is None else f"{memory.of} {gib(memory.used)} of {gib(memory.planned)} planned"


def _restarts(count: int) -> str:
    return f"restarted {count} time{'' if count == 1 else 's'}" if count else ""


def row_line(row: Mapping[str, Any], now: Moment) -> str:
    """A row of metrics.jsonl as a line that stays."""
    step = f"step {row.get('step', 0):,}" + (f"/{now.steps:,}" if now.steps else "")
    if "loss" not in row:
        scores = [
            f"{name} {_number(value)}"
            for name, value in row.items()
            if name.startswith("eval_") and name not in _OF_AN_EVALUATION
        ]
        return f"{step}: evaluated: {', '.join(scores)}"
    named = {
        "loss": row["loss"],
        "learning rate": row.get("learning_rate"),
        "gradients": row.get("grad_norm"),
    }
    parts = [
        f"{name} {_number(value)}" for name, value in named.items() if value is not None or name == "loss"
    ]
    parts += [f"{name} {_number(row[name])}" for name in _REWARDS if name in row]
    parts += [now.speed, _left(now), _memory(now), _restarts(now.restarts)]
    return f"{step}: {', '.join(filter(None, parts))}"


def _number(value: Any) -> str:
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.4g}"
