"""Check the hook functions in the file of `python:` by parsing it, without running it."""

from __future__ import annotations

import ast
import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import Problem, RecipeError
from launcher.files.safe_files import LARGEST_TEXT, read_text
from launcher.recipe.hooks import HOOK, HOOKS, owned_method
from launcher.recipe.suggestions import close_key
from launcher.tasks.task import Task

_MISNOMERS = {name: hook.name for hook in HOOKS for name in hook.misnomers}
_LIBRARIES = ("transformers", "trl", "sentence_transformers")
"""Whose classes a file imports to use them: `from transformers import Trainer` defines no hook."""


@dataclass(frozen=True, slots=True)
class _Definition:
    """A name of the top level."""

    name: str
    node: ast.stmt
    arguments: ast.arguments | None = None
    """None where they are unknown: imported, assigned or decorated."""

    @property
    def is_hook(self) -> bool:
        if self.name not in HOOK:
            return False
        of = self.node.module if isinstance(self.node, ast.ImportFrom) else None
        return HOOK[self.name].kind == "function" or (of or "").partition(".")[0] not in _LIBRARIES


@dataclass(frozen=True, slots=True)
class HookFile:
    """The hooks of a file."""

    names: tuple[str, ...]
    """Those of `HOOKS` that the file defines, in that order."""
    digest: str
    """SHA-256 of the file and of the modules next to it that it imports, directly or indirectly."""


