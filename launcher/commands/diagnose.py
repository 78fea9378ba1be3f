"""`diagnose`: why a run failed, and the recipe lines to change."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launcher.errors import Problem, RecipeError
from launcher.files.redaction import hide_in, hider, secret_values
from launcher.files.shipped import recipes_dir
from launcher.knowledge.diagnose.findings import Diagnosis
from launcher.knowledge.diagnose.given import diagnose_files
from launcher.knowledge.diagnose.patch import write_fixed
from launcher.report.diagnosis_sections import diagnosis_text
from launcher.report.outcome import Outcome


def diagnose_command(paths: Sequence[str], *, apply: bool) -> Outcome:
    """Diagnose run directories and logs; with `apply`, write the fixed recipe next to the original."""
    diagnosis, recipe = diagnose_files(paths)
    shown = shown_diagnosis(diagnosis)
    if not apply:
        return shown
    try:
        fixed = str(_apply(diagnosis, recipe))
    except RecipeError as error:  # the diagnosis is shown anyway
        return replace(shown, problems=error.problems, exit_code=RecipeError.exit_code)
    return Outcome({**shown.data, "mended": fixed}, f"{shown.text}\nwrote {fixed}\n")


def shown_diagnosis(diagnosis: Diagnosis) -> Outcome:
    """A diagnosis without secrets."""
    hide = hider(secret_values(os.environ))
    return Outcome(dict(hide_in(diagnosis.to_json(), hide)), hide(diagnosis_text(diagnosis)))


def _apply(diagnosis: Diagnosis, recipe: Path | None) -> Path:
    """Write the fixed recipe and return its path. Raises RecipeError if there is nothing to write."""
    if recipe is None:
        message, hint = "--apply needs a recipe", "name the run directory of the failed run"
        raise RecipeError(Problem("no-recipe", message, hint=hint))
    edited = [finding for finding in diagnosis.findings if finding.recipe]
    if not edited:
        message, hint = "no change of the recipe is known to fix this", "apply the fix above manually"
        raise RecipeError(Problem("nothing-to-apply", message, str(recipe), hint=hint))
    changes = {edit.path: edit.new for edit in edited[0].recipe}
    shipped = recipe.resolve().is_relative_to(recipes_dir().resolve())
    return write_fixed(recipe, Path.cwd() if shipped else recipe.parent, changes)
