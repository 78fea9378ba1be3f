"""Diagnose what is given: run directories, logs (a file of another form is refused), or the text of a log."""

from __future__ import annotations

import io
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import Problem, RecipeError
from launcher.knowledge.diagnose.examine import Examination, diagnose
from launcher.knowledge.diagnose.findings import Diagnosis
from launcher.knowledge.diagnose.patch import recipe_of, with_recipe, without_recipe
from launcher.knowledge.failures.catalogue import FAILURES

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


def diagnose_files(paths: Sequence[str]) -> tuple[Diagnosis, Path | None]:
    """The diagnosis of run directories and logs (`-`: standard input), and the recipe of the run directory.

    RecipeError for what cannot be read.
    """
    for path in paths:
        _refuse_other_forms(path)
    try:
        found = diagnose(paths, FAILURES)
    except (EOFError, zlib.error):
        message = "cannot diagnose: a compressed log is truncated or damaged"
        hint = "unpack what is readable: zcat LOG.gz > LOG"
        raise RecipeError(Problem("log-unreadable", message, hint=hint)) from None
    recipe = recipe_of(paths)
    return without_recipe(found) if recipe is None else with_recipe(found, recipe), recipe


def diagnose_text(text: str) -> Diagnosis:
    """The diagnosis of the text of a log, such as a traceback."""
    examination = Examination(FAILURES)
    examination.read(io.BytesIO(text.encode("utf-8", "replace")), "", None)
    return without_recipe(examination.verdict())


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
