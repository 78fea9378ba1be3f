"""The known fixes: one visible tuple, in the order in which they are applied."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from launcher.errors import Problem, RecipeError
from launcher.machine.requirements import holds
from launcher.plan.draft import Draft
from launcher.plan.plan import AppliedFix
from launcher.planner.fixes.adapters import ADAPTER_FIXES
from launcher.planner.fixes.devices import DEVICE_FIXES
from launcher.planner.fixes.fix import Fix, Situation
from launcher.planner.fixes.launching import LAUNCHING_FIXES
from launcher.planner.fixes.packing import PACKING_FIXES
from launcher.planner.fixes.precision import PRECISION_FIXES

_GROUPS = (*PRECISION_FIXES, *ADAPTER_FIXES, *DEVICE_FIXES, *LAUNCHING_FIXES, *PACKING_FIXES)
FIXES: tuple[Fix, ...] = tuple(sorted(_GROUPS, key=lambda fix: not fix.early))
"""In the order of application: first those that run before sizes are chosen, each in its group's order."""


def apply_fixes(situation: Situation, disabled: list[str], *, early: bool) -> list[AppliedFix]:
    """Apply the early or the late fixes to the draft; raise RecipeError with all refusals at once.

    A value of the recipe is never replaced: the fix refuses, naming both, or yields with a warning.
    A fix that is not for the installed versions is left out.
    """
    applied: list[AppliedFix] = []
    problems: list[Problem] = []
    draft = situation.draft
    for fix in FIXES:
        if fix.early != early or fix.id in disabled or not holds(fix.versions, situation.versions):
            continue
        wanted = fix.changes(situation)
        if not wanted:
            continue
        clash = [k for k, v in wanted.items() if draft.explicit(k) and _replaces(draft.at(k), v)]
        if fix.action == "refuse" or (fix.action == "set" and clash and not fix.yields):
            places = wanted if fix.action == "refuse" else clash[:1]
            problems += [_problem(situation, fix, dotted) for dotted in places]
            continue
        if fix.action == "warn":
            draft.warn(f"{fix.title}: {fix.reason} ({fix.hint})")
        changed = _set(draft, fix, wanted, clash) if fix.action == "set" else {}
        if changed or fix.action == "warn":  # a recipe that has the value needs no fix
            applied.append(AppliedFix(fix.id, fix.title, fix.reason, fix.source, changed))
    if problems:
        raise RecipeError(problems)
    return applied


def _set(draft: Draft, fix: Fix, wanted: Mapping[str, object], clash: Collection[str]) -> dict[str, object]:
    """Set what the recipe leaves open, warn about the rest; return what was set."""
    changed = {}
    for dotted, value in wanted.items():
        old = draft.at(dotted)
        if dotted in clash:
            draft.warn(f"{fix.title}: {dotted} stays {_text(old)}, as set in the recipe. {fix.reason}")
        elif not draft.explicit(dotted) or old != value:
            draft.put(dotted, value, fix.reason, source="fix", by=fix.id)
            changed[dotted] = value
    return changed


def _text(value: object) -> str:
    """A value as YAML writes it."""
    return json.dumps(value) if isinstance(value, (bool, Mapping)) else str(value)


def _replaces(old: object, new: object) -> bool:
    """Whether `new` loses something of `old`; a mapping that only gains keys does not."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return any(key not in new or new[key] != value for key, value in old.items())
    return bool(old != new)


def check_disabled(draft: Draft, disabled: list[str]) -> list[Problem]:
    """Ids under `fixes.disable` that no fix has, each with the nearest that one has."""
    known = [fix.id for fix in FIXES]
    problems = []
    for name in disabled:
        if name not in known:
            from difflib import get_close_matches

            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "`effilaunch fixes` lists them"
            message = f"no fix has the id {name!r}"
            problems.append(draft.problem("unknown-fix", "fixes.disable", message, hint))
    return problems


def _problem(situation: Situation, fix: Fix, dotted: str) -> Problem:
    hint = f"{fix.hint or f'drop {dotted}'}; `fixes: {{disable: [{fix.id}]}}` accepts it"
    return situation.draft.problem(f"fix-{fix.id}", dotted, f"{fix.title}: {fix.reason}", hint)
