"""How the samples of a batch lie in memory, and the attention kernel that reads them. Pure.

Laid end to end, the samples of a batch are one row without padding. The samples and their gradients stay the
same, which packing cannot say: with it a batch of N holds more of them.
"""

from __future__ import annotations

from launcher.facts.capabilities import is_varlen
from launcher.facts.model import ModelSpec
from launcher.plan.draft import Draft
from launcher.plan.inputs import Facts
from launcher.planner.decide import AMPERE, shares
from launcher.planner.fixes.packing import VERIFIED_FAMILIES
from launcher.planner.record import ONLY_EAGER
from launcher.recipe.schema import Recipe

ATTENTION, FREE, MULTIPLE = "model.attn_implementation", "data.padding_free", "data.pad_to_multiple_of"


def decide_batches(draft: Draft, recipe: Recipe, facts: Facts) -> None:
    """Kernel, padding, the multiple of a row. RecipeError for a kernel that cannot be."""
    _check_kernel(draft, recipe, facts)
    asked = recipe.model.attn_implementation
    padded = _why_padded(draft, recipe, facts.model)
    if asked is not None:
        draft.put_recipe(ATTENTION, asked, "")
    elif recipe.data.padding_free is False:
        draft.put(ATTENTION, *_usual(facts.model))
    elif why := (padded if recipe.data.padding_free is None else "") or _why_not_chosen(draft, recipe, facts):
        kernel, reason = _usual(facts.model)
        draft.put(ATTENTION, kernel, f"{reason}; not varlen: {why}")
    else:
        reason = "each sample of a batch attends to itself alone: nothing is spent on padding, or on a mask"
        draft.put(ATTENTION, "varlen", reason)
    _decide_padding_free(draft, recipe, padded)
    _decide_multiple(draft, recipe, facts)


def _usual(spec: ModelSpec) -> tuple[str, str]:
    if spec.model_type in ONLY_EAGER:
        return "eager", "its capped attention scores have no sdpa kernel in transformers"
    if not spec.has_sdpa:
        return "eager", f"transformers has no sdpa attention for {spec.model_type}"
    return "sdpa", "torch's own kernels: present on every device, no extra package"


def _decide_padding_free(draft: Draft, recipe: Recipe, padded: str) -> None:
    kernel = draft.model.attn_implementation
    if recipe.data.padding_free is not None:
        draft.put_recipe(FREE, recipe.data.padding_free, "")
    elif padded and not (recipe.data.packing and is_varlen(kernel)):  # packs hold several documents anyway
        draft.put(FREE, False, padded)
    elif is_varlen(kernel):
        reason = f"{kernel} takes the same samples side by side: what was padding is not computed"
        draft.put(FREE, True, reason)
    else:
        draft.put(FREE, False, f"{kernel} would pay for a mask over the whole batch")


def _why_padded(draft: Draft, recipe: Recipe, spec: ModelSpec) -> str:
    """Why the samples of a batch are not laid in one row by themselves; empty where they may be."""
    noise = "trainer.neftune_noise_alpha"
    if not draft.task.flattens:
        return "not asked for; its samples are padded"
    if spec.model_type not in VERIFIED_FAMILIES:
        return f"samples of {spec.model_type} in one row were not shown to stay apart"
    if is_foreign(draft, spec):
        return "the model's code is the repository's own: nobody knows whether samples in one row stay apart"
    if shares(recipe):
        return "ranks that share a copy take rows apart"
    if draft.trainer.use_cache:
        return "with a cache samples in one row would see each other"
    if draft.trainer.neftune_noise_alpha:
        return f"{noise}: its noise follows from the length of a row"
    if spec.config.get("output_router_logits"):
        return "the loss of the routers counts every token of a row"
    if recipe.data.packing and _reads_predictions(draft, recipe):  # evaluations of samples stay padded
        return "metrics read the predictions of each pack"
    if "dispatch_batches" in str(draft.trainer.accelerator_config):
        return "trainer.accelerator_config deals out a batch by its rows"
    return ""


def is_foreign(draft: Draft, spec: ModelSpec) -> bool:
    """Whether the model's class comes from its repository, and not from transformers."""
    return bool(draft.model.trust_remote_code) and "auto_map" in spec.config


