"""`fixes`: the known fixes."""

from __future__ import annotations

from launcher.errors import Problem, RecipeError
from launcher.machine.requirements import holds
from launcher.machine.software import installed_versions
from launcher.planner.fixes import FIXES
from launcher.recipe.suggestions import choice_hint
from launcher.report.outcome import Outcome
from launcher.report.tables import table

SHOWN = ("id", "title", "condition", "action", "reason", "source", "versions")


def fixes_command(id: str | None) -> Outcome:
    """List the fixes, or show one. A fix is expired if its versions exclude the installed ones."""
    chosen = [fix for fix in FIXES if id in (None, fix.id)]
    if id is not None and not chosen:
        hint = choice_hint(id, [fix.id for fix in FIXES]) or "`effilaunch fixes` lists them"
        raise RecipeError(Problem("unknown-fix", f"no fix has the id {id!r}", hint=hint))
    installed = installed_versions()
    data = [
        {**{key: getattr(fix, key) for key in SHOWN}, "expired": not holds(fix.versions, installed)}
        for fix in chosen
    ]
    if id is None:
        rows = [(fix["id"], "expired" if fix["expired"] else fix["action"], fix["title"]) for fix in data]
        lines = table(rows, indent="")
    else:
        lines = [f"{key:10s} {value}" for key, value in data[0].items()]
    return Outcome({"fixes": data}, "\n".join(lines))
