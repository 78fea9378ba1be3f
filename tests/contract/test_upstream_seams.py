"""The private parts of upstream that launcher.train depends on are there, and only upstream/ uses them."""

from __future__ import annotations

import ast
import functools
import importlib.util
from importlib.metadata import version
from pathlib import Path

import pytest
from every import every

from launcher.train.upstream.seams import SEAMS, Seam

TRAIN = Path(__file__).parents[2] / "launcher" / "train"
STDLIB = {"_exit", "_shutdown", "_run_exitfuncs"}
"""os, threading, atexit."""


@functools.cache
def source(module: str) -> str:
    found = importlib.util.find_spec(module.partition(".")[0])
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{module} is not installed")
    path = Path(found.submodule_search_locations[0], *module.split(".")[1:])
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8")


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(source(module))


def definition(module: str, name: str) -> ast.AST | None:
    """The class or function of a qualified name, also below if and try."""
    node: ast.AST = tree(module)
    for part in name.split("."):
        found = next(
            (
                one
                for one in ast.walk(node)
                if isinstance(one, (ast.FunctionDef, ast.ClassDef)) and one.name == part
            ),
            None,
        )
        if found is None:
            return None
        node = found
    return node


@every("seam", SEAMS, ids=lambda seam: f"{seam.module}:{seam.name or seam.relies[0]}")
def test_upstream_has_what_is_relied_on(seam: Seam):
    text = source(seam.module)
    if seam.name:
        node = definition(seam.module, seam.name)
        assert node is not None, f"{seam.module} has no {seam.name} any more: {seam.reason}"
        line, text = node.lineno, ast.get_source_segment(text, node)
    else:
        line = next((n for n, row in enumerate(text.splitlines(), 1) if seam.relies[0] in row), None)
    plain = " ".join(row for raw in text.splitlines() if not (row := raw.strip()).startswith("#"))
    plain = " ".join(plain.split())
    missing = [piece for piece in seam.relies if piece not in plain]
    assert not missing, f"{seam.module}:{line} reads otherwise: {seam.reason}"
    installed = version(seam.module.partition(".")[0]).partition("+")[0]
    if installed == seam.read[0]:
        assert line == seam.read[1]


@every("seam", SEAMS, ids=lambda seam: f"{seam.module}:{seam.name or seam.relies[0]}")
def test_our_side_still_uses_it(seam: Seam):
    """A seam that nobody needs any more leaves the list."""
    parts = (seam.name or seam.relies[0]).split(".")
    text = (TRAIN / seam.used_in).read_text("utf-8")
    assert seam.kind == "context" or parts[-1] in text or parts[0] in text


def private_uses(path: Path, own: set[str]) -> list[str]:
    """Private attributes and imports of other projects in a file of ours."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            found.append(f"{path.name}:{node.lineno} {node.attr}")
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("launcher", "__")):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [f"{path.name}:{node.lineno} {name}" for name in names if is_private(name)]
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in STDLIB


def names_of_ours() -> set[str]:
    """Names with an underscore that launcher.train itself defines."""
    own = set()
    for path in TRAIN.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("self", "cls"):
                own.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                own.add(node.target.id)
    return own


def test_private_parts_of_upstream_are_used_in_upstream_alone():
    own = names_of_ours()
    found = [
        use
        for path in sorted(TRAIN.rglob("*.py"))
        if path.parent.name != "upstream"
        for use in private_uses(path, own)
    ]
    assert found == []


def test_at_most_eight_private_methods_are_overridden():
    """RewardTrainer's and DPOTrainer's _prepare_dataset are one method of ours."""
    names = {seam.name.rpartition(".")[2] for seam in SEAMS if seam.kind == "override"}
    assert len(names) <= 8
