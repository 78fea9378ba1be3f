"""Optimizers that an engine, or several processes, would train wrongly or not at all. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.facts.hardware import Hardware
from launcher.plan.draft import Draft
from launcher.plan.plan import Batch
from launcher.planner.decide import processes_of, refuse
from launcher.recipe.optimizer_needs import needs_of
from launcher.recipe.schema import Recipe

_KEY = "trainer.optim"


def decide_optimizer(draft: Draft, recipe: Recipe, hardware: Hardware) -> None:
    """RecipeError for an optimizer that the engine cannot use, a warning for one that it changes."""
    optim, processes = draft.trainer.optim, processes_of(recipe, hardware)
    needs = needs_of(optim)
    if needs.layerwise and processes > 1:
        message = f"{optim} updates each layer within the backward pass, so {processes} processes part"
        hint = f"use {optim.removesuffix('_layerwise')} with sharding.engine: ddp, or one device"
        raise refuse(draft, "optimizer-conflict", _KEY, message, hint)
    if draft.sharding.engine != "deepspeed":
        return
    if needs.whole and _stage(draft) >= needs.from_stage:
        message = f"{optim} cannot train under engine deepspeed: {needs.whole}"
        hint = "use sharding.engine: ddp, or an optimizer such as adamw_torch_fused, adamw_8bit or adafactor"
        raise refuse(draft, "zero-optimizer", _KEY, message, hint)
    if needs.by_tensor:
        draft.warn(
            f"{optim} {needs.by_tensor} tensor by tensor; under ZeRO each rank's flat partition is one "
            "tensor to it, so it trains otherwise than under sharding.engine: ddp"
        )


def _stage(draft: Draft) -> int:
    """The ZeRO stage, the highest where it is still open."""
    return 3 if draft.sharding.zero_stage is None else draft.sharding.zero_stage


def one_micro_batch(draft: Draft, batches: Sequence[Batch]) -> list[Batch]:
    """The batches that the optimizer takes: a layerwise one keeps no gradients for the next micro-batch.

    RecipeError where all of them accumulate.
    """
    optim = draft.trainer.optim
    if not needs_of(optim).layerwise:
        return list(batches)
    whole = [batch for batch in batches if batch.accumulation == 1]
    if not whole:
        message = f"{optim} updates after each micro-batch, but a step has {batches[0].accumulation} of them"
        hint = f"use {optim.removesuffix('_layerwise')}, or a micro-batch as large as the global batch"
        raise refuse(draft, "optimizer-conflict", _KEY, message, hint)
    return whole
