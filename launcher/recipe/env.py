"""Resolve `${ENV:NAME}` and `${ENV:NAME:default}` in the strings of a recipe."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.recipe.yaml_reader import join

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


_PLAIN_DEFAULT = re.compile(r"[\w./:@%+,=-]*")


def for_shell(line: str) -> str | None:
    """A line of shell whose references are the shell's own; None where that would change its meaning.

    In single quotes the shell expands nothing, and a default may hold signs that it takes as its own.
    """
    defaults = [match[2] or "" for match in _REFERENCE.finditer(line)]
    if "'" in line or not all(map(_PLAIN_DEFAULT.fullmatch, defaults)):
        return None
    return _REFERENCE.sub(lambda m: f"${{{m[1]}}}" if m[2] is None else f"${{{m[1]}-{m[2]}}}", line)


@dataclass(frozen=True, slots=True)
class Kept:
    """A value of a recipe that has references: no file of a run holds it."""

    value: str
    """Resolved; a path is absolute."""
    text: str
    """With references: what the files hold."""

    @property
    def digest(self) -> str:
        """Tells a changed value, as a resume must; 16 bits, of which no value can be guessed."""
        return hashlib.sha256(f"{self.text}={self.value}".encode()).hexdigest()[:4]


def with_references(value: Any, path: str, kept: Mapping[str, Kept]) -> Any:
    """The value at `path` of a recipe with its references in place again, at any depth.

    kept: dotted path -> reference. A text that has changed since stays as it is.
    """
    if isinstance(value, str):
        found = kept.get(path)
        return found.text if found is not None and found.value == value else value
    if isinstance(value, Mapping):
        return {key: with_references(item, join(path, key), kept) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_references(item, join(path, index), kept) for index, item in enumerate(value)]
    return value


_SHORTEST = 6
"""Shorter values may stand in a message by chance."""


def hide_kept(value: Any, kept: Mapping[str, Kept]) -> Any:
    """Texts made of a recipe's values, such as messages, with references instead, at any depth."""
    if isinstance(value, str):
        found = {one.value: one.text for one in kept.values() if len(one.value) >= _SHORTEST}
        longest_first = sorted(map(re.escape, found), key=len, reverse=True)
        return re.sub("|".join(longest_first), lambda match: found[match[0]], value) if found else value
    if isinstance(value, Mapping):
        return {key: hide_kept(item, kept) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [hide_kept(item, kept) for item in value]
    return value


def incomplete_problem(path: str) -> Problem:
    """The problem of a malformed reference."""
    message = f"`{_BEGIN}` is not followed by a variable name and a closing brace"
    hint = f"write {_BEGIN}NAME}} or {_BEGIN}NAME:default}}; a default cannot contain another reference"
    return Problem("env-reference", message, path=path, hint=hint)


def missing_problem(name: str, path: str | None = None) -> Problem:
    """The problem of an unset variable without a default."""
    hint = f"set it, or give a default: ${{ENV:{name}:value}}"
    return Problem("env-missing", f"the environment variable {name} is not set", path=path, hint=hint)
