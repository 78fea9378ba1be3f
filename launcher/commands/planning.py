"""`plan` and `validate`: nothing here opens data, weights or devices."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from launcher.commands.gather import data_problems, gather
from launcher.errors import DoesNotFit, EffilaunchError, Problem, RecipeError
from launcher.plan.planner import make_plan
from launcher.recipe.hooks import read_hooks
from launcher.recipe.loading import LoadedRecipe, load_recipe
from launcher.render.bundle import Bundle, render
from launcher.report.outcome import Outcome
from launcher.report.text import explain_text, plan_text


def bundle_json(bundle: Bundle) -> dict[str, Any]:
    """The keys of `plan --json`: plan.json plus the files."""
    return {**json.loads(bundle.files["plan.json"]), "files": dict(bundle.files)}


def plan_command(recipe: str, overrides: Sequence[str], on: str | None, explain: str | None) -> Outcome:
    """The whole plan; with `explain`, where one value came from. Exit 3 shows the nearest miss."""
    loaded, facts = gather(load_recipe(recipe, overrides), on)
    problems: Sequence[Problem] = ()
    try:
        bundle = render(make_plan(loaded, facts))
    except DoesNotFit as error:
        bundle, problems = render(error.nearest_miss), error.problems
    code = DoesNotFit.exit_code if problems else 0
    if explain is None:
        return Outcome(bundle_json(bundle), plan_text(bundle), problems, code)
    text = explain_text(bundle.plan, explain)
    if not text.strip():
        raise RecipeError(
            Problem(
                "unknown-setting",
                f"the plan has no setting {explain!r}",
                path=explain,
                hint="`plan --json` lists all settings",
            )
        )
    data = bundle_json(bundle)
    settings = data["settings"].items()
    chosen = {k: v for k, v in settings if not explain or (k + ".").startswith(explain + ".")}
    return Outcome({"settings": chosen}, text, problems, code)


def validate_command(recipes: Sequence[str]) -> Outcome:
    """All problems of the recipes; what is absent on this machine is a warning."""
    problems: list[Problem] = []
    checked: list[dict[str, Any]] = []
    lines: list[str] = []
    for name in recipes:
        found: list[Problem] = []
        warnings: list[str] = []
        try:
            loaded = load_recipe(name)
            if loaded.recipe.python:
                read_hooks(loaded.recipe.python)
            warnings = [f"{p.path}: {p.message}" for p in data_problems(loaded)]
            warnings += _try_plan(loaded)
        except EffilaunchError as error:
            found = error.problems
        problems += found
        checked.append({"recipe": name, "valid": not found, "warnings": warnings})
        lines.append(f"{name}: {'valid' if not found else f'{len(found)} problem(s)'}")
        lines += [f"  warning: {warning}" for warning in warnings]
    code = RecipeError.exit_code if problems else 0
    return Outcome({"recipes": checked}, "\n".join(lines), problems, code)


def _try_plan(loaded: LoadedRecipe) -> list[str]:
    """Plan on the recipe's own hardware, from local facts: refusals are problems, size is a warning."""
    if loaded.recipe.hardware is None:
        return []
    try:
        loaded, facts = gather(loaded, None, allow_network=False)
        make_plan(loaded, facts)
    except DoesNotFit as error:
        return [problem.message for problem in error.problems]
    except RecipeError as error:
        if {p.code for p in error.problems} <= {"model-config-missing"}:
            return [problem.message for problem in error.problems]
        raise
    return []