def _reads_predictions(draft: Draft, recipe: Recipe) -> bool:
    read = [name for name in recipe.data.metrics if name != "perplexity"]
    own = "compute_metrics" in (draft.python.hooks or [])
    return recipe.data.eval is not None and (bool(read) or own)


def _why_not_chosen(draft: Draft, recipe: Recipe, facts: Facts) -> str:
    """Why the kernel is not taken by itself; empty where it is."""
    if _attention_dropout(facts.model) > 0:
        return f"{facts.model.name} drops attention weights, which torch's kernel for it does not"
    return _why_not_varlen(draft, recipe, facts)


def _why_not_varlen(draft: Draft, recipe: Recipe, facts: Facts) -> str:
    """Why this model cannot have the kernel; empty where it can."""
    spec = facts.model
    if not draft.task.flattens:
        return f"task {draft.task.name} was not tried with it"
    if spec.model_type not in VERIFIED_FAMILIES:
        return f"samples of {spec.model_type} in one row were not shown to stay apart"
    if shares(recipe):
        return "ranks that share a copy divide attention in their own way"
    if is_foreign(draft, spec):
        return "the model's code is the repository's own"
    if spec.layout.score_cap:
        return f"{spec.name} caps its scores, which it cannot"
    return ""


def _attention_dropout(spec: ModelSpec) -> float:
    said = spec.config.get("attention_dropout")
    drops = [float(said)] if isinstance(said, (int, float)) else []
    return max(drops + [stack.attention_dropout for stack in spec.layout.stacks])


def _check_kernel(draft: Draft, recipe: Recipe, facts: Facts) -> None:
    """RecipeError for varlen or flex_attention that the recipe asks for and this model cannot have."""
    asked, spec = recipe.model.attn_implementation, facts.model
    why = ""
    if asked == "varlen":
        why = _why_not_varlen(draft, recipe, facts)
    elif asked == "flex_attention" and facts.hardware.is_cpu:
        why = "torch has no backward pass of it for a CPU"
    elif asked == "flex_attention" and spec.model_type not in VERIFIED_FAMILIES:
        why = f"{spec.model_type} was not tried with it"
    elif asked == "flex_attention" and _attention_dropout(spec) > 0:
        why = f"it has no dropout, and {spec.name} drops attention weights"
    elif asked == "flex_attention" and shares(recipe):
        why = "ranks that share a copy divide attention in their own way"
    if why:
        draft.put_recipe(ATTENTION, asked, "")
        message = f"{asked} cannot be had here: {why}"
        raise draft.refuse("attention-conflict", ATTENTION, message, "drop it: the plan chooses a kernel")


def _decide_multiple(draft: Draft, recipe: Recipe, facts: Facts) -> None:
    """To a multiple of how many tokens the rows of a batch are filled up, None for the longest row."""
    hardware, asked = facts.hardware, recipe.data.pad_to_multiple_of
    if asked is not None:
        draft.put_recipe(MULTIPLE, asked, "")
        multiple = tensor_multiple(hardware.compute_capability)
        if not hardware.is_cpu and asked > 1 and asked % multiple:  # 1 says that nothing is filled up
            draft.warn(f"{MULTIPLE}: {asked} is no multiple of {multiple}, which tensor cores want here")
    elif own := draft.task.own_padding:
        draft.put(MULTIPLE, None, own)
    elif hardware.is_cpu:
        draft.put(MULTIPLE, None, "a CPU gains nothing from it, and every padded token costs there")
    else:
        multiple = tensor_multiple(hardware.compute_capability)
        reason = f"tensor cores want multiples of {multiple}"
        length = recipe.data.max_length
        if length % multiple:
            filled = -(-length // multiple) * multiple
            reason += f"; data.max_length {length} is none, so rows of that length are filled up to {filled}"
        draft.put(MULTIPLE, multiple, reason, source="hardware", by=hardware.device)


def tensor_multiple(capability: tuple[int, int] | None) -> int:
    """What tensor cores want sizes to be multiples of."""
    return 64 if capability is not None and capability >= AMPERE else 8
