"""A run that was adapted to the memory that there is: its record, and its run directory before the next try.

The record stands in plan.json, beside the plan that it explains: both are written at once.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.execute.run_dir import unwritable, write_run_dir
from launcher.facts.atomic_writes import write_text
from launcher.facts.checkpoint import ORIGIN
from launcher.facts.user_files import exists, is_after, parse_json, read_lines
from launcher.facts.user_files import read_record as read_object
from launcher.render.bundle import Bundle, dump_json

KEY = "adapted"
"""The record's name in plan.json."""

_KEPT = ("plan.json", "ds_config.json", "accelerate.yaml", "command.sh")
"""Files of a try that the next one writes anew."""


@dataclass(frozen=True, slots=True)
class Record:
    """All that `on_oom: adapt` has changed in a run."""

    changes: Mapping[str, Any]
    """Dotted recipe key -> value, None where the key is taken away: the recipe with them gives the plan."""
    adaptations: tuple[Mapping[str, Any], ...]
    """One object a try: step, resumed_from, changed {setting: [old, new]}, reason."""


def read_record(run_dir: Path) -> Record | None:
    """What was adapted in this run; None where nothing was, or where there is no plan.

    RecipeError (`record-unreadable`) for a plan that cannot be read: the next one replaces it.
    """
    path = run_dir / "plan.json"
    if not exists(path):
        return None
    found = read_object(path).get(KEY)
    if found is None:
        return None
    try:
        return Record(dict(found["changes"]), tuple(found["adaptations"]))
    except (TypeError, KeyError, ValueError) as error:
        raise RecipeError(Problem("record-unreadable", f"{KEY} is damaged: {error!r}", str(path))) from error


def with_record(bundle: Bundle, record: Record | None) -> Bundle:
    """The bundle whose plan.json says what was adapted."""
    if record is None:
        return bundle
    plan = json.loads(bundle.files["plan.json"])
    plan[KEY] = {"changes": dict(record.changes), "adaptations": list(record.adaptations)}
    return replace(bundle, files={**bundle.files, "plan.json": dump_json(plan)})


def earlier_settings(run_dir: Path) -> list[dict[str, Any]]:
    """Setting -> value of each try's plan, the first one first. Raises ValueError for a broken plan."""
    earlier = sorted(run_dir.glob("plan-*.json"), key=lambda file: (len(file.name), file.name))
    plans = [parse_json(file.read_text("utf-8")) for file in (*earlier, run_dir / "plan.json")]
    return [{key: setting["value"] for key, setting in plan["settings"].items()} for plan in plans]


def write_next_try(bundle: Bundle, run_dir: Path, *, keeps_checkpoints: bool) -> str | None:
    """Write the files of the next try; those of the last one stay as plan-1.json, plan-2.json and so on.

    Checkpoints that cannot be continued are put aside, with the metrics that led to them. Returns the name of
    the folder that they lie in then; None where none were moved. Raises as `write_run_dir`.
    """
    number = 1 + len(list(run_dir.glob("plan-*.json")))
    aside = None
    try:
        for name in _KEPT:  # first, since these need room
            old = run_dir / name
            if old.is_file() and old.read_text("utf-8") != bundle.files.get(name):
                write_text(old.with_name(f"{old.stem}-{number}{old.suffix}"), old.read_text("utf-8"))
                if name not in bundle.files:
                    old.unlink()
        if not keeps_checkpoints:
            aside = _put_aside(run_dir, number)
    except OSError as error:
        raise unwritable(run_dir, error) from error
    write_run_dir(bundle, run_dir, resume=True)
    return aside


def _put_aside(run_dir: Path, number: int) -> str | None:
    metrics, checkpoints = run_dir / "metrics.jsonl", run_dir / "checkpoints"
    if metrics.is_file():
        metrics.rename(run_dir / f"metrics-{number}.jsonl")
    aside = None
    if any(checkpoints.glob("checkpoint-*")):
        aside = f"checkpoints-{number}"
        checkpoints.rename(run_dir / aside)
    # It cannot be continued either; last, since a renaming that fails leaves the run as it was.
    (run_dir / ORIGIN).unlink(missing_ok=True)
    return aside


def last_step(run_dir: Path) -> int:
    """The last step that the run has logged; 0 where there is none."""
    last = 0
    with contextlib.suppress(OSError):
        for _, row in read_lines(run_dir / "metrics.jsonl"):
            if row is not None and is_after(row, last) and isinstance(row["step"], int):
                last = row["step"]
    return last
