"""Model families: one module each in a visible tuple, and nobody else knows their names."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from pathlib import Path

import pytest

from launcher.models import families
from launcher.models.families import FAMILIES, MODEL_TYPES
from launcher.models.layers.pre_norm import PreNorm

FOLDER = Path(families.__file__).parent
MODULES = sorted(path for path in FOLDER.glob("*.py") if "\nTYPES = " in path.read_text("utf-8"))
OTHERS = [
    path
    for room in (FOLDER.parents[1] / "memory", FOLDER.parent)
    for path in sorted(room.rglob("*.py"))
    if path.parent != FOLDER and path.name != "gguf_header.py"  # llama.cpp names architectures, too
]
STRUCTURE = {"decoder", "others", "windowed"}
"""Fields that say how stacks and kinds of layers belong together."""


def test_every_module_is_in_the_visible_tuple_and_every_type_once() -> None:
    modules = [importlib.import_module(f"{families.__name__}.{path.stem}") for path in MODULES]
    assert {id(module.TYPES) for module in modules} == {id(family) for family in FAMILIES}
    assert len(MODEL_TYPES) == sum(map(len, FAMILIES)) >= 41


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
def test_nobody_else_names_a_type(path: Path) -> None:
    constants = (node.value for node in ast.walk(ast.parse(path.read_text("utf-8")))
                 if isinstance(node, ast.Constant))  # fmt: skip
    assert {value for value in constants if isinstance(value, str)} & MODEL_TYPES.keys() == set()


@pytest.mark.parametrize("field", [one.name for one in dataclasses.fields(PreNorm)])
def test_a_field_of_all_layers_is_set_by_three_families_or_more(field: str) -> None:
    """What one family alone has is a field of its own class."""
    default = next(one for one in dataclasses.fields(PreNorm) if one.name == field).default
    setting = [path.stem for path in MODULES if re.search(rf"\b{field}\b", path.read_text("utf-8"))]
    assert len(setting) >= 3 or field in STRUCTURE or default is dataclasses.MISSING
