"""Check the hook functions in the file of `python:` by parsing it, without running it."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import Problem, RecipeError
from launcher.files.safe_files import LARGEST_TEXT, read_text
from launcher.recipe.suggestions import close_key

# hook -> its arguments
_CALLS = {"format_row": ("row",), "compute_metrics": ("prediction",), "callbacks": ()}
# likely misnomers -> hook
_ALIASES = {
    "format": "format_row",
    "map_row": "format_row",
    "process_row": "format_row",
    "preprocess": "format_row",
    "metrics": "compute_metrics",
    "get_callbacks": "callbacks",
}


@dataclass(frozen=True, slots=True)
class HookFile:
    """The hooks of a file."""

    names: tuple[str, ...]
    """Those of format_row, compute_metrics and callbacks that the file defines."""
    text: str
    """The file."""


def read_hooks(path: Path | str) -> HookFile:
    """Read the file and check its hooks.

    RecipeError, with file and line, when the file is absent or not Python, defines no hook, a hook cannot be
    called with its arguments, or an unused function has nearly the name of a hook.
    """
    file = str(path)
    text = _read(Path(path), file)
    tree = _parse(text, file)
    found: dict[str, tuple[ast.stmt, ast.arguments | None, bool]] = {}
    others: list[tuple[str, int]] = []
    problems: list[Problem] = []
    for name, node, arguments, is_async in _definitions(tree):
        if name in _CALLS:
            found[name] = (node, arguments, is_async)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            others.append((name, node.lineno))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for name, line in others:
        near = None if name.startswith("_") else close_key(name, _CALLS)
        meant = _ALIASES.get(name) or near
        if meant and meant not in found and name not in used:
            what = f"function {name} is neither a hook nor called"
            problems.append(_problem("hook-unknown", what, file, line, f"did you mean `{meant}`?"))
    for name, (node, arguments, is_async) in found.items():
        if is_async:
            message = f"{name} is a coroutine, expected a function"
            problems.append(_problem("hook-signature", message, file, node.lineno, "write `def`"))
        elif arguments is not None and not _callable_with(arguments, len(_CALLS[name])):
            message = f"{name} cannot be called as {name}({', '.join(_CALLS[name])})"
            hint = f"write `def {name}({', '.join(_CALLS[name])}):`"
            problems.append(_problem("hook-signature", message, file, node.lineno, hint))
    if not found and not problems:
        names = ", ".join(f"{name}({', '.join(call)})" for name, call in _CALLS.items())
        problems.append(_problem("hook-missing", "defines no hook at top level", file, 1, f"hooks: {names}"))
    if problems:
        raise RecipeError(sorted(problems, key=lambda problem: problem.line or 0))
    return HookFile(tuple(name for name in _CALLS if name in found), text)


def _problem(code: str, message: str, file: str, line: int | None, hint: str | None = None) -> Problem:
    return Problem(code, message, file, line, "python", hint)


def _read(path: Path, file: str) -> str:
    try:
        return read_text(path, LARGEST_TEXT)
    except UnicodeDecodeError:
        raise RecipeError(_problem("hooks-unreadable", "is not UTF-8", file, None)) from None
    except (OSError, ValueError) as error:
        code, message = "hooks-unreadable", f"cannot be read: {getattr(error, 'strerror', None) or error}"
        hint = None
        if isinstance(error, FileNotFoundError):
            code, message = "hooks-missing", "no such file"
            hint = "set `python:` to a Python file, relative to the recipe"
        raise RecipeError(_problem(code, message, file, None, hint)) from None


def _parse(text: str, file: str) -> ast.Module:
    try:
        with warnings.catch_warnings():  # SyntaxWarning of invalid escapes
            warnings.simplefilter("ignore")
            return ast.parse(text, filename=file)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # zero bytes, nested too deeply
        message = f"is not valid Python: {getattr(error, 'msg', '') or error or type(error).__name__}"
        raise RecipeError(_problem("hooks-syntax", message, file, getattr(error, "lineno", None))) from None


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt, ast.arguments | None, bool]]:
    """(name, statement, arguments where known, whether it is a coroutine) of the top level.

    Includes those under `if` and `try`, and imported and assigned names, whose arguments are unknown.
    """
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # a decorator may change the arguments
            arguments = None if node.decorator_list else node.args
            yield node.name, node, arguments, isinstance(node, ast.AsyncFunctionDef)
        elif isinstance(node, ast.Assign):
            lambda_arguments = node.value.args if isinstance(node.value, ast.Lambda) else None
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node, lambda_arguments, False
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, node, None, False
        elif isinstance(node, ast.If | ast.Try):
            handlers = [part for handler in getattr(node, "handlers", []) for part in handler.body]
            pending = [*node.body, *handlers, *node.orelse, *getattr(node, "finalbody", []), *pending]


def _callable_with(arguments: ast.arguments, count: int) -> bool:
    """Whether `count` positional arguments are enough and not too many."""
    positional = len(arguments.posonlyargs) + len(arguments.args)
    required = positional - len(arguments.defaults)
    keywords_required = any(default is None for default in arguments.kw_defaults)
    accepted = count <= positional or arguments.vararg is not None
    return required <= count and accepted and not keywords_required
