"""A model's spec for planning: from the families known here, else from transformers' class, in a child."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launcher.errors import MachineError, Problem, RecipeError
from launcher.facts.heads import FAMILY_TASKS, LM_TASKS, labels_of
from launcher.facts.model import ModelSpec, read_model_spec
from launcher.facts.software import require_modules


def find_spec(
    name: str, config: Mapping[str, Any], origin: str, task: str, *, ask: bool
) -> tuple[ModelSpec, str | None]:
    """The spec, and a note where it is of a family that is not known here.

    `ask`: transformers' class, in a child process. RecipeError `not-in-closed-form` where it may not be
    asked, `unknown-architecture` where it cannot build the model for the task, or is not installed.
    """
    try:
        return read_model_spec(name, config, origin, task), None
    except RecipeError as error:
        unknown = {problem.code for problem in error.problems} == {"unknown-architecture"}
        kind = config.get("model_type")
        if not unknown or not isinstance(kind, str) or not kind or kind in FAMILY_TASKS:
            raise
        if not ask:
            raise _only_traced(name, config, error) from None
        answer = _described(config, task, error)
    from launcher.facts.foreign import foreign_spec

    spec = foreign_spec(name, config, origin, task, answer)
    return spec, (
        f"model_type {spec.model_type} is not known here: its sizes are read from transformers' class, and "
        "what it keeps for the backward pass is the trace's"
    )


def _only_traced(name: str, config: Mapping[str, Any], unknown: RecipeError) -> RecipeError:
    """Of a family whose memory has no closed form here."""
    return RecipeError(
        Problem(
            "not-in-closed-form",
            f"model {name!r} has model_type {config['model_type']!r}, which is not known in closed form",
            path="model.name_or_path",
            hint=f"`plan RECIPE --trace` traces transformers' own class; {unknown.problems[0].hint}",
        )
    )


def _described(config: Mapping[str, Any], task: str, unknown: RecipeError) -> dict[str, Any]:
    """What transformers' class says of the model; the error `unknown`, with why, where it says nothing."""
    from launcher.facts.trace import Untraceable, ask_child

    request = {
        "ask": "model",
        "config": dict(config),
        "task": task,
        "labels": None if task in LM_TASKS else labels_of(config),
    }
    try:
        require_modules(["torch", "transformers"])
        return ask_child(request, sys.executable)
    except MachineError as error:
        why = f"other types of transformers are read where it is installed: {error.problems[0].message}"
    except Untraceable as error:
        why = f"transformers cannot build it here: {error}"
    problem = unknown.problems[0]
    raise RecipeError(replace(problem, hint=f"{problem.hint}; {why}")) from None
