"""`lint`: mistakes in DeepSpeed configs, with file, line and column."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.errors import DoesNotFit, Problem, RecipeError, printable
from launcher.knowledge.lint.check import LARGEST, Rule, apply_fixes, decoded, lint_text
from launcher.knowledge.lint.document import LintFinding
from launcher.render.new_file import write_new
from launcher.report.outcome import Outcome

STDIN = "-"
FOUND = 2
"""Exit status if there are findings."""


def lint_command(files: Sequence[str], *, recipe: str | None, fix: bool) -> Outcome:
    """List the findings of all files; with `fix`, write NAME.fixed.json next to each file with a fixable one.

    Raises RecipeError if a file cannot be read, or a fixed file exists.
    """
    raw = {file: _read(file) for file in dict.fromkeys(files)}
    if fix and STDIN in raw:
        raise RecipeError(Problem("usage", "--fix needs a file, not stdin"))
    targets = {file: fixed_path(file) for file in raw} if fix else {}
    _refuse_existing(targets)
    rules: tuple[Rule, ...] = () if recipe is None else (_against(recipe),)
    findings: list[LintFinding] = []
    fixed: list[dict[str, Any]] = []
    for file, content in raw.items():
        shown = "<stdin>" if file == STDIN else file
        text, unreadable = decoded(content, shown)
        found = [unreadable] if unreadable is not None else lint_text(text or "", shown, *rules)
        findings += found
        if fix and text is not None and found:
            entry = _fix(text, targets[file], found, rules)
            fixed += [] if entry is None else [{"file": file, **entry}]
    data: dict[str, Any] = {"findings": [finding.to_json() for finding in findings]}
    if fix:
        data["fixed"] = fixed
    return Outcome(data, _text(findings, len(raw), fixed, fix=fix), exit_code=FOUND if findings else 0)


def fixed_path(file: str) -> Path:
    """The path of the fixed file: ds.json -> ds.fixed.json."""
    return Path(file).with_suffix(".fixed.json")


def _read(file: str) -> bytes:
    """The file up to the size limit, because a device file has no end."""
    try:
        if file != STDIN:
            with Path(file).open("rb") as stream:
                return stream.read(LARGEST + 1)
        if sys.stdin is None:
            raise RecipeError(Problem("usage", "standard input is closed", hint="name a file"))
        return sys.stdin.buffer.read(LARGEST + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RecipeError(Problem("file-unreadable", f"cannot read it: {reason}", file=file)) from None


def _refuse_existing(targets: dict[str, Path]) -> None:
    """Raise RecipeError if a fixed file exists, or is the same for two files."""
    problems = []
    seen: set[Path] = set()
    for target in targets.values():
        if target.exists() or target.is_symlink() or target in seen:
            message = "is the fixed file of two files" if target in seen else "exists already"
            hint = "move it away, or fix one file at a time"
            problems.append(Problem("file-exists", message, file=str(target), hint=hint))
        seen.add(target)
    if problems:
        raise RecipeError(problems)


def _against(recipe: str) -> Rule:
    """The rule that compares a file with the plan of the recipe, made without its base config."""
    from launcher.inputs.planning_facts import gather
    from launcher.knowledge.lint.against_recipe import AgainstRecipe
    from launcher.planner.planner import make_plan
    from launcher.recipe.loading import load_recipe

    loaded = load_recipe(recipe)
    if loaded.recipe.sharding.config is not None:
        loaded = load_recipe(recipe, ["sharding.config=null"])
    loaded, facts = gather(loaded, None)
    try:
        return AgainstRecipe(make_plan(loaded, facts))
    except DoesNotFit as error:  # a finding about memory is not about the file
        if error.nearest_miss is None:
            raise
        return AgainstRecipe(error.nearest_miss)


def _fix(text: str, target: Path, found: list[LintFinding], rules: Sequence[Rule]) -> dict[str, Any] | None:
    """Write the fixed text; None if nothing could be fixed."""
    better, left = apply_fixes(text, str(target), *rules)
    if better == text:
        return None
    try:
        write_new(target, better)
    except OSError as error:
        message = f"cannot write it: {error.strerror or error}"
        raise RecipeError(Problem("file-unwritable", message, file=str(target))) from None
    return {"to": str(target), "left": [finding.to_json() for finding in left], "of": len(found)}


def _text(findings: Sequence[LintFinding], files: int, fixed: Sequence[dict[str, Any]], *, fix: bool) -> str:
    lines = [str(finding) for finding in findings]
    count = len(findings)
    checked = f"{files} file{'s' if files != 1 else ''}"
    lines.append(f"{count} finding{'s' if count != 1 else ''} in {checked}" if count else f"{checked}: clean")
    for entry in fixed:
        left = entry["left"]
        result = f"{len(left)} to fix manually" if left else "clean"
        lines.append(f"wrote {printable(entry['to'])}: {result}")
        lines += [f"  {f['line']}:{f['column']}: {f['code']}: {f['message']}" for f in left]
    if fix and findings and not fixed:
        lines.append("no finding can be fixed automatically; no file written")
    return "\n".join(lines)
