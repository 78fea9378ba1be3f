"""`recipes`: the shipped recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.files.shipped import recipes_dir, shipped_names
from launcher.render.new_file import write_new
from launcher.report.outcome import Outcome
from launcher.report.tables import table


def recipes_command(name: str | None, *, copy: bool) -> Outcome:
    """List the recipes, print one, or copy it to the current folder."""
    folder = recipes_dir()
    found = {name: folder / f"{name}.yaml" for name in shipped_names() if not name.startswith("_")}
    if name is None:
        rows = [(stem, _title(path)) for stem, path in found.items()]
        data: list[dict[str, Any]] = [{"name": stem, "title": title} for stem, title in rows]
        return Outcome({"recipes": data}, "\n".join(table(rows, indent="")))
    stem = name.removesuffix(".yaml").removeprefix("recipes/")
    stem = stem if stem in found else Path(name).stem
    if stem not in found:
        message, hint = f"no shipped recipe is named {name!r}", f"shipped: {', '.join(found)}"
        raise RecipeError(Problem("unknown-recipe", message, hint=hint))
    text = found[stem].read_text("utf-8")
    if not copy:
        return Outcome({"recipes": [{"name": stem, "text": text}]}, text)
    target = Path.cwd() / found[stem].name
    hooks = found[stem].with_suffix(".py")
    written = [target]
    _write(target, text)
    if hooks.is_file():
        written.append(target.with_suffix(".py"))
        _write(written[-1], hooks.read_text("utf-8"))
    said = "\n".join(f"wrote {path}" for path in written)
    return Outcome({"recipes": [{"name": stem, "path": str(target)}]}, said)


def _write(target: Path, text: str) -> None:
    try:
        write_new(target, text)
    except FileExistsError:
        problem = Problem("file-exists", f"{target} exists already", hint="move it away first")
        raise RecipeError(problem) from None


def _title(path: Path) -> str:
    """The first comment of a recipe, except that for editors."""
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# yaml-language-server:"):
            return line.lstrip("# ").rstrip()
    return ""
