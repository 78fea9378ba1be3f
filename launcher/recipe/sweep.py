"""`--sweep key=a,b,c`: the configurations of a sweep, their names and overrides."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.recipe.merged_yaml import key_tokens
from launcher.recipe.yaml_reader import parse_yaml

Values = Mapping[str, Any]
"""Dotted key of the recipe -> the value that one configuration has."""
MOST = 1000
"""Most runs of a sweep; Slurm accepts arrays of 1001 jobs by default."""


def combine(sweeps: Sequence[str]) -> list[Values]:
    """The product of all `key=a,b,c`; [{}] without sweeps. RecipeError for invalid text."""
    axes = [_axis(text) for text in sweeps]
    names = [name for name, _ in axes]
    for one, other in itertools.combinations(names, 2):
        _refuse_overlap(one, other)
    found = [dict(zip(names, values, strict=True)) for values in itertools.product(*(v for _, v in axes))]
    if len(found) > MOST:
        raise RecipeError(Problem("sweep", f"has {len(found)} runs, expected at most {MOST}"))
    return [*found]


def _refuse_overlap(one: str, other: str) -> None:
    """RecipeError where one key is the other, or part of it: the later one would undo the earlier."""
    keys = [(key_tokens(name) or [name], name) for name in (one, other)]
    (outer, section), (inner, key) = sorted(keys, key=lambda pair: len(pair[0]))
    if inner[: len(outer)] != outer:
        return
    message, hint = "is swept twice", "write all its values after one ="
    if len(outer) < len(inner):
        message, hint = f"is part of {section}, which is swept too", f"write {key} in the values of {section}"
    raise RecipeError(Problem("sweep", message, "--sweep", path=key, hint=hint))


def _axis(text: str) -> tuple[str, list[Any]]:
    """One key and its values, each read as YAML."""
    name, equals, listed = text.partition("=")
    name = name.strip()
    hint = "write --sweep key=a,b,c, e.g. --sweep trainer.learning_rate=1e-4,2e-4"
    if not (equals and name and listed.strip()):
        message = f"cannot read --sweep {text!r}"
        raise RecipeError(Problem("sweep", message, "--sweep", path=name or None, hint=hint))
    document = parse_yaml(f"[{listed}]", "--sweep", name)
    values = document.data
    if document.problems or not isinstance(values, list):
        why = document.problems[0].message if document.problems else "it is not a list of values"
        raise RecipeError(Problem("sweep", f"cannot read {listed!r}: {why}", "--sweep", path=name, hint=hint))
    if None in values or len(set(map(frozen, values))) < len(values):
        message = f"has an empty value or one value twice: {listed}"
        raise RecipeError(Problem("sweep", message, "--sweep", path=name, hint=hint))
    return name, values


def frozen(value: Any) -> Hashable:
    """Equal for values that are the same in a recipe: 1 and 1.0, but not 1 and true."""
    if isinstance(value, Mapping):
        return frozenset((key, frozen(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(frozen, value))
    return isinstance(value, bool), value


def refuse_same(runs: Iterable[tuple[Values, Mapping[str, Any]]]) -> None:
    """RecipeError where two runs (values, recipe) are the same recipe, however it is written."""
    seen: dict[Hashable, Values] = {}
    for values, recipe in runs:
        before = seen.setdefault(frozen(recipe), values)
        if before is not values:
            message = f"{shown(before)} and {shown(values)} are the same run"
            raise RecipeError(Problem("sweep", message, "--sweep", hint="leave one of them out"))


def swept_overrides(values: Values) -> list[str]:
    """The values as arguments of --set: JSON is YAML, and keeps the type of every value."""
    return [f"{name}={json.dumps(value)}" for name, value in values.items()]


def shown(values: Values) -> str:
    return ", ".join(f"{name}={show(value)}" for name, value in values.items())


def show(value: Any) -> str:
    """A value as a user writes it."""
    return value if isinstance(value, str) else json.dumps(value)


def folder_name(index: int, values: Values, count: int) -> str:
    """`03-learning_rate=0.0001`: sorts by the numbers of the runs."""
    words = "-".join(f"{name.rpartition('.')[2]}={show(value)}" for name, value in values.items())
    plain = re.sub(r"[^A-Za-z0-9._=+-]+", "_", words)[:80]
    return f"{index:0{len(str(max(count - 1, 0)))}d}-{plain}"
