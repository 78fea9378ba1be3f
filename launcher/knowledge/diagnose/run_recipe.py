"""The recipe of a diagnosed run, and its lines that the findings change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launcher.facts.safe_files import parse_json
from launcher.knowledge.diagnose.findings import Diagnosis
from launcher.knowledge.diagnose.patch import edits
from launcher.knowledge.diagnose.run_dir import is_run_dir


def recipe_of(paths: Sequence[str]) -> Path | None:
    """The recipe of the first run directory: the original if it is unchanged, else the copy in the run."""
    for folder in filter(is_run_dir, map(Path, paths)):
        copy = folder / "recipe.yaml"
        for record in ("plan.json", "submit.json"):  # a job runs a copy of the recipe
            try:
                original = Path(parse_json((folder / record).read_text("utf-8"))["recipe"])
                if original.is_file() and original.read_bytes() == copy.read_bytes():
                    return original
            except (OSError, ValueError, KeyError, TypeError):
                pass  # the run directory is incomplete
        if copy.is_file():
            return copy
    return None


def with_recipe(diagnosis: Diagnosis, recipe: Path) -> Diagnosis:
    """Add the recipe lines to change to the findings, if the recipe is readable."""
    try:
        text = recipe.read_text("utf-8", errors="replace")
    except OSError:
        return diagnosis
    findings = [replace(f, recipe=edits(str(recipe), text, f.failure.changes)) for f in diagnosis.findings]
    return replace(diagnosis, findings=findings)
