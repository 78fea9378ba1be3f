"""Options that `ladder` and `drill` share: `--only` and `--output-dir`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from launcher.errors import Problem, RecipeError
from launcher.execute.run_dir import claimed, default_run_dir
from launcher.recipe.suggestions import close_key

Item = TypeVar("Item")


def choose(only: str | None, known: Mapping[str, Item], kind: str) -> tuple[Item, ...]:
    """The items that `--only` names, in the order of `known`; all without it."""
    if only is None:
        return tuple(known.values())
    names = [name.strip() for name in only.split(",") if name.strip()]
    hint = f"the {kind}s are {', '.join(known)}"
    problems = [] if names else [Problem(f"unknown-{kind}", f"--only names no {kind}", "--only", hint=hint)]
    for name in names:
        if name not in known:
            close = close_key(name, known)
            meant = f"did you mean {close}?" if close else hint
            problems.append(Problem(f"unknown-{kind}", f"there is no {kind} {name!r}", "--only", hint=meant))
    if problems:
        raise RecipeError(problems)
    return tuple(item for name, item in known.items() if name in names)


def make_folder(output_dir: str | None, recipe_file: str, experiment: str) -> Path:
    """Create the experiment's directory: `output_dir`, which must be empty, or a new one under runs/."""
    if not output_dir:
        return claimed(default_run_dir(f"{Path(recipe_file).stem}-{experiment}", Path.cwd()).absolute())
    folder = Path(output_dir).absolute()
    try:
        if folder.exists() and any(folder.iterdir()):
            message, hint = f"the {experiment}'s directory {folder} is not empty", "set another --output-dir"
            raise RecipeError(Problem("run-dir-not-empty", message, hint=hint))
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot write the {experiment}'s directory {folder}: {error.strerror}"
        raise RecipeError(Problem("run-dir-unwritable", message, hint="set another --output-dir")) from error
    return folder
