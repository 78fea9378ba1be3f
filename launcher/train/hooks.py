"""The user's functions of `python: hooks.py`: load and check them, and report their errors."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import EffilaunchError, Problem, RecipeError, RunFailed
from launcher.train.job import Job

FormatRow = Callable[[Mapping[str, Any], str, int], dict[str, Any] | None]


@dataclass(frozen=True, slots=True)
class Hooks:
    """The hooks of a run, None for those that the file does not define."""

    format_row: FormatRow | None = None
    """(row, its file, its number) -> the new row, None to drop it. RecipeError if it fails."""
    compute_metrics: Callable[[Any], Any] | None = None
    """EvalPrediction -> metrics. RunFailed if it raises."""
    callbacks: Callable[[], list[Any]] | None = None
    """() -> TrainerCallbacks, whose events raise RunFailed. RecipeError if it returns something else."""
    digest: str | None = None
    """SHA-256 of the file and the modules next to it, for the key of samples that format_row made."""


def load_hooks(job: Job) -> Hooks:
    """Import the functions of the plan from `python.file`; no hooks without a file.

    RecipeError if it cannot be imported or a name is not a function.
    """
    file, names = job.python.file, job.python.hooks
    if not file:
        return Hooks()
    path = Path(file)
    module = import_file(path)
    found = {name: _function(module, path, name) for name in names}
    return Hooks(
        format_row=_row_hook(path, found["format_row"]) if "format_row" in found else None,
        compute_metrics=(
            _guarded(path, "compute_metrics", found["compute_metrics"])
            if "compute_metrics" in found
            else None
        ),
        callbacks=_callbacks_hook(path, found["callbacks"]) if "callbacks" in found else None,
        digest=_digest(path),
    )


def _digest(path: Path) -> str:
    """SHA-256 of the file and of the modules next to it that it imports, directly or indirectly."""
    found: dict[str, str] = {}
    waiting = [path]
    while waiting:
        file = waiting.pop()
        name = str(file.relative_to(path.parent))
        if name in found:
            continue
        content = file.read_bytes()
        found[name] = hashlib.sha256(content).hexdigest()
        for module in _imported(content):
            near = [path.parent / f"{module}.py", *(path.parent / module).rglob("*.py")]
            waiting += [other for other in near if other.is_file()]
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def _imported(source: bytes) -> set[str]:
    """First parts of the names of all imported modules."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def import_file(path: Path, place: str = "python") -> types.ModuleType:
    """The file as a module with a unique name; modules next to it can be imported while it loads.

    It runs once in a process: a rank that prepares the data has imported it already. place: the recipe's key.
    """
    missing = RecipeError(Problem("hooks-missing", "no such Python file", file=str(path), path=place))
    if not path.is_file():
        raise missing
    name = f"effilaunch_hooks_{hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:  # not the name of a Python file
        raise missing
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickling of its functions and dataclasses look it up there
    folder = str(path.parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        line = error_line(error, path)
        if isinstance(error, SyntaxError) and error.filename == str(path):
            line = error.lineno
        raise RecipeError(
            Problem("hooks-broken", f"cannot be imported: {error_text(error)}", str(path), line, place)
        ) from error
    finally:
        sys.path.remove(folder)
    return module


def _function(module: types.ModuleType, path: Path, name: str) -> Callable[..., Any]:
    value: Callable[..., Any] | None = getattr(module, name, None)
    if value is None or not callable(value):
        what = "does not exist" if value is None else f"is a {type(value).__name__}, expected a function"
        raise RecipeError(Problem("hook-missing", f"the hook {name} {what}", file=str(path), path="python"))
    return value


def _row_hook(path: Path, function: Callable[..., Any]) -> FormatRow:
    def format_row(row: Mapping[str, Any], file: str, number: int) -> dict[str, Any] | None:
        with _explained(path, f"format_row, for the row {file}:{number},", RecipeError):
            returned = function(dict(row))
        if returned is None or isinstance(returned, dict):
            return returned
        raise RecipeError(
            Problem(
                "hook-result",
                f"format_row returned {type(returned).__name__}, expected a dict, or None to drop the row",
                file=file,
                line=number,
                path="python",
            )
        )

    return format_row


def _callbacks_hook(path: Path, function: Callable[[], Any]) -> Callable[[], list[Any]]:
    def callbacks() -> list[Any]:
        from transformers import TrainerCallback

        with _explained(path, "callbacks", RecipeError):
            returned = list(function())
        for callback in returned:
            if not isinstance(callback, TrainerCallback):
                message = (
                    f"callbacks returned {callback!r} in its list, expected instances of TrainerCallback"
                )
                raise RecipeError(Problem("hook-result", message, file=str(path), path="python"))
            _guard_events(path, callback)
        return returned

    return callbacks


def _guard_events(path: Path, callback: Any) -> None:
    """Let each event of a callback explain its errors; the object keeps its class."""
    for name in dir(type(callback)):
        if name.startswith("on_"):
            label = f"{type(callback).__name__}.{name}"
            setattr(callback, name, _guarded(path, label, getattr(callback, name)))


def _guarded(path: Path, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        with _explained(path, label, RunFailed):
            return function(*args, **kwargs)

    return guarded


@contextmanager
def _explained(path: Path, label: str, kind: type[EffilaunchError]) -> Iterator[None]:
    """Raise an error of the user's code as `kind`, with the line of the file."""
    try:
        yield
    except EffilaunchError:
        raise
    except (Exception, SystemExit) as error:
        message = f"the hook {label} raised {error_text(error)}"
        raise kind(
            Problem("hook-failed", message, file=str(path), line=error_line(error, path), path="python")
        ) from error


def error_line(error: BaseException, path: Path) -> int | None:
    """The innermost line of the file in the traceback, None if the file is not in it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return lines[-1] if lines else None


def error_text(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
