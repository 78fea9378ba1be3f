"""`fixes`, `recipes` and `schema`: what is shipped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.facts.shipped import recipes_dir
from launcher.report.outcome import Outcome
from launcher.report.tables import table


def fixes_command(name: str | None) -> Outcome:
    """The known fixes, or one of them."""
    from launcher.facts.requirements import holds
    from launcher.facts.software import installed_versions
    from launcher.plan.fixes import FIXES

    chosen = [fix for fix in FIXES if name in (None, fix.id)]
    if not chosen:
        import difflib

        near = difflib.get_close_matches(name or "", [fix.id for fix in FIXES], n=1)
        hint = f"did you mean {near[0]}?" if near else "`effilaunch fixes` lists them"
        raise RecipeError(Problem("unknown-fix", f"no fix has the id {name!r}", hint=hint))
    installed = installed_versions()
    data = [
        {
            "id": fix.id,
            "title": fix.title,
            "condition": fix.condition,
            "action": fix.action,
            "reason": fix.reason,
            "source": fix.source,
            "versions": fix.versions,
            # Not for the installed versions: the plan leaves it out.
            "expired": not holds(fix.versions, installed),
        }
        for fix in chosen
    ]
    if name is None:
        rows = [(str(row["id"]), _action(row), str(row["title"])) for row in data]
        lines = table(rows, indent="")
    else:
        lines = [f"{key:10s} {value}" for key, value in data[0].items()]
    return Outcome({"fixes": data}, "\n".join(lines))


def _action(fix: Mapping[str, Any]) -> str:
    return "expired" if fix["expired"] else str(fix["action"])


def recipes_command(name: str | None, *, copy: bool) -> Outcome:
    """The shipped recipes; one of them as text; or a copy of it in the current folder."""
    folder = recipes_dir()
    found = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    if name is None:
        rows = [(stem, _title(path)) for stem, path in found.items()]
        data: list[dict[str, Any]] = [{"name": stem, "title": title} for stem, title in rows]
        return Outcome({"recipes": data}, "\n".join(table(rows, indent="")))
    stem = Path(name).stem
    if stem not in found:
        raise RecipeError(
            Problem(
                "unknown-recipe",
                f"no shipped recipe is named {name!r}",
                hint=f"shipped: {', '.join(found)}",
            )
        )
    text = found[stem].read_text("utf-8")
    if not copy:
        return Outcome({"recipes": [{"name": stem, "text": text}]}, text)
    target = Path.cwd() / f"{stem}.yaml"
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RecipeError(
            Problem("file-exists", f"{target} exists already", hint="move it away first")
        ) from None
    return Outcome({"recipes": [{"name": stem, "path": str(target)}]}, f"wrote {target}")


def _title(path: Path) -> str:
    """The first comment line of a recipe that is not the editor's."""
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# yaml-language-server:"):
            return line.lstrip("# ").rstrip()
    return ""


def schema_command() -> Outcome:
    """The recipe's JSON Schema, for editors."""
    import json

    from launcher.recipe.json_schema import recipe_json_schema

    schema = recipe_json_schema()
    return Outcome({"schema": schema}, json.dumps(schema, indent=2))
