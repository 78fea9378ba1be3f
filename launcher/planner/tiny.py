"""`--tiny`: the same recipe with a two-layer narrow model, generated rows and four steps. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from launcher.machine.hardware import Hardware
from launcher.planner.decide import SIZES, shares, sharing_engine
from launcher.planner.narrow import LAYERS, narrow_config
from launcher.recipe.loading import LoadedRecipe, Origin
from launcher.recipe.schema import AdapterSection, GenerationSection, Recipe, RuntimeSection
from launcher.tasks import task_named

STEPS = 4
MAX_LENGTH, WITH_IMAGES = 128, 384
"""Most tokens of a sample, of text and with images."""
_TINY = Origin("override", "--tiny")
_SMALL = {"num_generations": 2, "max_completion_length": 16, "backend": "transformers"}
NARROWEST = 16
"""A width that every narrow model has at least."""
_ROLLED = tuple(f"generation.{name}" for name in _SMALL)
_GROUPS = ("steps_per_generation", "num_generations_eval")
_LAYER = re.compile(r"(?<!\w)\d")
"""A layer's index in a module's name or a pattern of it: `layers.11.`, not `fc1`."""
LENGTHS = ("max_steps", "save_steps", "logging_steps", "eval_steps")
"""What `--tiny` shortens, unless the command line sets it: `--tiny --set trainer.max_steps=12`."""

_GONE = {
    "num_train_epochs", "max_steps", "gradient_accumulation_steps", "warmup_steps", "save_steps",
    "logging_steps", "per_device_train_batch_size", "eval_steps", "generation_max_length",
    "generation_num_beams",
}  # fmt: skip
"""Fields of `trainer:` that a rehearsal leaves out."""


def tiny_recipe(loaded: LoadedRecipe, config: Mapping[str, object]) -> LoadedRecipe:
    """The recipe of the rehearsal; what changes has the origin `--tiny`."""
    recipe = loaded.recipe
    given = {name for name in LENGTHS if _is_set(loaded, f"trainer.{name}")}
    gone = _GONE - given
    trainer = {k: v for k, v in recipe.trainer.items() if k not in gone and not _is_of_groups(recipe, k)}
    least, _ = task_named(recipe.task).least_batch(trainer)
    if task_named(recipe.task).head == "none":
        least = max(least, 2)  # the other texts of a micro-batch are the negatives
    changed: dict[str, object] = {
        "max_steps": STEPS, "save_steps": 2, "logging_steps": 1,
        "per_device_train_batch_size": least, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    if recipe.trainer.get("eval_strategy") == "steps":
        changed["eval_steps"] = 2
    changed = {k: v for k, v in changed.items() if k not in given}
    if task_named(recipe.task).generates:
        changed["generation_max_length"] = 16
    model = recipe.model.model_copy(
        update={"name_or_path": None, "config": narrow_config(config), "gguf_file": None,
                "tokenizer": None, "revision": None, "device_map": None,
                "rope_parameters": None}  # they are in the configuration
    )  # fmt: skip
    shallow = {} if recipe.adapter is None else _shallow(recipe.adapter)
    adapter = None if recipe.adapter is None else recipe.adapter.model_copy(update=shallow)
    longest = WITH_IMAGES if task_named(recipe.task).sees_images else MAX_LENGTH
    data = recipe.data.model_copy(update={"max_length": min(recipe.data.max_length, longest)})
    update: dict[str, object] = {
        "model": model,
        "adapter": adapter,
        "data": data,
        "trainer": trainer | changed,
        "global_batch_size": None,
        "hardware": None,
        "runtime": RuntimeSection(),  # the mirror is the real run's
        **_rolled(recipe),
        **_in_width(recipe, narrow_config(config)),
    }
    dropped = {f"trainer.{name}" for name in gone} | {"global_batch_size"}
    origins = {k: v for k, v in loaded.origins.items() if k not in dropped}
    origins |= {f"trainer.{k}": _TINY for k in changed} | {f"adapter.{k}": _TINY for k in shallow}
    origins |= dict.fromkeys(("model.config", "data.max_length", *_ROLLED), _TINY)
    return replace(loaded, recipe=recipe.model_copy(update=update), origins=origins)


def _is_of_groups(recipe: Recipe, field: str) -> bool:
    """Whether a field of `trainer:` does not fit the pairs of completions of `--tiny`."""
    return task_named(recipe.task).rolls_out and (field in _GROUPS or field.startswith("vllm_"))


def _rolled(recipe: Recipe) -> dict[str, object]:
    """Pairs of short completions that the model itself generates."""
    if not task_named(recipe.task).rolls_out:
        return {}
    return {"generation": (recipe.generation or GenerationSection()).model_copy(update=_SMALL)}


def _in_width(recipe: Recipe, config: Mapping[str, object]) -> dict[str, object]:
    """As many dimensions of embeddings, of a narrow model: its width, a half, a quarter."""
    name = task_named(recipe.task).section
    if recipe.embedding is None or name is None or not recipe.embedding.matryoshka_dims:
        return {}
    width = config.get("hidden_size")
    width = width if isinstance(width, int) else NARROWEST
    dims = [width >> place for place in range(len(recipe.embedding.matryoshka_dims)) if width >> place]
    return {name: recipe.embedding.model_copy(update={"matryoshka_dims": dims})}


def _shallow(adapter: AdapterSection) -> dict[str, object]:
    """The fields of LoraConfig that name layers, for a model of two: other layers, and no ranks of one."""
    given = adapter.model_extra or {}
    changed: dict[str, object] = {
        name: {key: value for key, value in given[name].items() if not _LAYER.search(key)}
        for name in ("rank_pattern", "alpha_pattern")
        if isinstance(given.get(name), Mapping)
    }
    layers = given.get("layers_to_transform")
    if isinstance(layers, int):
        changed["layers_to_transform"] = layers % LAYERS
    elif isinstance(layers, list) and all(isinstance(layer, int) for layer in layers):
        changed["layers_to_transform"] = sorted({layer % LAYERS for layer in layers})
    return changed | {
        name: _in_any_layer(name, given[name])
        for name in ("target_modules", "exclude_modules", "modules_to_save")
        if _names_layer(given.get(name))
    }


def _names_layer(modules: object) -> bool:
    named = [modules] if isinstance(modules, str) else modules if isinstance(modules, list) else []
    return any(_LAYER.search(str(name)) for name in named)


def _in_any_layer(field: str, modules: str | list[str]) -> object:
    """Names of modules for all layers; which ones a pattern means is not known: all linear ones then."""
    if isinstance(modules, list):
        names = [name.rpartition(".")[2] if _LAYER.search(name) else name for name in modules]
        return list(dict.fromkeys(names))
    return "all-linear" if field == "target_modules" else None


def _is_set(loaded: LoadedRecipe, dotted: str) -> bool:
    """Whether the command line sets this key."""
    origin = loaded.origins.get(dotted)
    return origin is not None and origin.source == "override"


def tiny_on_cpu(loaded: LoadedRecipe) -> LoadedRecipe:
    """What a CPU cannot do is replaced: fp16 by fp32, bfloat16 norms beside it by float32, FlashAttention and
    flex by SDPA, tf32, context parallelism and parameters on NVMe by nothing, groups of ranks by two."""
    recipe = loaded.recipe
    sharding: dict[str, object] = {}
    if recipe.sharding.offload_param == "nvme":
        sharding["offload_param"] = "none"
        if recipe.sharding.offload_optimizer != "nvme":
            sharding["nvme_path"] = None
    if shares(recipe):
        # Two processes at most, of the engine that shares a copy.
        fewer = {"tp_size": min(2, recipe.sharding.tp_size), "sp_size": min(2, recipe.sharding.sp_size)}
        sharding |= {**fewer, "cp_size": 1, "engine": sharing_engine(recipe)[0]}
    update: dict[str, object] = {"sharding": recipe.sharding.model_copy(update=sharding)} if sharding else {}
    if recipe.precision.startswith("fp16"):
        update["precision"] = "fp32"
    model: dict[str, object] = {}
    if recipe.model.attn_implementation in ("flash_attention_2", "flex_attention"):
        model["attn_implementation"] = "sdpa"
    if not recipe.precision.startswith("bf16"):
        model["kbit_norms"] = None  # float32, as everything else
    if model:
        update["model"] = recipe.model.model_copy(update=model)
    if "tf32" in recipe.trainer:
        update["trainer"] = {k: v for k, v in recipe.trainer.items() if k != "tf32"}
    return replace(loaded, recipe=recipe.model_copy(update=update)) if update else loaded


def tiny_on_gpus(loaded: LoadedRecipe, found: Hardware) -> LoadedRecipe:
    """Groups of ranks that the narrow model's heads divide among: two, or none on a single device."""
    if not shares(loaded.recipe):
        return loaded
    sharding = loaded.recipe.sharding
    most = 2 if found.num_devices > 1 else 1
    fewer = {name: min(most, getattr(sharding, name)) for name in SIZES}
    recipe = loaded.recipe.model_copy(update={"sharding": sharding.model_copy(update=fewer)})
    return replace(loaded, recipe=recipe)


def tiny_hardware(asked: Hardware | None, found: Hardware, recipe: Recipe) -> Hardware:
    """The devices found here, in pairs where ranks share a copy; on a CPU up to two processes where the
    recipe asks for several, and two where it shares a copy that a CPU can share."""
    sharding = recipe.sharding
    if not found.is_cpu:
        wanted = asked.devices_per_node if asked else found.devices_per_node
        devices = min(wanted, found.devices_per_node)
        if shares(recipe) and devices > 1:
            devices -= devices % 2
        return replace(found, devices_per_node=devices)
    processes = 1 if asked is None else min(2, asked.num_devices)
    if max(sharding.tp_size, sharding.sp_size) > 1:
        processes = 2
    return replace(found, devices_per_node=processes)
