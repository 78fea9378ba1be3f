"""The recipe copied into the draft, leaf by leaf: each value with its place or its default. Pure."""

from __future__ import annotations

from operator import attrgetter

from launcher.plan.draft import Draft
from launcher.plan.inputs import Facts
from launcher.recipe.hooks import HOOK
from launcher.recipe.keys import has_problem_types, shared_keys
from launcher.recipe.schema import AdapterSection, DataSection, GenerationSection, Recipe
from launcher.tasks.grpo import BACKENDS, KEY
from launcher.tasks.sequence_classification import SINGLE


def record_recipe(draft: Draft, recipe: Recipe, facts: Facts) -> None:
    """Copy the recipe's values, and what is known of its model and its file of hooks."""
    spec = facts.model
    draft.put_recipe("task", recipe.task, "schema default")
    for name, key in shared_keys():
        value = attrgetter(name)(recipe)
        if key.absent is not None or value is not None:
            draft.put_recipe(name, value, key.absent or "")
    if draft.task.sees_images:
        _record_images(draft, recipe)
    draft.put_recipe("model.device_map", recipe.model.device_map, "not asked for")
    # A shipped fact's name is resolved here: the worker gets the configuration itself.
    given = recipe.model.config
    config = given if spec.made is not None and isinstance(given, dict) else spec.config
    config_value = None if given is None else dict(config)
    draft.put_recipe("model.config", config_value, "not asked for")
    if spec.wrapper is not None and recipe.model.config is None:
        reason = f"{recipe.task} reads text: of the {spec.wrapper} checkpoint only the text model is loaded"
        draft.put("model.text_only", True, reason)
    if draft.task.rolls_out:
        _record_rollouts(draft, recipe)
    _record_adapter(draft, recipe.adapter)
    _record_data(draft, recipe.data)
    _record_section(draft, recipe)
    stopping = recipe.early_stopping
    for name in ("patience", "threshold"):
        value = None if stopping is None else getattr(stopping, name)
        draft.put_recipe(f"early_stopping.{name}", value, "no early stopping asked for")
    draft.put_recipe("python.file", recipe.python, "no hooks", origin="python")
    draft.put_recipe("python.hooks", list(facts.hooks), "no hooks", origin="python")
    trains = any(HOOK[name].trains for name in facts.hooks)
    digest = facts.hooks_digest if trains else None
    draft.put("python.digest", digest, "the file decides what is learned" if trains else "no hook decides it")
    if recipe.sharding.zero_stage != "auto":
        draft.put_recipe("sharding.zero_stage", recipe.sharding.zero_stage, "")
    for name in ("offload_optimizer", "offload_param", "offload_activations"):
        draft.put_recipe(f"sharding.{name}", getattr(recipe.sharding, name), "nothing is offloaded")
    for name, value in recipe.trainer.items():
        draft.put_recipe(f"trainer.{name}", value, "")


def frozen_parts(recipe: Recipe) -> list[str]:
    """Parts of a model of images and text that are not trained."""
    return ["vision", "projector"] if recipe.model.freeze is None else list(recipe.model.freeze)


def _record_images(draft: Draft, recipe: Recipe) -> None:
    reason = "the vision tower and the projector are frozen by default, as in LLaMA-Factory and ms-swift"
    draft.put_recipe("model.freeze", frozen_parts(recipe), reason)
    model = recipe.model
    draft.put_recipe("model.image_sizes", model.image_sizes, "those of the model's image processor")


def _record_rollouts(draft: Draft, recipe: Recipe) -> None:
    """The reward functions, and how completions are sampled as fields of GRPOConfig."""
    draft.put_recipe(KEY, [entry.model_dump() for entry in recipe.reward], "")
    draft.put("trainer.reward_weights", [entry.weight for entry in recipe.reward], "`weight` in `reward:`")
    generation = recipe.generation or GenerationSection()
    for name, value in generation.model_dump(exclude={"backend"}).items():
        draft.put_recipe(f"trainer.{name}", value, "schema default", origin=f"generation.{name}")
    for name, value in BACKENDS[generation.backend].items():
        draft.put_recipe(f"trainer.{name}", value, "schema default", origin="generation.backend")


def _record_data(draft: Draft, data: DataSection) -> None:
    draft.put_recipe("data.train", [source.model_dump() for source in data.train], "")
    rows = data.eval
    evaluation: object = None
    if isinstance(rows, list):
        evaluation = [source.model_dump() for source in rows]
    elif rows is not None:
        evaluation = rows.model_dump()
    draft.put_recipe("data.eval", evaluation, "no evaluation asked for")
    fim = None if data.fim is None else data.fim.model_dump()
    draft.put_recipe("data.fim", fim, "documents are trained from left to right")
    if has_problem_types(draft.task):
        draft.put_recipe("data.problem_type", data.problem_type or SINGLE, "each label is one class")


def _record_section(draft: Draft, recipe: Recipe) -> None:
    """The section that only the recipe's task reads."""
    if section := draft.task.section:
        for name, (value, reason) in draft.task.section_values(getattr(recipe, section)).items():
            draft.put_recipe(f"{section}.{name}", value, reason)


def _record_adapter(draft: Draft, adapter: AdapterSection | None) -> None:
    if adapter is None:
        draft.put_recipe("adapter.type", None, "no adapter: all parameters are trained")
        return
    fields: dict[str, object] = adapter.model_dump()
    draft.put_recipe("adapter.type", fields.pop("type"), "the adapter method")
    path = fields.pop("path")
    for name in ("cast_input_dtype_enabled", "autocast_adapter_dtype"):  # throughput.py decides them
        del fields[name]
    if path is not None:
        draft.put_recipe("adapter.path", path, "")
        return
    for name, value in fields.items():
        draft.put_recipe(f"adapter.{name}", value, "")
    defaults = {
        "r": (16, "rank of common LoRA recipes"),
        "lora_alpha": (32, "twice the default rank"),
        "lora_dropout": (0.0, "peft's default"),
        "target_modules": (
            "all-linear",
            "every linear layer but the head; peft knows not every model",
        ),
    }
    for name, (value, reason) in defaults.items():
        if name not in fields:
            draft.put(f"adapter.{name}", value, reason)
