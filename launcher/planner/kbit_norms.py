"""The dtype of what a quantised base has beside its packed matrices: norms, embedding, head, biases. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.engines import engine_of
from launcher.machine.hardware import AMPERE, Hardware
from launcher.models.model import ModelSpec
from launcher.plan.draft import Draft, Refusal
from launcher.planner.decide import HALF
from launcher.recipe.schema import Recipe

KEY = "model.kbit_norms"
NARROW = "bfloat16"


def could_narrow(recipe: Recipe, hardware: Hardware) -> bool:
    """Whether the recipe computes in bfloat16 on this hardware, which `kbit_norms: bfloat16` needs."""
    if recipe.precision != "auto":
        return HALF.get(recipe.precision) == NARROW
    capability = hardware.compute_capability
    return capability is not None and capability >= AMPERE


def decide_kbit_norms(draft: Draft, recipe: Recipe, spec: ModelSpec) -> None:
    """float32, as peft leaves them, unless the recipe asks for bfloat16 or the engine casts them anyway.

    After engine, precision and dtype are decided. RecipeError where they could not be trained so.
    """
    if draft.model.quantization == "none":
        return
    asked, engine = recipe.model.kbit_norms, engine_of(draft)
    if engine.casts_frozen(draft.precision):
        value = HALF[draft.precision]
        if asked not in (None, "auto", value):
            message = f"is {asked}, but {engine.name} casts every unquantised parameter to {value}"
            raise draft.refuse("kbit-norms-engine", KEY, message, "remove it, or use sharding.engine: ddp")
        draft.put(KEY, value, f"{engine.name} casts every unquantised parameter")
    elif asked == NARROW:
        for refusal in _refusals(draft, spec):
            raise draft.refuse(*refusal)
        draft.put_recipe(KEY, NARROW, "")
    else:
        draft.put_recipe(KEY, "float32", "as peft's prepare_model_for_kbit_training leaves them")


def _refusals(draft: Draft, spec: ModelSpec) -> Iterator[Refusal]:
    if not HALF.get(draft.precision) == draft.model.dtype == NARROW:
        message = f"is {NARROW}, but precision {draft.precision} loads {draft.model.dtype} weights"
        yield "kbit-norms-precision", KEY, message, "use precision: bf16 or bf16-true, or remove it"
    saved = draft.adapter.modules_to_save or ()
    whole = [name for name in spec.layout.embed_paths if _ends_with(name, saved)]
    if spec.head.name and not spec.head.saved and _ends_with(spec.head.name, saved):
        whole.append(spec.head.name)
    if whole:
        message = (
            f"is {NARROW}, but {whole[0]} is trained whole (adapter.modules_to_save), in float32, and so is "
            "what it reads or writes"
        )
        yield "kbit-norms-trained", KEY, message, "remove one of the two"
    if spec.head.saved and draft.precision.endswith("-true"):
        message = (
            f"is {NARROW}, but the head of task {draft.task.name} is trained in float32, and precision "
            f"{draft.precision} has no autocast to multiply the two"
        )
        yield "kbit-norms-trained", KEY, message, "use precision: bf16, or remove it"


def _ends_with(path: str, names: Sequence[str]) -> bool:
    """Whether one of `names` is the path, or its end."""
    return any(path == name or path.endswith(f".{name}") for name in names)
