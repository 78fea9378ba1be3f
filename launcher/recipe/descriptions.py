"""What the schema says of its fields: the docstrings below them, read when they are asked for.

pydantic can read them itself (`use_attribute_docstrings`), but does so whenever the schema is imported, which
is at the start of every command.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from functools import cache
from itertools import pairwise

from pydantic import BaseModel

from launcher.recipe import schema


def field_descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Field name -> docstring of a model of the schema, those of its bases included."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        found |= _by_class().get(base.__name__, {})
    return found


@cache
def _by_class() -> Mapping[str, Mapping[str, str]]:
    tree = ast.parse(inspect.getsource(schema))
    return {node.name: _fields(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _fields(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for field, below in pairwise(node.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    found[field.target.id] = inspect.cleandoc(text)
    return found
