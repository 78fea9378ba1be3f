"""The Trainer of `python:` under ours: stops, saves and the place in the data stay those of trainers.py."""

from __future__ import annotations

import inspect
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.recipe.hooks import owned_method
from launcher.train.hooks import load_hooks
from launcher.train.job import Job

_UPSTREAM = ("transformers", "trl", "sentence_transformers", "builtins")


def over_own(job: Job, kind: Any) -> Any:
    """`kind`, one of trainers.py, over the user's class, if there is one: `super()` in it calls theirs.

    RecipeError where theirs is not a subclass of what ours is one of, or has a method that ours must own.
    """
    own = load_hooks(job).Trainer
    if own is None:
        return kind
    base = next(one for one in kind.__mro__ if _package(one) != "launcher")
    if not issubclass(own, base):
        raise _wrong(
            job, f"Trainer is no subclass of {base.__name__}", f"write `class Trainer({base.__name__}):`"
        )
    for one in own.__mro__:
        for name in vars(one) if _is_users(one) else ():
            if instead := owned_method(name):
                raise _wrong(job, f"{one.__name__} overrides {name}, which the run must own", instead)
    if has_own_loss(own):
        if load_hooks(job).compute_loss is not None:
            message, hint = "both compute_loss and Trainer.compute_loss are there", "remove one of them"
            raise _wrong(job, message, hint)
        parameters = inspect.signature(getattr(own, "compute_loss")).parameters  # noqa: B009
        if "num_items_in_batch" not in parameters and not any(
            one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()
        ):
            message, hint = "Trainer.compute_loss takes no num_items_in_batch", "add num_items_in_batch=None"
            raise _wrong(job, message, hint)
    return type(f"Planned{own.__name__}", (kind, own), {"__module__": own.__module__})


def has_own_loss(kind: type) -> bool:
    """Whether a class of the user's among the bases computes the loss itself."""
    return any("compute_loss" in vars(one) for one in kind.__mro__ if _is_users(one))


def _is_users(one: type) -> bool:
    return _package(one) not in (*_UPSTREAM, "launcher")


def _package(one: type) -> str:
    return one.__module__.partition(".")[0]


def _wrong(job: Job, message: str, hint: str) -> RecipeError:
    return RecipeError(Problem("own-trainer", message, str(job.python.file), path="python", hint=hint))
