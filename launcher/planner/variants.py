"""The choices that change more than sizes: engine, quantisation, offload. Pure.

What a recipe writes is fixed. The engine is open where it is absent or `auto`, quantisation and offload
only where the recipe says `auto`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.facts.hardware import Hardware
from launcher.planner.decide import engine_is_open
from launcher.planner.profile import profile_value
from launcher.recipe.loading import Origin
from launcher.recipe.schema import Recipe

QUANTIZATIONS = ("none", "int8", "nf4")
OFFLOADS = ("none", "cpu")
ENGINES = ("deepspeed", "ddp")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to fill in what the recipe leaves open: (dotted key, value) in a fixed order."""

    chosen: tuple[tuple[str, str], ...] = ()

    @property
    def values(self) -> dict[str, str]:
        return dict(self.chosen)

    def changed(self, dotted: str, value: str) -> Variant:
        """The same with another value for a key that it has."""
        return Variant(tuple((key, value if key == dotted else old) for key, old in self.chosen))


def variants(recipe: Recipe, hardware: Hardware, profile: Mapping[str, object] | None) -> list[Variant]:
    """All of them, what costs least first; one without a choice where the recipe leaves nothing open."""
    choices: dict[str, tuple[str, ...]] = {}
    if recipe.model.quantization == "auto":
        # Only an adapter can be trained over quantised weights.
        choices["model.quantization"] = QUANTIZATIONS if recipe.adapter else ("none",)
    for name in ("offload_optimizer", "offload_param"):
        if getattr(recipe.sharding, name) == "auto":
            choices[f"sharding.{name}"] = _offloads(name, hardware, profile)
    if engine_is_open(recipe, hardware):
        choices["sharding.engine"] = ENGINES
    made = (
        Variant(tuple(zip(choices, values, strict=True))) for values in itertools.product(*choices.values())
    )
    return [variant for variant in made if _makes_sense(variant)]


def _offloads(name: str, hardware: Hardware, profile: Mapping[str, object] | None) -> tuple[str, ...]:
    """The base profile's own word rules; a CPU has no memory to offload from."""
    said = profile_value(profile or {}, f"zero_optimization.{name}.device")
    if said not in (None, "auto"):
        return (str(said),)
    return ("none",) if hardware.is_cpu else OFFLOADS


def _makes_sense(variant: Variant) -> bool:
    """Plain data parallelism cannot offload."""
    values = variant.values
    offloads = "cpu" in (values.get("sharding.offload_optimizer"), values.get("sharding.offload_param"))
    return not (offloads and values.get("sharding.engine") == "ddp")


def filled_in(recipe: Recipe, variant: Variant) -> Recipe:
    """The recipe as if it said what the variant chose."""
    values = variant.values
    model = recipe.model
    if "model.quantization" in values:
        model = model.model_copy(update={"quantization": values["model.quantization"]})
    prefix = "sharding."
    sharding = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
    return recipe.model_copy(update={"model": model, "sharding": recipe.sharding.model_copy(update=sharding)})


def origins_without(origins: Mapping[str, Origin], variant: Variant) -> dict[str, Origin]:
    """Where the recipe says its values, less those that it left open: nobody has said what is chosen."""
    return {key: origin for key, origin in origins.items() if key not in variant.values}
