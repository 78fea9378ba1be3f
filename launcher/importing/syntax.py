"""Python's syntax trees: names, texts and small sums of expressions. Nothing is run."""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

_LARGEST = 10**18
_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def parsed(text: str) -> ast.Module:
    """The text as Python, without the warnings that its author would get. SyntaxError and the like else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def last_name(node: ast.expr) -> str:
    """`TrainingArguments` of `transformers.TrainingArguments`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def text_of(node: ast.AST) -> str:
    """An expression as it is written, shortened."""
    try:
        text = ast.unparse(node)
    except (RecursionError, ValueError):
        return "an expression"
    return text if len(text) <= 60 else text[:57] + "..."


def computed(kind: ast.operator, left: Any, right: Any) -> Any:
    """A small sum; None for what a config does not compute."""
    numbers = all(isinstance(side, int | float) and not isinstance(side, bool) for side in (left, right))
    texts = isinstance(kind, ast.Add) and isinstance(left, str) and isinstance(right, str)
    if type(kind) not in _OPERATIONS or not (numbers or texts):
        return None
    if isinstance(kind, ast.Pow) and (abs(right) > 64 or abs(left) > 10**6):
        return None
    try:
        result = _OPERATIONS[type(kind)](left, right)
    except (ArithmeticError, TypeError, ValueError):
        return None
    return None if isinstance(result, int | float) and abs(result) > _LARGEST else result


def field_default(node: ast.expr | None) -> ast.expr | None:
    """The default of a dataclass field, also of `field(default=…)`."""
    if isinstance(node, ast.Call) and last_name(node.func) == "field":
        return next((keyword.value for keyword in node.keywords if keyword.arg == "default"), None)
    return node


def is_branch(statement: ast.stmt) -> bool:
    """Whether what stands below may not be run, or more than once; `if __name__ == …` is the script."""
    if isinstance(statement, ast.If):
        return "__name__" not in text_of(statement.test)
    return isinstance(statement, ast.For | ast.AsyncFor | ast.While | ast.Match)


def expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement itself, not those of the statements below it."""
    for _, value in ast.iter_fields(statement):
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.expr):
                yield part
            elif isinstance(part, ast.withitem):
                yield part.context_expr
