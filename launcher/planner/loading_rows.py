"""What `trainer.accelerator_config` may say of batches where several processes read rows. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from launcher.errors import RecipeError
from launcher.facts.hardware import Hardware
from launcher.facts.safe_files import parse_json
from launcher.plan.draft import Draft
from launcher.planner.decide import processes_of, refuse, shares
from launcher.recipe.schema import Recipe

_CONFIG = "trainer.accelerator_config"


def check_accelerator_config(draft: Draft, recipe: Recipe, hardware: Hardware) -> None:
    """RecipeError for batches of other sizes than the plan's, or for ranks whose batches differ in number."""
    if processes_of(recipe, hardware) > 1:
        for conflict in _conflicts(draft, recipe):
            raise conflict


def _conflicts(draft: Draft, recipe: Recipe) -> Iterator[RecipeError]:
    said = _read(draft.trainer.accelerator_config)

    def no(message: str, hint: str) -> RecipeError:
        return refuse(draft, "accelerator-config", _CONFIG, message, hint)

    if said is None:
        message = "a file whose batches the plan cannot see: split_batches and even_batches change them"
        yield no(message, "write what it says into the recipe, as a mapping")
        return
    if said.get("split_batches"):
        message = "split_batches: true divides each micro-batch among the processes: not the plan's batch"
        yield no(message, "drop it, and say trainer.per_device_train_batch_size")
    if said.get("even_batches") is False:
        message = (
            "even_batches: false gives some ranks fewer batches than others, and these wait for them forever"
        )
        yield no(message, "drop it: true is the default")
    if said.get("dispatch_batches") and shares(recipe):
        message = "dispatch_batches: true knows nothing of ranks that share a copy: it deals out wrong rows"
        yield no(message, "drop it: each rank reads its own rows")


def _read(said: object) -> Mapping[str, object] | None:
    """The mapping, also of JSON text as TrainingArguments takes it; None for the name of a file."""
    if isinstance(said, str):
        try:
            said = parse_json(said)
        except ValueError:
            return None
    return said if isinstance(said, Mapping) else None if said else {}
