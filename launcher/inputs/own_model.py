"""The model and the datasets that hooks make, as planning sees them: read and traced in a child process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from launcher.errors import EffilaunchError, Problem, RecipeError
from launcher.inputs.first_rows import find_hooks
from launcher.machine.child import ask
from launcher.machine.software import require_modules
from launcher.models.memory_trace import TracedStep, Untraceable, read_step
from launcher.models.model import Made, ModelSpec, foreign_spec
from launcher.recipe.loading import LoadedRecipe
from launcher.recipe.schema import Recipe
from launcher.report.outcome import note

_COUNTED = (
    "memory is counted for the largest of the first {rows} samples of make_datasets: larger ones need more"
)
CHILD = "launcher.train.own_trace"
_PARAMS_OF_LAYER = 12
"""Times the square of its width: attention, and a feed-forward block of four times the width."""


def made_model(loaded: LoadedRecipe, *, tiny: bool, ask_torch: bool) -> tuple[LoadedRecipe, ModelSpec, str]:
    """The recipe, with an evaluation where the hooks make its rows; the model; and what is counted of it.

    RecipeError `not-in-closed-form` if a child process is not allowed; where a hook fails, or its datasets
    and the recipe do not go together. MachineError without the training packages.
    """
    recipe = loaded.recipe
    if tiny:
        message = f"--tiny makes model and rows small, which the hooks of task {recipe.task} make themselves"
        hint = "let the hooks make a small model, e.g. where an environment variable is set"
        raise RecipeError(Problem("usage", message, hint=hint))
    if not ask_torch:
        message = f"task {recipe.task} is planned with what its hooks make, which needs torch"
        hint = "`effilaunch plan` runs them in a process of its own"
        raise RecipeError(Problem("not-in-closed-form", message, path="python", hint=hint))
    require_modules(["torch", "transformers"])
    note(f"making the model and the datasets of {recipe.python}")
    found = ask(CHILD, {"ask": "model", "settings": _settings(recipe)})
    spec = _sketched(found, recipe)
    trainer = dict(recipe.trainer)
    if not found["recomputes"]:
        if trainer.get("activation_checkpointing"):
            message = f"{found['name']} does not support activation checkpointing"
            raise _refusal(
                "checkpointing-unsupported", message, "trainer.activation_checkpointing", "remove it"
            )
        trainer["activation_checkpointing"] = False
    evaluates = found["eval_rows"] is not None
    if not evaluates and (path := _needs_evaluation(recipe)):
        message = "needs an evaluation dataset, and make_datasets returns None in its place"
        raise _refusal("conflict", message, path, "return one, or remove this")
    data = recipe.data.model_copy(update={"eval": [] if evaluates else None})
    changed = recipe.model_copy(update={"trainer": trainer, "data": data})
    return replace(loaded, recipe=changed), spec, _COUNTED.format(rows=found["looked_at"])


def _refusal(code: str, message: str, path: str, hint: str) -> RecipeError:
    return RecipeError(Problem(code, message, path=path, hint=hint))


def _needs_evaluation(recipe: Recipe) -> str | None:
    """The key that asks for an evaluation."""
    if recipe.early_stopping is not None:
        return "early_stopping"
    if recipe.trainer.get("eval_strategy", "no") != "no":
        return "trainer.eval_strategy"
    return "trainer.load_best_model_at_end" if recipe.trainer.get("load_best_model_at_end") else None


def _settings(recipe: Recipe) -> dict[str, Any]:
    """What the hooks' half of a worker reads of a plan."""
    model, hooks = recipe.model, find_hooks(recipe)
    assert hooks is not None, "a rule asks for the file"
    values = {
        "task": recipe.task,
        "seed": recipe.seed,
        "python.file": recipe.python,
        "python.hooks": list(hooks.names),
        "python.digest": hooks.digest,
        "model.name_or_path": model.name_or_path,
        "model.config": model.config,
        "model.revision": model.revision,
        "model.cache_dir": model.cache_dir,
        "model.trust_remote_code": model.trust_remote_code,
        "model.gguf_file": None,
        "model.text_only": False,
        "trainer.max_steps": recipe.trainer.get("max_steps"),
    }
    return {name: {"value": value} for name, value in values.items()}


def _sketched(found: Mapping[str, Any], recipe: Recipe) -> ModelSpec:
    """The spec with exact counts; its one layer has as many parameters as the model."""
    params = int(found["params"])
    hidden = max(8, isqrt(params // _PARAMS_OF_LAYER))
    sizes = {
        "hidden": hidden, "inner": 4 * hidden, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": hidden,
        "vocab": 0, "positions": 0,
    }  # fmt: skip
    answer = {
        "sizes": sizes, "params": params, "linears": [], "layer_extra": 0, "model_extra": 0,
        "parameters": found["parameters"], "experts": [], "rms_norm": False, "has_sdpa": True,
        "embedded": {"path": "", "rows": 0, "width": hidden},
        "head": {"name": "", "in": hidden, "out": 1, "bias": False, "tied": True},
    }  # fmt: skip
    config = {"model_type": found["name"]}
    spec = foreign_spec(found["name"], config, "make_model", recipe.task, answer)
    made = Made(found["length"], found["train_rows"], found["eval_rows"])
    return replace(spec, frozen=found["frozen"], made=made)


def trace_made(
    request: Mapping[str, Any], choices: Mapping[str, Any]
) -> tuple[TracedStep, Mapping[str, str]]:
    """Trace a step of the model that hooks make; also the versions of the libraries. Raises Untraceable."""
    note("tracing a step of the model on its largest of the first samples")
    try:
        answer = ask(CHILD, {**request, "ask": "step", "settings": request["plan"]["settings"]})
    except EffilaunchError as error:
        raise Untraceable("; ".join(problem.message for problem in error.problems)) from None
    return read_step(answer, choices, None), answer["versions"]
