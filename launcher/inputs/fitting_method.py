"""Find the method that fits for `init`: plan full fine-tuning, LoRA and QLoRA in turn."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.errors import DoesNotFit, EffilaunchError, Problem, RecipeError
from launcher.files.safe_files import expanded, is_dir
from launcher.inputs.model_spec import find_spec
from launcher.inputs.planning_facts import gather
from launcher.machine.hardware import Hardware
from launcher.machine.probe import resolve_path
from launcher.models.model import FAMILY_TASKS
from launcher.models.model_config import find_model_config, has_chat_template, token_counter
from launcher.plan.inputs import Facts
from launcher.planner.planner import make_plan
from launcher.planner.starting import Rows, StartAnswers, draft, first_length, methods, task_of
from launcher.recipe.loading import load_recipe
from launcher.recipe.yaml_writer import recipe_text
from launcher.tasks import task_named

_SHORTEST = 512
"""Tokens: the shortest data.max_length that is tried."""
_CHAT = re.compile(r"(?i)(^|[-_.])(it|instruct|chat|assistant|sft|dpo|hermes|zephyr|qwen)([-_.\d]|$)")
"""Names of chat models, which have a chat template."""
_DEFAULTS: tuple[str, ...] = ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M-Instruct")
"""Text models without licence agreement, largest first."""
_INSTEAD: Mapping[str, Mapping[str, Any]] = {
    "fix-packing-family": {"packs": False},
    "fix-fp16-bf16-pretrained": {"precision": "fp32"},
}
"""Refusal of the planner -> what the recipe sets for such models instead."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """The method and length that fit."""

    start: StartAnswers
    method: str
    length: int
    missed: tuple[str, ...] = ()
    """Methods that were tried and do not fit."""


def fit(model: str, goal: str, rows: Rows, hardware: Hardware) -> Fitting:
    """The first method that fits the model.

    Raises RecipeError if the model is not found or cannot learn the goal; DoesNotFit if no method fits.
    """
    keys = model_keys(model)
    config, origin = find_model_config(keys["name_or_path"], gguf_file=keys.get("gguf_file"))
    task = task_of(goal, rows.format, FAMILY_TASKS.get(str(config.get("model_type")), ()))
    spec, _ = find_spec(keys["name_or_path"], config, origin, task, ask=True)
    has_template = has_chat_template(keys["name_or_path"])
    if has_template is None:
        name = keys.get("gguf_file") or keys["name_or_path"].rpartition("/")[2]
        has_template = _CHAT.search(name) is not None
    if rows.longest and task_named(task).reads_tokens and (count := token_counter(keys["name_or_path"])):
        rows = replace(rows, counted_tokens=sum(map(count, rows.longest)))
    start = StartAnswers(goal, task, keys, spec, rows, hardware, has_template)
    while True:
        try:
            return _first_fitting(start)
        except RecipeError as error:
            changed = replace(start, **_INSTEAD.get(error.problems[0].code, {}))
            if changed == start:
                raise
            start = changed


def _first_fitting(start: StartAnswers) -> Fitting:
    """The first method that fits. Raises DoesNotFit, or RecipeError if every method is refused."""
    refused: dict[str, EffilaunchError] = {}
    with tempfile.TemporaryDirectory(prefix="effilaunch-") as folder:
        facts: Facts | None = None
        for method, length in _tries(start):
            data, notes = draft(start, method, length)
            file = Path(folder) / "recipe.yaml"
            file.write_text(recipe_text(data, notes), encoding="utf-8")
            try:
                loaded = load_recipe(file)
                if facts is None or facts.trace is not None:  # a trace is of one recipe
                    facts = gather(loaded, None)[1]
                make_plan(loaded, facts)
            except DoesNotFit as error:
                refused[method] = error
                continue
            except RecipeError as error:
                refused.setdefault(method, error)  # of a shorter length, it is that the length is too short
                continue
            return Fitting(start, method, length, tuple(name for name in refused if name != method))
    # The last one tried needs the least memory.
    misses = [error for error in refused.values() if isinstance(error, DoesNotFit)]
    if misses:
        raise misses[-1]
    problems = next(iter(refused.values())).problems
    gone = {str(file), None}
    raise RecipeError([replace(p, file=None, line=None) if p.file in gone else p for p in problems])


def _tries(start: StartAnswers) -> Iterator[tuple[str, int]]:
    """Methods at the length of the rows, then at shorter lengths that should still hold them."""
    lengths = [first_length(start)]
    task = task_named(start.task)
    if task.reads_tokens and not task.sees_images:  # what images need is not known
        pieces = start.goal == "text" or start.rows.longest_tokens is None
        least = _SHORTEST if pieces else max(_SHORTEST, start.rows.longest_tokens or 0)
        while lengths[-1] // 2 >= least:
            lengths.append(lengths[-1] // 2)
    for length in lengths:
        for method in methods(start):
            yield method, length


def model_keys(model: str) -> dict[str, str]:
    """`name_or_path`, and `gguf_file` where a folder's only weights are in one, or that file itself is named.

    Paths are absolute. RecipeError where one of several has to be named.
    """
    path = resolve_path(model)
    if model.lower().endswith(".gguf"):
        parent, _, name = model.rpartition("/")
        return {"name_or_path": _absolute(parent or "."), "gguf_file": name}
    is_folder = is_dir(path)
    held = sorted(path.glob("*.gguf")) if is_folder and not (path / "config.json").exists() else []
    if len(held) > 1:
        names = ", ".join(file.name for file in held)
        hint = f"name one of them, for example {model.rstrip('/')}/{held[0].name}"
        message = f"the folder contains several GGUF files: {names}"
        raise RecipeError(Problem("model-ambiguous", message, file=model, hint=hint))
    if held:
        return {"name_or_path": _absolute(model), "gguf_file": held[0].name}
    return {"name_or_path": _absolute(model) if is_folder else model}


def _absolute(path: str) -> str:
    return path if path.startswith("package:") else str(expanded(path).absolute())


def default_model(goal: str, rows: Rows, hardware: Hardware) -> str:
    """A known model that fits and suits the goal; empty if there is none."""
    candidates = task_named(task_of(goal, rows.format, ())).first_models or _DEFAULTS
    if hardware.is_cpu:
        candidates = candidates[-1:]
    for name in candidates:
        try:
            fit(name, goal, rows, hardware)
        except EffilaunchError:
            continue
        return name
    return ""
