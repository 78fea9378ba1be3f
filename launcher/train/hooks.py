"""The user's functions and classes of `python: hooks.py`: load and check them, and report their errors."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import multiprocessing
import pickle
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import EffilaunchError, Problem, RecipeError, RunFailed
from launcher.recipe.hook_file import digest_of
from launcher.recipe.hooks import HOOK, Hook
from launcher.train.job import Job

FormatRow = Callable[[Mapping[str, Any], str, int], dict[str, Any] | None]


@dataclass(frozen=True, slots=True)
class Hooks:
    """The hooks of a run, None for those that the file does not define; recipe/hooks.py says what each is.

    A function raises RunFailed where the user's code raises, RecipeError where it returns something else than
    it must; both name the file, and the line where there is one.
    """

    format_row: FormatRow | None = None
    """(row, its file, its number) -> the new row, None to drop it. RecipeError if it fails."""
    compute_metrics: Callable[[Any], Any] | None = None
    """EvalPrediction -> metrics."""
    callbacks: Callable[[], list[Any]] | None = None
    """() -> TrainerCallbacks, whose events raise RunFailed. RecipeError if it fails."""
    compute_loss: Callable[[Any, Any, Any], Any] | None = None
    optimizer: Callable[[Any, Any], Any] | None = None
    data_collator: Callable[[Any], Callable[[Any], Any]] | None = None
    make_model: Callable[[Any], Any] | None = None
    prepare_model: Callable[[Any], Any] | None = None
    make_datasets: Callable[[], tuple[Any, Any]] | None = None
    processing: Callable[[], Any] | None = None
    Trainer: type | None = None
    digest: str | None = None
    """SHA-256 of the file and the modules next to it, for the key of samples that format_row made."""


def load_hooks(job: Job, *only: str) -> Hooks:
    """Import what the plan names from `python.file`; no hooks without a file.

    only: hooks without which the file is not imported, as commands on a result may not run it.
    RecipeError if it cannot be imported or a name is not a function, or not a class.
    """
    file, names = job.python.file, job.python.hooks
    if not file or (only and not set(only) & set(names)):
        return Hooks()
    path = Path(file)
    module = import_file(path)
    found = {name: _loaded(module, path, HOOK[name]) for name in names}
    digest = digest_of(path)
    if job.python.digest not in (None, digest):
        message = (
            f"has changed since the run was planned, or so has a module that it imports: {', '.join(names)}"
        )
        hint = "restore it, or start a new run"
        raise RecipeError(Problem("hooks-changed", message, file=str(path), path="python", hint=hint))
    return Hooks(**found, digest=digest)


def _loaded(module: types.ModuleType, path: Path, hook: Hook) -> Any:
    """A hook of the file, with its errors explained."""
    value: Any = getattr(module, hook.name, None)
    right = isinstance(value, type) if hook.kind == "class" else callable(value)
    if not right:
        what = "does not exist" if value is None else f"is a {type(value).__name__}, expected a {hook.kind}"
        message = f"the hook {hook.name} {what}"
        raise RecipeError(Problem("hook-missing", message, file=str(path), path="python"))
    if hook.kind == "class":
        return value
    explain = _EXPLAINED.get(hook.name)
    return _checked(path, hook, value) if explain is None else explain(path, value)


def _checked(path: Path, hook: Hook, function: Callable[..., Any]) -> Callable[..., Any]:
    guarded = _guarded(path, hook.name, function, trains=hook.trains)

    @functools.wraps(function)
    def checked(*args: Any) -> Any:
        returned = guarded(*args)
        if not _IS_RIGHT[hook.name](returned):
            line = function.__code__.co_firstlineno if isinstance(function, types.FunctionType) else None
            raise _wrong_result(path, line, hook.name, returned, hook.returns)
        return returned

    return checked


def _wrong_result(path: Path, line: int | None, name: str, returned: Any, expected: str) -> RecipeError:
    what = "None" if returned is None else f"a {type(returned).__name__}"
    message = f"{name} returned {what}, expected {expected}"
    return RecipeError(Problem("hook-result", message, str(path), line, "python"))


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


def _metrics_hook(path: Path, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return _guarded(path, "compute_metrics", function)


class OwnCollator:
    """What data_collator returned. Its errors name the file, and it pickles for workers that import anew."""

    def __init__(self, path: Path, collate: Callable[[Any], Any]) -> None:
        self._path, self._collate = path, collate

    def __call__(self, samples: Any) -> Any:
        with _explained(self._path, "data_collator", RunFailed, trains=True):
            batch = self._collate(samples)
        if not isinstance(batch, Mapping):
            raise _wrong_result(self._path, None, "the collator of data_collator", batch, "a dict of tensors")
        return batch

    def __reduce__(self) -> tuple[Any, ...]:
        return _read_collator, (str(self._path), pickle.dumps(self._collate))


def _read_collator(path: str, pickled: bytes) -> OwnCollator:
    import_file(Path(path))
    return OwnCollator(Path(path), pickle.loads(pickled))


def check_collator(collate: Any, *, workers: int, context: str | None) -> None:
    """RecipeError for a collator of `python:` that dataloader workers cannot get.

    context: how they are started, None as Python's default; a fork needs no pickle.
    """
    if not isinstance(collate, OwnCollator) or not workers:
        return
    if (context or multiprocessing.get_start_method()) == "fork":
        return
    try:
        pickle.dumps(collate)
    except Exception as error:
        message = f"data_collator returned what dataloader workers cannot get: {error_text(error)}"
        hint = "return an object of a class at the top level of the file, or set "
        hint += "trainer.dataloader_num_workers: 0"
        raise RecipeError(
            Problem("collator-not-picklable", message, str(collate._path), path="python", hint=hint)
        ) from error


def _collator_hook(path: Path, function: Callable[[Any], Any]) -> Callable[[Any], OwnCollator]:
    checked = _checked(path, HOOK["data_collator"], function)
    return lambda processing: OwnCollator(path, checked(processing))


_EXPLAINED: Mapping[str, Callable[[Path, Any], Any]] = {
    "format_row": _row_hook,
    "compute_metrics": _metrics_hook,
    "callbacks": _callbacks_hook,
    "data_collator": _collator_hook,
}
"""Hooks with more than `_checked`: metrics.py judges what compute_metrics returns."""


def _is_loss(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.numel() == 1


def _is_optimizer(value: Any) -> bool:
    """An optimizer, or a pair of it and a scheduler."""
    import torch

    if isinstance(value, tuple) and len(value) == 2:
        return isinstance(value[0], torch.optim.Optimizer) and hasattr(value[1], "step")
    return isinstance(value, torch.optim.Optimizer)


def _is_module(value: Any) -> bool:
    import torch

    return isinstance(value, torch.nn.Module)


def _are_datasets(value: Any) -> bool:
    """(train, eval or None), each with rows by number or one after the other."""
    if not isinstance(value, tuple) or len(value) != 2 or value[0] is None:
        return False
    return all(
        one is None
        or (not isinstance(one, str) and (hasattr(one, "__getitem__") or hasattr(one, "__iter__")))
        for one in value
    )


_IS_RIGHT: Mapping[str, Callable[[Any], bool]] = {
    "compute_loss": _is_loss,
    "optimizer": _is_optimizer,
    "data_collator": callable,
    "make_model": _is_module,
    "prepare_model": _is_module,
    "make_datasets": _are_datasets,
    "processing": lambda value: hasattr(value, "save_pretrained"),
}
"""Hook -> whether it returned what it must."""


def _guard_events(path: Path, callback: Any) -> None:
    """Let each event of a callback explain its errors; the object keeps its class."""
    for name in dir(type(callback)):
        if name.startswith("on_"):
            label = f"{type(callback).__name__}.{name}"
            setattr(callback, name, _guarded(path, label, getattr(callback, name)))


def _guarded(
    path: Path, label: str, function: Callable[..., Any], *, trains: bool = False
) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        with _explained(path, label, RunFailed, trains=trains):
            return function(*args, **kwargs)

    return guarded


@contextmanager
def _explained(
    path: Path, label: str, kind: type[EffilaunchError], *, trains: bool = False
) -> Iterator[None]:
    """Raise an error of the user's code as `kind`, with the line of the file.

    trains: it is a part of the step, so that memory that runs out in it stays what it is: `on_oom` answers.
    """
    try:
        yield
    except EffilaunchError:
        raise
    except (Exception, SystemExit) as error:
        if trains and _is_out_of_memory(error):
            raise
        message = f"the hook {label} raised {error_text(error)}"
        raise kind(
            Problem("hook-failed", message, file=str(path), line=error_line(error, path), path="python")
        ) from error


@contextmanager
def placed_in_file(job: Job) -> Iterator[None]:
    """Name the line of the user's file for an error of code that runs later: of a Trainer, an optimizer."""
    try:
        yield
    except EffilaunchError:
        raise
    except Exception as error:
        if not job.python.file or _is_out_of_memory(error):
            raise
        path = Path(job.python.file)
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        own = [number for number, name in enumerate(frames) if name == str(path)]
        below = frames[own[-1] + 1 :] if own else []
        if not own or any(part in name for name in below for part in _NOT_THEIRS):
            raise
        message = f"code of the file raised {error_text(error)}"
        problem = Problem("hook-failed", message, str(path), error_line(error, path), "python")
        raise RunFailed(problem) from error


_NOT_THEIRS = (
    "/transformers/trainer", "/trl/", "/launcher/", "/accelerate/", "/deepspeed/", "/torch/distributed/",
    "/torch/nn/parallel/",
)  # fmt: skip
"""Parts of file names: what fails below them, called by the user's code, may be another rank's failure."""


_FULL = re.compile(r"DefaultCPUAllocator: |out of memory|CUDA calloc", re.IGNORECASE)
"""Of errors that are plain RuntimeErrors: torch's on the host, CUDA's and bitsandbytes' own, NCCL's."""


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, which `on_oom` answers."""
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return known or _FULL.search(str(error)) is not None


def error_line(error: BaseException, path: Path) -> int | None:
    """The innermost line of the file in the traceback, None if the file is not in it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return lines[-1] if lines else None


def error_text(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