def read_hooks(path: Path | str, task: Task) -> HookFile:
    """Read the file and check its hooks.

    RecipeError, with file and line, when the file is absent or not Python, defines no hook, a hook cannot be
    called with its arguments or is none of the task's, or something unused has nearly the name of a hook.
    """
    file = str(path)
    text = _read(Path(path), file)
    tree = _parse(text, file)
    found: dict[str, _Definition] = {}
    others: list[_Definition] = []
    for one in _definitions(tree):
        if one.is_hook:
            found[one.name] = one
        elif isinstance(one.node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            others.append(one)
    problems = [problem for one in found.values() if (problem := _misfit(one, task, file))]
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for one in others:
        meant = _meant(one, task)
        if meant and meant not in found and one.name not in used:
            what = f"{one.name} is neither a hook nor used"
            hint = f"did you mean `{meant}`?"
            problems.append(_problem("hook-unknown", what, file, one.node.lineno, hint))
    if found and (lacking := [name for name in task.needed_hooks if name not in found]):
        message = f"does not define {', '.join(lacking)}, which task {task.name} needs"
        hint = "; ".join(f"{HOOK[name].call} returns {HOOK[name].returns}" for name in lacking)
        problems.append(_problem("hook-missing", message, file, 1, hint))
    if not found and not problems:
        names = ", ".join(HOOK[name].call for name in task.hooks)
        problems.append(_problem("hook-missing", "defines no hook at top level", file, 1, f"hooks: {names}"))
    if problems:
        raise RecipeError(sorted(problems, key=lambda problem: problem.line or 0))
    return HookFile(tuple(name for name in HOOK if name in found), digest_of(Path(path)))


def _meant(one: _Definition, task: Task) -> str | None:
    """The hook of the task that a definition of another name was meant to be."""
    kind = "class" if isinstance(one.node, ast.ClassDef) else "function"
    names = [name for name in task.hooks if HOOK[name].kind == kind]
    near = None if one.name.startswith("_") else close_key(one.name, names)
    meant = _MISNOMERS.get(one.name)
    return meant if meant in names else near


def _misfit(one: _Definition, task: Task, file: str) -> Problem | None:
    """Why a definition with the name of a hook cannot be it."""
    name, node, hook = one.name, one.node, HOOK[one.name]
    line = node.lineno
    if name not in task.hooks:
        taken = ", ".join(task.hooks)
        hint = f"remove or rename it; task {task.name} takes {taken}"
        return _problem("hook-not-taken", f"task {task.name} takes no hook {name}", file, line, hint)
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if hook.kind == "class":
        if is_function or one.arguments is not None:
            message, hint = f"{name} is a function, expected {hook.returns}", f"write `{hook.call}(...):`"
            return _problem("hook-signature", message, file, line, hint)
        if isinstance(node, ast.ClassDef) and not node.bases:
            message, hint = f"{name} has no base class, expected {hook.returns}", f"write `{hook.call}(...):`"
            return _problem("hook-signature", message, file, line, hint)
        return _trainer_misfit(node, file) if isinstance(node, ast.ClassDef) else None
    if isinstance(node, ast.AsyncFunctionDef):
        message = f"{name} is a coroutine, expected a function"
        return _problem("hook-signature", message, file, line, "write `def`")
    if one.arguments is not None and not _callable_with(one.arguments, len(hook.parameters)):
        message, hint = f"{name} cannot be called as {hook.call}", f"write `def {hook.call}:`"
        return _problem("hook-signature", message, file, line, hint)
    return None


def _trainer_misfit(node: ast.ClassDef, file: str) -> Problem | None:
    """The first method of the class that cannot be as it is."""
    for one in node.body:
        name = getattr(one, "name", "")
        if instead := owned_method(name):
            message = f"{node.name} overrides {name}, which the run must own"
            return _problem("own-trainer", message, file, one.lineno, instead)
        if name == "compute_loss" and isinstance(one, ast.FunctionDef):
            given = one.args
            names = {argument.arg for argument in (*given.args, *given.kwonlyargs)}
            if "num_items_in_batch" not in names and given.kwarg is None:
                message, hint = f"{node.name}.compute_loss takes no num_items_in_batch", "add it, =None"
                return _problem("own-trainer", message, file, one.lineno, hint)
    return None


def digest_of(path: Path) -> str:
    """SHA-256 of the file and of the modules next to it that it imports, directly or indirectly.

    RecipeError where one of them cannot be read.
    """
    found: dict[str, str] = {}
    waiting = [path]
    while waiting:
        file = waiting.pop()
        name = str(file.relative_to(path.parent))
        if name in found:
            continue
        try:
            content = file.read_bytes()
        except OSError as error:
            raise _unreadable(error, str(file)) from None
        found[name] = hashlib.sha256(content).hexdigest()
        for module in _imported(content):
            near = [path.parent / f"{module}.py", *(path.parent / module).rglob("*.py")]
            waiting += [other for other in near if other.is_file()]
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def _imported(source: bytes) -> set[str]:
    """First parts of the names of all imported modules; none of a text that is not Python."""
    names: set[str] = set()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # reported when it is imported
        return names
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def _problem(code: str, message: str, file: str, line: int | None, hint: str | None = None) -> Problem:
    return Problem(code, message, file, line, "python", hint)


def _read(path: Path, file: str) -> str:
    try:
        return read_text(path, LARGEST_TEXT)
    except UnicodeDecodeError:
        raise RecipeError(_problem("hooks-unreadable", "is not UTF-8", file, None)) from None
    except (OSError, ValueError) as error:
        raise _unreadable(error, file) from None


def _unreadable(error: OSError | ValueError, file: str) -> RecipeError:
    code, message = "hooks-unreadable", f"cannot be read: {getattr(error, 'strerror', None) or error}"
    hint = None
    if isinstance(error, FileNotFoundError):
        code, message = "hooks-missing", "no such file"
        hint = "set `python:` to a Python file, relative to the recipe"
    return RecipeError(_problem(code, message, file, None, hint))


def _parse(text: str, file: str) -> ast.Module:
    try:
        with warnings.catch_warnings():  # SyntaxWarning of invalid escapes
            warnings.simplefilter("ignore")
            return ast.parse(text, filename=file)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # zero bytes, nested too deeply
        message = f"is not valid Python: {getattr(error, 'msg', '') or error or type(error).__name__}"
        raise RecipeError(_problem("hooks-syntax", message, file, getattr(error, "lineno", None))) from None


def _definitions(tree: ast.Module) -> Iterator[_Definition]:
    """Names of the top level, also under `if` and `try`, imported and assigned ones too."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # a decorator may change the arguments
            yield _Definition(node.name, node, None if node.decorator_list else node.args)
        elif isinstance(node, ast.ClassDef):
            yield _Definition(node.name, node)
        elif isinstance(node, ast.Assign):
            arguments = node.value.args if isinstance(node.value, ast.Lambda) else None
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield _Definition(target.id, node, arguments)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield _Definition(alias.asname or alias.name, node)
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
