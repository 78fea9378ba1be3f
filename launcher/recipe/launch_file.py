"""`launch:` for a user's own command: the keys of recipes that apply to it, from a file and `--set`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from launcher.errors import Problem, RecipeError
from launcher.recipe import env
from launcher.recipe.loading import with_position
from launcher.recipe.merged_yaml import load_merged
from launcher.recipe.problems import validation_problems
from launcher.recipe.rules import check_environment, take_secrets
from launcher.recipe.schema import LaunchSection
from launcher.recipe.yaml_reader import join

_KEYS = ("env", "hang_factor", "max_restarts")
"""Of `launch`: those of a command that is no plan's."""


def load_launch(file: str | None, overrides: Sequence[str]) -> LaunchSection:
    """`launch:` for a user's own command, from a file (None: its defaults) with `key=value` overrides.

    Raises RecipeError with every problem.
    """
    main = file or "--set"
    merged = load_merged(Path(main), overrides, text=None if file is not None else "launch: {}")
    data, problems = merged.data, [*merged.problems]
    found = [*take_secrets(data), *check_environment(data)]
    hint = f"only {', '.join(f'launch.{name}' for name in _KEYS)} apply to a command"
    launch = data.get("launch") or {}
    given = launch if isinstance(launch, dict) else {}
    variables = given.get("env")
    others = [name for name in data if name != "launch"] + [
        f"launch.{name}" for name in given if name not in _KEYS
    ]
    found += [
        Problem("unread-key", "is not read for a command of your own", path=one, hint=hint) for one in others
    ]
    found += [
        env.missing_problem(name, join("launch.env", key))
        for key, value in (variables.items() if isinstance(variables, dict) else ())
        if isinstance(value, str)
        for name in env.missing_variables(value, os.environ)
    ]
    known = {name: value for name, value in given.items() if name in _KEYS} if launch == given else launch
    section = LaunchSection.model_construct()
    try:
        section = LaunchSection.model_validate(known)
    except ValidationError as error:
        found += [
            replace(problem, path=f"launch.{problem.path}".rstrip("."))
            for problem in validation_problems(error.errors(), known)
        ]
    problems += [with_position(problem, merged, main) for problem in found]
    if problems:
        raise RecipeError(list(dict.fromkeys(problems)))
    return section
