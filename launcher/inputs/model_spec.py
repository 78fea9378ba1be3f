"""Find the ModelSpec: from the known families, else from the class of transformers in a child process."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from launcher.errors import MachineError, Problem, RecipeError
from launcher.machine.software import require_modules
from launcher.models.adapted import Adapted, Reach
from launcher.models.lora import NO_ADAPTER, adapted_by, adapter_key, count_adapter, lora_width
from launcher.models.model import (
    FAMILY_TASKS,
    ModelSpec,
    class_defaults,
    has_sizes,
    labels_of,
    read_model_spec,
)
from launcher.models.text_part import text_part
from launcher.report import outcome
from launcher.tasks import task_named


def find_spec(
    name: str,
    config: Mapping[str, Any],
    origin: str,
    task: str,
    *,
    ask: bool,
    adapter: Mapping[str, Any] | None = None,
    freeze: Sequence[str] = (),
) -> tuple[ModelSpec, str | None]:
    """The spec; and a note if the memory must be traced, as the family or the adapter has no closed form.

    Of a model for text and images, a task on text trains the text model alone (`ModelSpec.wrapper`).
    adapter: fields of LoraConfig. freeze: parts of a model of images and text that are not trained. ask:
    allow a child process with transformers and peft. Raises RecipeError: `not-in-closed-form` if that is
    needed and not allowed, `unknown-architecture` if transformers is missing or cannot build the model for
    the task, `multimodal-model` if it has no class for the text model alone.
    """
    config, wrapper = text_part(name, config, task)
    spec, note = _spec_of(name, config, origin, task, ask=ask, adapter=adapter, freeze=freeze)
    return replace(spec, wrapper=wrapper), note


def _spec_of(
    name: str,
    config: Mapping[str, Any],
    origin: str,
    task: str,
    *,
    ask: bool,
    adapter: Mapping[str, Any] | None,
    freeze: Sequence[str],
) -> tuple[ModelSpec, str | None]:
    try:
        return _with_adapter(read_model_spec(name, config, origin, task), config, adapter, ask=ask)
    except RecipeError as error:
        unknown = {problem.code for problem in error.problems} == {"unknown-architecture"}
        kind = config.get("model_type")
        if not unknown or not isinstance(kind, str) or not kind or kind in FAMILY_TASKS:
            raise
        if not ask:
            raise _only_traced(name, config, error) from None
        answer = _described(config, task, error, adapter, freeze)
    from launcher.models.model import foreign_spec

    spec = foreign_spec(name, config, origin, task, answer)
    if adapter is not None and answer.get("adapter"):
        spec = _answered(spec, adapter, answer["adapter"])
    note = (
        f"model_type {spec.model_type} is not known here: its sizes are read from transformers' class, and "
    )
    note += "its activations are traced"
    return spec, note + _left_out(answer.get("adapter") or {})


def config_with_sizes(name: str, config: Mapping[str, Any], task: str, *, ask: bool) -> Mapping[str, Any]:
    """The configuration that `--tiny` makes small: of the text model, with the class defaults it relies on.

    Published `text_config`s leave out sizes that are those of their class. ask: as for `find_spec`.
    """
    part = text_part(name, config, task).config
    kind = str(part.get("model_type"))
    if has_sizes(part) or not (kind in FAMILY_TASKS or ask):
        return part
    if kind in FAMILY_TASKS:
        return {**class_defaults(kind), **part}
    from launcher.models.memory_trace import Untraceable

    try:
        require_modules(["torch", "transformers"])
        answer = _ask({**_request(part, task, None), "ask": "config"})
    except (MachineError, Untraceable):
        return part  # find_spec says why it cannot be built
    return {**dict(answer["config"]), **part}


def _ask(request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of the child process, or the recorded one. Raises MachineError, Untraceable."""
    from launcher.models.memory_trace import ask_child
    from launcher.models.recorded_traces import recorded

    ask = partial(ask_child, request, sys.executable, outcome.note)
    return recorded(request, sys.executable, ask, outcome.note)


