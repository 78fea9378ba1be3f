"""`validate`: all problems of recipes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launcher.errors import DoesNotFit, EffilaunchError, Problem, RecipeError, printable
from launcher.inputs.first_rows import judged_data
from launcher.inputs.planning_facts import (
    check_model,
    gather,
    operator_warnings,
    recipe_hardware,
)
from launcher.planner.elastic import plan_on
from launcher.recipe.loading import LoadedRecipe, load_recipe
from launcher.report.outcome import Outcome


def validate_command(recipes: Sequence[str], overrides: Sequence[str] = ()) -> Outcome:
    """List all problems of the recipes with these overrides; what only this machine lacks is a warning."""
    problems: list[Problem] = []
    checked: list[dict[str, Any]] = []
    lines: list[str] = []
    for name in recipes:
        found: list[Problem] = []
        warnings: list[str] = []
        try:
            loaded = load_recipe(name, overrides)
            warnings, _ = judged_data(loaded, None)
            warnings += map(str, loaded.of_jobs)
            if loaded.recipe.launch.hostfile:
                from launcher.schedulers.hostfile import hostfile_warnings

                written_for = recipe_hardware(loaded.recipe) if loaded.recipe.hardware else None
                warnings += hostfile_warnings(loaded.recipe, written_for)
            warnings += _try_plan(loaded)
        except EffilaunchError as error:
            from launcher.importing.importers import naming_tools  # few recipes need the tools' tables

            found = naming_tools(error.problems)
        problems += found
        checked.append({"recipe": name, "valid": not found, "warnings": warnings})
        lines.append(f"{printable(name)}: {'valid' if not found else f'{len(found)} problem(s)'}")
        lines += [f"  warning: {warning}" for warning in warnings]
    code = RecipeError.exit_code if problems else 0
    return Outcome({"recipes": checked}, "\n".join(lines), problems, code)


def _try_plan(loaded: LoadedRecipe) -> list[str]:
    """Plan for the recipe's own hardware, without the network: a plan that does not fit is a warning."""
    try:
        if loaded.recipe.hardware is None:
            check_model(loaded.recipe)
            return []
        loaded, facts = gather(loaded, None, allow_network=False, allow_torch=False)
        warnings = operator_warnings(plan_on(loaded, facts))
    except DoesNotFit as error:
        return [problem.message for problem in error.problems]
    except RecipeError as error:
        if {p.code for p in error.problems} <= {"model-config-missing", "not-in-closed-form"}:
            return [problem.message for problem in error.problems]
        raise
    return warnings
