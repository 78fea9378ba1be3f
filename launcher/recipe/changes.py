"""A recipe with other values, as the ladder and what-if questions ask for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launcher.recipe.loading import LoadedRecipe, Origin
from launcher.recipe.schema import Recipe


def with_changes(loaded: LoadedRecipe, changes: Mapping[str, Any], by: str | None) -> LoadedRecipe:
    """The recipe with some values replaced; None takes a key away.

    `changes`: dotted key -> value. `by` is who said them; None: nobody, so that fixes may replace them.
    """
    data = loaded.recipe.model_dump(exclude_unset=True)
    origins = dict(loaded.origins)
    for dotted, value in changes.items():
        *path, last = dotted.split(".")
        section = data
        for name in path:
            section = section.setdefault(name, {})
        inside = (dotted + ".", dotted + "[")
        origins = {k: o for k, o in origins.items() if k != dotted and not k.startswith(inside)}
        section.pop(last, None)
        if value is not None:
            section[last] = value
            if by is not None:
                origins[dotted] = Origin("override", by)
    return replace(loaded, recipe=Recipe.model_validate(data), origins=origins)