def can_trace() -> bool:
    """Whether torch, transformers and peft are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers", "peft"))


def _with_adapter(
    spec: ModelSpec, config: Mapping[str, Any], adapter: Mapping[str, Any] | None, *, ask: bool
) -> tuple[ModelSpec, str | None]:
    """The spec of a known family, with the answer of peft for an adapter without closed form."""
    found = None if adapter is None else count_adapter(spec, adapter)
    if adapter is None or (found is not None and not found.uneven):
        return spec, None
    if found is not None:
        note = "layers have different adapters, and in closed form each counts as having the mean of them"
        return spec, f"{note}; where torch is installed they are traced"
    if not ask:
        adapted_by(spec, adapter)  # raises what is not known
    from launcher.models.memory_trace import Untraceable

    request = _request(config, spec.task, adapter)
    try:
        require_modules(["torch", "transformers", "peft"])
        answer = _ask({**request, "ask": "adapter"})
        spec = _answered(spec, adapter, answer)
    except (MachineError, Untraceable) as error:
        why = f"peft cannot count what this adapter trains on model_type {spec.model_type}: {error}"
        hint = "pip install 'effilaunch[train]'" if isinstance(error, MachineError) else None
        raise RecipeError(Problem("not-in-closed-form", why, path="adapter", hint=hint)) from None
    note = "what this adapter trains is read from peft itself, and its memory is the trace's"
    return spec, note + _left_out(answer)


def _answered(spec: ModelSpec, adapter: Mapping[str, Any], answer: Mapping[str, Any]) -> ModelSpec:
    """The spec with the adapter as the child reports it. Raises RecipeError with the problems of peft."""
    if "problems" in answer:
        raise RecipeError(
            [Problem(code, text, path=path, hint=hint) for code, text, path, hint in answer["problems"]]
        )
    rank = answer["lora"] // max(1, lora_width(spec, None)) if spec.foreign else answer["rank"]
    paths, whole = tuple(answer["paths"]), tuple(answer["whole"])
    reach = Reach(**answer["reach"])
    known = Adapted(answer["params"], paths, max(1, rank), answer["uneven"], whole, reach)
    return replace(spec, adapters=((adapter_key(adapter), known),))


def _left_out(answer: Mapping[str, Any]) -> str:
    """The end of the note if layers that the adapter names get none."""
    names = answer.get("left_out")
    return f"; {NO_ADAPTER.format(count=len(names), first=names[0])}" if names else ""


def _only_traced(name: str, config: Mapping[str, Any], unknown: RecipeError) -> RecipeError:
    """The error for a family without closed form."""
    message = f"model {name!r} has model_type {config['model_type']!r}, which is not known in closed form"
    hint = f"`plan RECIPE --trace` traces transformers' own class; {unknown.problems[0].hint}"
    return RecipeError(Problem("not-in-closed-form", message, path="model.name_or_path", hint=hint))


def _request(config: Mapping[str, Any], task: str, adapter: Mapping[str, Any] | None) -> dict[str, Any]:
    labels = labels_of(config, task) if task_named(task).adds_head else None
    # A plan's defaults, for what LoraConfig would fill in otherwise.
    fields = None if adapter is None else {"r": 16, "target_modules": "all-linear", **adapter}
    return {"config": dict(config), "task": task, "labels": labels, "adapter": fields}


def _described(
    config: Mapping[str, Any], task: str, unknown: RecipeError, adapter: Mapping[str, Any] | None,
    freeze: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """The answer of the child about the model. Raises `unknown`, with the reason, if there is none."""
    from launcher.models.memory_trace import Untraceable

    try:
        require_modules(["torch", "transformers"])
        request = {**_request(config, task, adapter), "freeze": list(freeze), "ask": "model"}
        return _ask(request)
    except MachineError as error:
        why = f"other types of transformers are read where it is installed: {error.problems[0].message}"
    except Untraceable as error:
        why = f"transformers cannot build it here: {error}"
    problem = unknown.problems[0]
    raise RecipeError(replace(problem, hint=f"{problem.hint}; {why}")) from None
