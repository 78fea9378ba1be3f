"""The known fixes: one visible tuple, in the order in which they are applied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.plan.fixes.adapters import ADAPTER_FIXES
from launcher.plan.fixes.devices import DEVICE_FIXES
from launcher.plan.fixes.fix import Fix, Situation
from launcher.plan.fixes.packing import PACKING_FIXES
from launcher.plan.fixes.precision import PRECISION_FIXES
from launcher.plan.plan import AppliedFix

FIXES: tuple[Fix, ...] = (*PRECISION_FIXES, *ADAPTER_FIXES, *DEVICE_FIXES, *PACKING_FIXES)


def apply_fixes(situation: Situation, disabled: list[str], *, early: bool) -> list[AppliedFix]:
    """Apply the early or the late fixes to the draft; raise RecipeError with all refusals at once.

    A fix that would replace an explicit value of the recipe refuses instead, naming both.
    """
    applied: list[AppliedFix] = []
    problems: list[Problem] = []
    draft = situation.draft
    for fix in FIXES:
        if fix.early != early or fix.id in disabled:
            continue
        changes = dict(fix.changes(situation))
        if not changes:
            continue
        if fix.action == "set":
            clash = [k for k, v in changes.items() if draft.explicit(k) and _replaces(draft.get(k), v)]
            if clash:
                problems.append(_problem(situation, fix, clash[0]))
                continue
            for dotted, value in changes.items():
                if not draft.explicit(dotted) or draft.get(dotted) != value:
                    draft.put(dotted, value, fix.reason, source="fix", by=fix.id)
        elif fix.action == "refuse":
            problems.append(_problem(situation, fix, next(iter(changes))))
            continue
        else:
            draft.warnings.append(f"{fix.title}: {fix.reason} ({fix.hint})")
            changes = {}
        applied.append(AppliedFix(fix.id, fix.title, fix.reason, fix.source, changes))
    if problems:
        raise RecipeError(problems)
    return applied


def _replaces(old: Any, new: Any) -> bool:
    """Whether `new` loses something of `old`; a mapping that only gains keys does not."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return any(key not in new or new[key] != value for key, value in old.items())
    return bool(old != new)


def check_disabled(disabled: list[str]) -> list[Problem]:
    """Ids under `fixes.disable` that no fix has."""
    known = {fix.id for fix in FIXES}
    return [
        Problem(
            "unknown-fix",
            f"no fix has the id {name!r}",
            path="fixes.disable",
            hint="`effilaunch fixes` lists them",
        )
        for name in disabled
        if name not in known
    ]


def _problem(situation: Situation, fix: Fix, dotted: str) -> Problem:
    file, line = situation.draft.place(dotted)
    hint = fix.hint or f"drop {dotted}"
    return Problem(
        f"fix-{fix.id}",
        f"{fix.title}: {fix.reason}",
        file=file,
        line=line,
        path=dotted,
        hint=f"{hint}; `fixes: {{disable: [{fix.id}]}}` accepts it",
    )
