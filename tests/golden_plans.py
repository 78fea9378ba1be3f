"""Golden plans on disk: `common.json` holds what most plans share, each plan's file what is its own.

A plan's file has the settings and variables that differ from the common ones and, under `absent`, the common
keys that the plan does not have. Both files together are the whole plan, which is what tests compare.
"""

from __future__ import annotations

import difflib
import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden"
SECTIONS = ("env", "settings")
"""Sections of a plan whose keys are shared."""
ABSENT = "absent"
NO_KEY = ""
"""Stands for the absence of a key where values are counted as JSON; no JSON text is empty."""

Plan = dict[str, Any]


def text_of(plan: Mapping[str, Any]) -> str:
    """The form in which plans are written and compared."""
    return json.dumps(plan, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def whole_plans(folder: Path = GOLDEN) -> dict[str, Plan]:
    """Name of a recipe -> its golden plan with all settings."""
    common = _common(folder)
    return {file.stem: _whole(_read(file), common) for file in sorted((folder / "plans").glob("*.json"))}


def difference(name: str, planned: Plan, folder: Path = GOLDEN) -> str:
    """The diff from the whole golden plan to the planned one; empty if they are equal."""
    golden = text_of(_whole(_read(folder / "plans" / f"{name}.json"), _common(folder)))
    lines = (golden.splitlines(), text_of(planned).splitlines())
    return "\n".join(difflib.unified_diff(*lines, "golden", "planned now", lineterm=""))


def update(changed: Mapping[str, Plan], removed: Iterable[str] = (), folder: Path = GOLDEN) -> None:
    """Write changed plans, remove others, and renew what is common to all that are left."""
    with _locked(folder):
        plans = {**whole_plans(folder), **changed}
        for name in removed:
            del plans[name]
            (folder / "plans" / f"{name}.json").unlink()
        for file, text in files_of(plans, folder).items():
            if not file.is_file() or file.read_text(encoding="utf-8") != text:
                file.parent.mkdir(exist_ok=True)
                file.write_text(text, encoding="utf-8")


def files_of(plans: Mapping[str, Plan], folder: Path = GOLDEN) -> dict[Path, str]:
    """File -> the text that it should have for these plans."""
    common = _most_frequent(list(plans.values()), _common(folder))
    own = {folder / "plans" / f"{name}.json": text_of(_own(plan, common)) for name, plan in plans.items()}
    return {folder / "common.json": text_of(common), **own}


def _most_frequent(plans: list[Plan], before: Plan) -> Plan:
    """The value that most plans have of each key; a key that most plans do not have is left out.

    Of equally frequent values the one stays that was common before: one changed plan rewrites no others.
    """
    common: Plan = {}
    for section in SECTIONS:
        common[section] = {}
        for key in sorted({key for plan in plans for key in plan[section]}):
            counts = Counter(_value(plan, section, key) for plan in plans)
            most = sorted(value for value, count in counts.items() if count == max(counts.values()))
            kept = _value(before, section, key)
            chosen = kept if kept in most else most[0]
            if chosen != NO_KEY:
                common[section][key] = json.loads(chosen)
    return common


def _value(plan: Plan, section: str, key: str) -> str:
    values = plan.get(section, {})
    return json.dumps(values[key], sort_keys=True) if key in values else NO_KEY


def _own(plan: Plan, common: Plan) -> Plan:
    """What a plan's file holds."""
    own = dict(plan)
    absent = {}
    for section in SECTIONS:
        own[section] = {
            key: value
            for key, value in plan[section].items()
            if _value(plan, section, key) != _value(common, section, key)
        }
        if missing := sorted(common[section].keys() - plan[section].keys()):
            absent[section] = missing
    return {**own, ABSENT: absent} if absent else own


def _whole(own: Plan, common: Plan) -> Plan:
    """The inverse of `_own`."""
    absent = own.get(ABSENT, {})
    plan = {section: value for section, value in own.items() if section != ABSENT}
    for section in SECTIONS:
        gone = absent.get(section, [])
        shared = {key: value for key, value in common.get(section, {}).items() if key not in gone}
        plan[section] = shared | own[section]
    return plan


def _common(folder: Path) -> Plan:
    file = folder / "common.json"
    return _read(file) if file.is_file() else {}


def _read(file: Path) -> Plan:
    return json.loads(file.read_text(encoding="utf-8"))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Alone among the test processes: each updates the plans of its tests, all renew common.json."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
