"""Turn pydantic's validation errors into problems; the sections, keys and docstrings of the schema."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from launcher.errors import Problem
from launcher.recipe import keys, schema, slurm_rules
from launcher.recipe.field_tables import TRAINER_OWNED, adapter_fields, trainer_fields
from launcher.recipe.schema import Recipe
from launcher.recipe.suggestions import (
    ADAPTER_ALIASES,
    TRAINER_ALIASES,
    choice_hint,
    describe,
    elsewhere,
    key_hint,
    rewrite_hint,
)
from launcher.recipe.yaml_reader import join

_EXPECTED = {
    "string_type": ("str", "a string"),
    "int_type": ("int", "an integer"),
    "int_from_float": ("int", "an integer"),
    "float_type": ("float", "a number"),
    "bool_type": ("bool", "true or false"),
    "list_type": ("list", "a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), ("dict", "a mapping")),
    "none_required": ("none", "null"),
    "finite_number": ("float", "a finite number"),
}
"""Type of a pydantic error -> expected type, named as in the field tables, and its phrase."""
_LIMITS = {
    "greater_than_equal": ("ge", "at least {}"),
    "greater_than": ("gt", "more than {}"),
    "less_than_equal": ("le", "at most {}"),
    "less_than": ("lt", "less than {}"),
    "too_short": ("min_length", "at least {} entry"),
    "string_too_short": ("min_length", "at least {} character"),
}


def validation_problems(errors: Iterable[Mapping[str, Any]], data: Mapping[str, Any]) -> list[Problem]:
    """Problems (without file and line) of `ValidationError.errors()` for the recipe `data`."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    unions: set[str] = set()
    for error in errors:
        path, value, tagged_at = _locate(error, data)
        unions |= tagged_at
        groups.setdefault(path, []).append({**error, "input": value})
    # of a union, the branch that matched deepest is the one that was meant
    shallow = {outer for outer in unions if any(p.startswith((f"{outer}.", f"{outer}[")) for p in groups)}
    return [_problem(path, group) for path, group in groups.items() if path not in shallow]


def _locate(error: Mapping[str, Any], data: Any) -> tuple[str, Any, set[str]]:
    """Dotted path, value there, and the paths at which the location names a member of a union."""
    path, value, unions = "", data, set()
    loc = error["loc"]
    for index, part in enumerate(loc):
        last = index == len(loc) - 1
        if (isinstance(part, int) and isinstance(value, list) and part < len(value)) or (
            isinstance(value, Mapping) and part in value
        ):
            path, value = join(path, part), value[part]
        elif last and error["type"] == "missing":
            path, value = join(path, part), None
        else:
            unions.add(path)
    return path, value, unions


def _problem(path: str, group: list[Mapping[str, Any]]) -> Problem:
    first = group[0]
    kind, value = first["type"], first["input"]
    if kind == "missing":
        doc = _doc(path)
        return Problem("missing-key", "required, but missing" + (f": {doc}" if doc else ""), path=path)
    if kind == "extra_forbidden":
        models = _models(path.rpartition(".")[0])
        keys = models[0].model_fields if models else ()
        hint = slurm_rules.key_hint(path) or key_hint(path, keys, _sections())
        return Problem("unknown-key", "unknown key", path=path, hint=hint)
    expected = list(dict.fromkeys(_expectation(error) for error in group))
    choices = [c for error in group if error["type"] == "literal_error" for c in _choices(error)]
    code = "wrong-type"
    if all(error["type"] in _LIMITS for error in group):
        code = "wrong-value"
    elif choices and isinstance(value, str):
        code = "wrong-choice"
    hint = choice_hint(value, choices) if choices and isinstance(value, str) else None
    shown = "an empty list" if value == [] else describe(value)
    message = f"is {shown}, expected {' or '.join(expected)}"
    kinds = {_EXPECTED[error["type"]][0] for error in group if error["type"] in _EXPECTED}
    hint = hint or rewrite_hint(value, kinds, entry="[{{path: {}}}]" if path.startswith("data.") else "[{}]")
    return Problem(code, message, path=path, hint=hint)


