"""Recipes, facts and plans for tests: plain functions, no mocks."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path

from launcher.machine.hardware import parse_hardware, with_host_memory
from launcher.models.model import read_model_spec
from launcher.models.model_config import shipped_model_config
from launcher.plan.inputs import Facts
from launcher.plan.plan import Plan, Provenance
from launcher.planner.planner import make_plan
from launcher.recipe.loading import LoadedRecipe, load_recipe

BASE = """\
model: {name_or_path: huggyllama/llama-7b}
adapter: {type: lora, r: 8}
data: {train: [{path: data/train.jsonl}], max_length: 512}
trainer: {max_steps: 10}
"""


def recipe(folder: Path, text: str = BASE, **overrides: object) -> LoadedRecipe:
    """A recipe of this text, with dotted overrides written as `a__b=value`."""
    path = folder / "recipe.yaml"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return load_recipe(path, [f"{k.replace('__', '.')}={v}" for k, v in overrides.items()])


def replace_recipe(loaded: LoadedRecipe, changes: dict[str, object]) -> LoadedRecipe:
    """The same recipe with other sections."""
    return replace(loaded, recipe=loaded.recipe.model_copy(update=changes))


def facts(
    on: str = "8xA100-80GB",
    model: str = "huggyllama/llama-7b",
    task: str = "causal-lm",
    **extra: object,
) -> Facts:
    """Facts of a machine that need not be here."""
    config = shipped_model_config(model)
    assert config is not None
    hardware = with_host_memory(parse_hardware(on), 64 * 10**9)
    spec = read_model_spec(model, config, "shipped facts", task)
    return Facts(hardware=hardware, model=spec, versions={}, cpu_cores=8, **extra)


def plan(folder: Path, on: str = "8xA100-80GB", text: str = BASE, **overrides: object) -> Plan:
    """The plan of a recipe on a machine."""
    loaded = recipe(folder, text, **overrides)
    model = loaded.recipe.model.name_or_path or "huggyllama/llama-7b"
    return make_plan(loaded, facts(on, model, loaded.recipe.task))


def with_settings(made: Plan, values: dict[str, object]) -> Plan:
    """The plan with other values of settings, named as in plan.json; None takes one away."""
    settings, known = made.settings.copy(), dict(made.provenance)
    for name, value in values.items():
        settings.put(name, value)
        known[name] = Provenance("recipe", "recipe.yaml:1", "set by the test")
    gone = {name for name, value in values.items() if value is None}
    return replace(
        made, settings=settings, provenance={name: one for name, one in known.items() if name not in gone}
    )
