"""Which columns of the rows reward functions read, from their source, without running them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from launcher.files.safe_files import LARGEST_TEXT, read_text
from launcher.recipe.reward_rules import GIVEN, split_function
from launcher.tasks.grpo import SHIPPED_REWARDS


def columns_read(entry: Mapping[str, Any]) -> frozenset[str] | None:
    """Columns that one entry of `reward:` reads; None: any of them, since it passes all of them on."""
    function, arguments = entry["function"], entry.get("arguments") or {}
    if function in SHIPPED_REWARDS:
        column = {**SHIPPED_REWARDS[function], **arguments}.get("column")
        return frozenset() if column is None else frozenset({str(column)})
    file, name = split_function(function)
    try:
        found = _of_source(read_text(Path(file), LARGEST_TEXT), name)
    except (OSError, ValueError, SyntaxError):
        return None
    return None if found is None else found - set(arguments)


def columns_needed(entry: Mapping[str, Any]) -> frozenset[str]:
    """Columns without which a function cannot be called."""
    if entry["function"] in SHIPPED_REWARDS:
        return columns_read(entry) or frozenset()
    file, name = split_function(entry["function"])
    try:
        node = _function(read_text(Path(file), LARGEST_TEXT), name)
    except (OSError, ValueError, SyntaxError):
        return frozenset()
    if node is None:
        return frozenset()
    positional, defaults = node.args.args, len(node.args.defaults)
    needed = [one.arg for one in positional[: len(positional) - defaults]]
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    needed += [one.arg for one, default in pairs if default is None]
    return frozenset(needed) - {*GIVEN, *(entry.get("arguments") or {})}


def unread(names: Sequence[str], entries: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Those of the columns that no reward function of `entries` reads."""
    read = [columns_read(entry) for entry in entries]
    if None in read:
        return ()
    known: set[str] = set().union(*(one for one in read if one is not None))
    return tuple(name for name in names if name not in known)


@lru_cache(maxsize=64)
def _of_source(text: str, name: str) -> frozenset[str] | None:
    node = _function(text, name)
    if node is None:
        return None
    named = {one.arg for one in (*node.args.args, *node.args.kwonlyargs)} - set(GIVEN)
    if node.args.kwarg is None:
        return frozenset(named)
    found = set(named)
    uses = 0
    for inner in ast.walk(node):
        uses += isinstance(inner, ast.Name) and inner.id == node.args.kwarg.arg
        column = _constant_key(inner, node.args.kwarg.arg)
        if column is not None:
            found.add(column)
            uses -= 1
    return None if uses else frozenset(found)


def _constant_key(node: ast.AST, holder: str) -> str | None:
    """The key of `holder["key"]` and `holder.get("key")`."""
    key: ast.expr | None = None
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == holder:
        key = node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        of = node.func.value
        if node.func.attr == "get" and isinstance(of, ast.Name) and of.id == holder:
            key = node.args[0]
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None


def _function(text: str, name: str) -> ast.FunctionDef | None:
    tree = ast.parse(text)
    found = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return next(found, None)