def _expectation(error: Mapping[str, Any]) -> str:
    kind = error["type"]
    if kind == "literal_error":
        choices = _choices(error)
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    if kind in _LIMITS:
        key, phrase = _LIMITS[kind]
        limit = error["ctx"][key]
        return phrase.format(f"{limit:g}" if isinstance(limit, float) else limit)
    return _EXPECTED[kind][1] if kind in _EXPECTED else str(error["msg"])


def _choices(error: Mapping[str, Any]) -> list[str]:
    text = str(error["ctx"]["expected"]).replace(" or ", ", ")
    return [item.strip("'") for item in text.split(", ")]


@cache
def known_sections() -> dict[str, type[BaseModel]]:
    """Dotted section -> its model, lists without index."""
    found: dict[str, type[BaseModel]] = {"": Recipe}
    pending = [""]
    while pending:
        section = pending.pop()
        for name, info in found[section].model_fields.items():
            for model in _models_of(info.annotation):
                child = join(section, name)
                # data.eval: {split} and its list of sources are two models at one path
                child = child if child not in found else child + "[]"
                found[child] = model
                pending.append(child)
    return found


def _models_of(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_of(part)]


def _models(parent: str) -> list[type[BaseModel]]:
    """Models of the section at the dotted path `parent`."""
    plain = parent[: parent.rindex("[")] if parent.endswith("]") else parent
    names = (plain + "[]", plain) if parent.endswith("]") else (plain,)
    return [model for name in names if (model := known_sections().get(name))]


def _doc(path: str) -> str | None:
    parent, _, name = path.rpartition(".")
    for model in _models(parent):
        if description := field_descriptions(model).get(name):
            return description.split(". ")[0].split("; ")[0].replace("\n", " ").rstrip(".")
    return None


def setting_named(name: str) -> str | None:
    """The dotted setting, or `setting=value`, that an option of another tool or a bare key means."""
    plain = name.lower().replace("-", "_")
    section, _, key = plain.rpartition(".")
    if section:
        return plain if key in _sections().get(section, ()) else None
    for prefix, aliases in (("trainer", TRAINER_ALIASES), ("adapter", ADAPTER_ALIASES)):
        if plain in aliases:
            return f"{prefix}.{aliases[plain]}"
    if (other := elsewhere(plain)) is not None:
        return other.replace(": ", "=", 1)
    holders = [holder for holder, keys in _sections().items() if plain in keys]
    return f"{holders[0]}.{plain}".lstrip(".") if holders else None


def _sections() -> dict[str, Iterable[str]]:
    """Every section with its keys, for the hint that a key belongs elsewhere."""
    top: dict[str, Iterable[str]] = {"": Recipe.model_fields}
    deep = {
        name: list(model.model_fields) for name, model in known_sections().items() if name and "." not in name
    }
    deep["adapter"] = [*deep.get("adapter", []), *adapter_fields()]
    deep["trainer"] = [
        name
        for name, entry in trainer_fields().items()
        if "renamed_to" not in entry and name not in TRAINER_OWNED
    ]
    # keys with a different meaning in each section
    common = {"path", "type", "config", "env", "revision", "name", "split"}
    return top | {name: [key for key in keys if key not in common] for name, keys in deep.items()}


def field_descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Field name -> docstring of a model of the schema, those of its bases included."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        found |= _by_class().get(base.__name__, {})
    return found


@cache
def _by_class() -> Mapping[str, Mapping[str, str]]:
    found: dict[str, dict[str, str]] = {}
    body = [node for module in (schema, keys) for node in ast.parse(inspect.getsource(module)).body]
    for node in (node for node in body if isinstance(node, ast.ClassDef)):
        for field, below in pairwise(node.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found.setdefault(node.name, {})[name] = inspect.cleandoc(text)
    return found
