"""Merge a recipe, what it extends and overrides into one mapping with the position of each value."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launcher.errors import Problem
from launcher.files.safe_files import LARGEST_TEXT, bounded, is_file, read_text
from launcher.files.shipped import recipes_dir, shipped_names
from launcher.recipe.suggestions import close_key, describe
from launcher.recipe.yaml_reader import join, parse_yaml

_TOKEN = re.compile(r"\.?([^.\[\]]+)|\[([0-9]{1,9})\]")
_MOST_TOKENS = 32
_LONGEST_CHAIN = 32


@dataclass(frozen=True, slots=True)
class Position:
    """Where a value was set."""

    source: Literal["recipe", "parent", "override"]
    file: str
    """For messages; `--set` or `--sweep` for an override."""
    line: int | None
    folder: Path
    """Relative paths in the value start from here."""

    @property
    def by(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(slots=True)
class MergedRecipe:
    """The merged recipe. `positions` has every dotted path, mappings and lists too."""

    data: dict[str, Any]
    positions: dict[str, Position]
    problems: list[Problem]
    text: str = ""

    def position(self, path: str) -> Position | None:
        """The position of `path`, or of the nearest mapping or list around it."""
        while path:
            if path in self.positions:
                return self.positions[path]
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return None


def find_recipe(name: str | Path) -> Path | None:
    """The file of a recipe: the path itself, else the shipped recipe of that name (with or without .yaml)."""
    path = Path(name)
    if is_file(path):
        return path
    return _find_shipped(str(name))


def _find_shipped(name: str) -> Path | None:
    if Path(name).is_absolute():
        return None
    stem = name.removesuffix(".yaml").removeprefix("recipes/")
    return recipes_dir() / f"{stem}.yaml" if stem in shipped_names() else None


def load_merged(
    path: Path, overrides: Sequence[str], swept: Sequence[str] = (), text: str | None = None
) -> MergedRecipe:
    """Read `path` and what it extends, then apply --set and --sweep. Problems are collected, never raised.

    text: what is in the file, where it is not read (an editor's).
    """
    merged = _read(path, "recipe", (), text)
    for override in overrides:
        _apply(merged, override, "--set")
    for override in swept:
        _apply(merged, override, "--sweep")
    return merged


def _read(
    path: Path, source: Literal["recipe", "parent"], chain: tuple[Path, ...], text: str | None = None
) -> MergedRecipe:
    file = str(path)
    try:
        text = read_text(path, LARGEST_TEXT) if text is None else bounded(text, LARGEST_TEXT)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        return MergedRecipe({}, {}, [Problem("unreadable", f"cannot be read: {reason}", file)])
    is_program = path.suffix == ".py"
    document = parse_yaml("" if is_program else text, file)
    folder = path.resolve().parent
    positions = {p: Position(source, file, line, folder) for p, line in document.lines.items()}
    merged = MergedRecipe({}, positions, document.problems, text)
    if isinstance(document.data, dict):
        merged.data = document.data
    elif not document.problems:
        what = "is empty" if document.data is None else f"is {describe(document.data)}"
        what = "is a Python program" if is_program else what
        message = f"the recipe {what}, expected a mapping with at least `model:` and `data:`"
        hint = f"to supervise it: `effilaunch run -- python {file}`" if is_program else None
        merged.problems.append(Problem("wrong-type", message, file, 1, hint=hint))
    if "extends" in merged.data:
        return _extend(merged, path, chain)
    return merged


def _extend(merged: MergedRecipe, path: Path, chain: tuple[Path, ...]) -> MergedRecipe:
    """Merge `merged` over the file that its `extends` names."""
    name = merged.data.pop("extends")
    position = merged.positions.pop("extends")
    chain = (*chain, path.resolve())

    def refuse(code: str, message: str, hint: str | None = None) -> MergedRecipe:
        merged.problems.append(Problem(code, message, position.file, position.line, "extends", hint))
        return merged

    if not isinstance(name, str):
        return refuse("wrong-type", f"is {describe(name)}, expected one file or recipe name")
    beside = Path(os.path.normpath(path.parent / os.path.expanduser(name)))  # noqa: PTH111 - never raises
    parent = beside if is_file(beside) else _find_shipped(name)
    if parent is None:
        near = close_key(name.removesuffix(".yaml"), shipped_names())
        hint = f"did you mean `{near}`?" if near else "`effilaunch recipes` lists the shipped recipes"
        return refuse("extends-missing", f"no file {beside} and no shipped recipe `{name}`", hint)
    if parent.resolve() in chain:
        names = " -> ".join(file.name for file in (*chain, parent))
        return refuse("extends-cycle", f"a recipe cannot extend itself: {names}")
    if len(chain) > _LONGEST_CHAIN:
        return refuse("extends-depth", f"more than {_LONGEST_CHAIN} recipes extend one another")
    below = _read(parent, "parent", chain)
    below.problems = below.problems + merged.problems
    below.text = merged.text
    _merge(below, merged)
    return below


def _merge(below: MergedRecipe, above: MergedRecipe) -> None:
    """Deep-merge mappings; other values replace. Positions follow."""

    def visit(low: dict[str, Any], high: dict[str, Any], path: str) -> None:
        for key, value in high.items():
            child = join(path, key)
            if isinstance(value, dict) and isinstance(low.get(key), dict):
                below.positions[child] = above.positions.get(child, below.positions.get(child, _NOWHERE))
                visit(low[key], value, child)
                continue
            _forget(below, child, low.get(key))
            low[key] = value
            for inner in (child, *_paths(value, child)):
                if inner in above.positions:
                    below.positions[inner] = above.positions[inner]

    visit(below.data, above.data, "")


_NOWHERE = Position("parent", "", None, Path())


def _forget(merged: MergedRecipe, path: str, value: Any) -> None:
    """Remove the positions of `path` (with this value) and of everything inside it."""
    for inner in (path, *_paths(value, path)):
        merged.positions.pop(inner, None)


def key_tokens(dotted: str) -> list[str | int] | None:
    """`data.train[0].path` -> ['data', 'train', 0, 'path']; None when it is malformed."""
    tokens: list[str | int] = []
    at = 0
    while at < len(dotted):
        match = _TOKEN.match(dotted, at)
        if match is None or (at == 0 and dotted[0] in ".["):
            return None
        tokens.append(match[1] if match[2] is None else int(match[2]))
        at = match.end()
    return tokens if 0 < len(tokens) <= _MOST_TOKENS else None


def _apply(merged: MergedRecipe, override: str, option: str) -> None:
    """Apply one `key=value`: YAML value, dotted key; missing mappings are created."""
    dotted, equals, text = override.partition("=")
    dotted = dotted.strip()
    tokens = key_tokens(dotted)

    def refuse(message: str, hint: str | None = None) -> None:
        merged.problems.append(Problem("override", message, option, None, dotted or None, hint))

    if not equals or tokens is None:
        hint = f"write {option} key=value, e.g. {option} trainer.max_steps=100"
        return refuse(f"cannot read {override!r}", hint)
    if tokens[0] == "extends":
        return refuse("cannot be overridden")
    document = parse_yaml(text, option, dotted)
    if document.problems:
        return refuse(document.problems[0].message)
    position = Position("override", option, None, Path.cwd())
    target: Any = merged.data
    path = ""
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        problem = _mismatch(target, token, path)
        if problem:
            return refuse(problem)
        path = join(path, token)
        if following is None:
            _forget(merged, path, target[token] if isinstance(token, int) else target.get(token))
            target[token] = document.data
            merged.positions[path] = position
            for inner in _paths(document.data, path):
                merged.positions[inner] = position
            return None
        if isinstance(token, str) and not isinstance(target.get(token), (dict, list)):
            target[token] = {}
            merged.positions[path] = position
        target = target[token]
    return None


def _mismatch(target: Any, token: str | int, path: str) -> str | None:
    if isinstance(token, int):
        if not isinstance(target, list):
            return f"`{path}` is not a list"
        return None if token < len(target) else f"`{path}` has {len(target)} entries, no [{token}]"
    return None if isinstance(target, dict) else f"`{path}` is {describe(target)}: write {path}[0]"


def _paths(value: Any, path: str) -> Iterator[str]:
    """Dotted paths of everything inside `value`."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            child = join(path, key)
            yield child
            yield from _paths(item, child)
