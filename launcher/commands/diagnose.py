"""`diagnose`: why a run failed, and the recipe lines to change."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import Problem, RecipeError
from launcher.files.redaction import hide_in, hider, secret_values
from launcher.files.shipped import recipes_dir
from launcher.knowledge.diagnose.examine import diagnose
from launcher.knowledge.diagnose.findings import Diagnosis
from launcher.knowledge.diagnose.patch import recipe_of, with_recipe, without_recipe, write_fixed
from launcher.knowledge.failures.catalogue import FAILURES
from launcher.report.diagnosis_sections import diagnosis_text
from launcher.report.outcome import Outcome

STDIN = "-"
GZIP = b"\x1f\x8b"
OTHER_FORMS = {
    GZIP: "compressed by gzip, and not named .gz",
    b"BZh": "compressed by bzip2",
    b"\xfd7zXZ": "compressed by xz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"PK\x03\x04": "a zip archive",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
}
"""First bytes of files that are not logs."""
_BEGINNING = 4096


def diagnose_command(paths: Sequence[str], *, apply: bool) -> Outcome:
    """Diagnose run directories and logs; with `apply`, write the fixed recipe next to the original."""
    for path in paths:
        _refuse_other_forms(path)
    try:
        diagnosis = diagnose(paths, FAILURES)
    except (EOFError, zlib.error):
        message = "cannot diagnose: a compressed log is truncated or damaged"
        hint = "unpack what is readable: zcat LOG.gz > LOG"
        raise RecipeError(Problem("log-unreadable", message, hint=hint)) from None
    recipe = recipe_of(paths)
    diagnosis = without_recipe(diagnosis) if recipe is None else with_recipe(diagnosis, recipe)
    hide = hider(secret_values(os.environ))
    data = dict(hide_in(diagnosis.to_json(), hide))
    text = hide(diagnosis_text(diagnosis))
    if not apply:
        return Outcome(data, text)
    try:
        fixed = str(_apply(diagnosis, recipe))
    except RecipeError as error:  # the diagnosis is shown anyway
        return Outcome(data, text, error.problems, RecipeError.exit_code)
    return Outcome({**data, "mended": fixed}, f"{text}\nwrote {fixed}\n")


def _refuse_other_forms(given: str) -> None:
    """Raise RecipeError for an invalid file name, and for a file that is not text."""
    if given == STDIN:
        if sys.stdin is None:
            raise RecipeError(Problem("usage", "standard input is closed", hint="name a log"))
        return
    try:
        path = Path(given)
        if not path.is_file():
            (path / "plan.json").is_file()  # raises if the folder may not be entered
            return
        with path.open("rb") as stream:
            begins = stream.read(_BEGINNING)
    except OSError as error:
        message, hint = f"cannot diagnose: {error.strerror or error}", "name a run directory or a log"
        raise RecipeError(Problem("log-unreadable", message, given, hint=hint)) from None
    found = next((what for magic, what in OTHER_FORMS.items() if begins.startswith(magic)), None)
    if path.suffix == ".gz" and begins.startswith(GZIP):
        return
    if found is None:
        found = _no_text(begins)
    if found is not None:
        hint = "unpack it or convert it to UTF-8"
        raise RecipeError(Problem("log-unreadable", f"cannot diagnose: it is {found}", given, hint=hint))


def _no_text(begins: bytes) -> str | None:
    """What these first bytes are if not text. A log that was truncated while open begins with zeros."""
    shown = begins.lstrip(b"\0")
    if shown.count(b"\0") * 3 > len(shown) and not shown[::2].count(b"\0"):
        return "text in UTF-16"
    wrong = shown.decode("utf-8", errors="replace").count("\ufffd")
    return "a binary file" if b"\0" in shown and wrong * 10 > len(shown) else None


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
