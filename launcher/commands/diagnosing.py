"""`diagnose`: what a failed run died of, and the recipe lines to change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launcher.diagnose.examine import diagnose
from launcher.diagnose.findings import Diagnosis
from launcher.diagnose.patch import edits, write_mended
from launcher.diagnose.run_dir import is_run_dir
from launcher.errors import Problem, RecipeError
from launcher.facts.shipped import recipes_dir
from launcher.failures import FAILURES
from launcher.report.diagnosis_text import diagnosis_text
from launcher.report.outcome import Outcome


def diagnose_command(paths: Sequence[str], *, apply: bool) -> Outcome:
    """Diagnose run directories and logs; with `apply`, write a mended recipe beside the run's own."""
    diagnosis = diagnose(paths, FAILURES)
    recipe = recipe_of(paths)
    if recipe is not None:
        diagnosis = with_recipe(diagnosis, recipe)
    data = dict(diagnosis.to_json())
    text = diagnosis_text(diagnosis)
    if apply:
        mended = str(_apply(diagnosis, recipe))
        data["mended"] = mended
        text += f"\nwrote {mended}\n"
    return Outcome(data, text)


def recipe_of(paths: Sequence[str]) -> Path | None:
    """The recipe of the first run directory: the original where it still is, else the copy kept there."""
    for folder in filter(is_run_dir, map(Path, paths)):
        copy = folder / "recipe.yaml"
        try:
            original = Path(json.loads((folder / "plan.json").read_text("utf-8"))["recipe"])
            if original.is_file() and original.read_bytes() == copy.read_bytes():
                return original
        except (OSError, ValueError, KeyError, TypeError):
            pass
        if copy.is_file():
            return copy
    return None


def with_recipe(diagnosis: Diagnosis, recipe: Path) -> Diagnosis:
    """The findings with the lines of the recipe that their changes touch."""
    text = recipe.read_text("utf-8", errors="replace")
    findings = [replace(f, recipe=edits(str(recipe), text, f.failure.changes)) for f in diagnosis.findings]
    return replace(diagnosis, findings=findings)


def _apply(diagnosis: Diagnosis, recipe: Path | None) -> Path:
    """Write the mended recipe and return its path; RecipeError where there is nothing to write."""
    if recipe is None:
        message, hint = "--apply needs the recipe", "name the run directory of the failed run"
        raise RecipeError(Problem("no-recipe", message, hint=hint))
    edited = [finding for finding in diagnosis.findings if finding.recipe]
    if not edited:
        message = "no change of the recipe is known to mend this"
        raise RecipeError(
            Problem("nothing-to-apply", message, str(recipe), hint="see the mend above, by hand")
        )
    changes = {edit.path: edit.new for edit in edited[0].recipe}
    shipped = recipe.resolve().is_relative_to(recipes_dir().resolve())
    return write_mended(recipe, Path.cwd() if shipped else recipe.parent, changes)
