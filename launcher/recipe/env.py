"""Resolve `${ENV:NAME}` and `${ENV:NAME:default}` in the strings of a recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from launcher.errors import Problem, RecipeError

_BEGIN = "${ENV:"
# References do not nest: a default ends where another reference begins, which keeps the search linear.
_REFERENCE = re.compile(r"\$\{ENV:([A-Za-z_][A-Za-z0-9_]*)(?::((?:[^}$]|\$(?!\{))*))?\}")


def has_reference(value: Any) -> bool:
    """Whether a value is, or contains at any depth, a string with a reference."""
    if isinstance(value, str):
        return _REFERENCE.search(value) is not None
    if isinstance(value, Mapping):
        return any(has_reference(item) for item in value.values())
    return isinstance(value, list) and any(has_reference(item) for item in value)


def has_incomplete_reference(text: str) -> bool:
    """Whether the text has a malformed reference: no end, no name, or another reference inside it."""
    return text.count(_BEGIN) > len(reference_names(text))


def reference_names(text: str) -> list[str]:
    """Names of the variables that a text refers to, in order."""
    return [match[1] for match in _REFERENCE.finditer(text)]


def split_references(text: str) -> list[str | tuple[str, str | None]]:
    """The text in parts: strings, and (name, default or None) for each reference."""
    parts: list[str | tuple[str, str | None]] = []
    at = 0
    for match in _REFERENCE.finditer(text):
        parts += [text[at : match.start()], (match[1], match[2])]
        at = match.end()
    return [part for part in [*parts, text[at:]] if part]


def is_reference(value: Any) -> bool:
    """Whether a value is exactly one reference."""
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


def missing_variables(text: str, environ: Mapping[str, str]) -> list[str]:
    """Names without a default that `environ` lacks, in order, each once."""
    without_default = [m[1] for m in _REFERENCE.finditer(text) if m[2] is None]
    return list(dict.fromkeys(name for name in without_default if name not in environ))


def resolve_env(text: str, environ: Mapping[str, str]) -> str:
    """Replace every reference of `text`. Raises RecipeError (`env-missing`) for an absent variable."""
    missing = missing_variables(text, environ)
    if missing:
        raise RecipeError([missing_problem(name) for name in missing])
    return _REFERENCE.sub(lambda match: environ.get(match[1], match[2] or ""), text)


def incomplete_problem(path: str) -> Problem:
    """The problem of a malformed reference."""
    message = f"`{_BEGIN}` is not followed by a variable name and a closing brace"
    hint = f"write {_BEGIN}NAME}} or {_BEGIN}NAME:default}}; a default cannot contain another reference"
    return Problem("env-reference", message, path=path, hint=hint)


def missing_problem(name: str, path: str | None = None) -> Problem:
    """The problem of an unset variable without a default."""
    hint = f"set it, or give a default: ${{ENV:{name}:value}}"
    return Problem("env-missing", f"the environment variable {name} is not set", path=path, hint=hint)
