"""What the hooks of `python:` turn off, conflict with and leave uncounted of the memory. Pure."""

from __future__ import annotations

from dataclasses import replace

from launcher.engines import engine_of
from launcher.memory.estimate import MemoryEstimate
from launcher.plan.draft import Draft
from launcher.plan.inputs import Facts
from launcher.planner.decide import shares
from launcher.recipe.hooks import HOOK
from launcher.recipe.schema import Recipe

_OFF = (False, None, "full", "none")
"""Values of settings that ask for nothing; 0 is one of them."""
UNCOUNTED_RANGE = (0.5, 1.5)
"""The range around an estimate that hooks leave incomplete, as shares of it: AdamW's states, which stand in
for those of another optimizer, are half of a full fine-tune's tensors in float32."""


def turned_off(draft: Draft, setting: str) -> str:
    """The hook that turns a setting off, and why; empty where none does."""
    for name in draft.python.hooks:
        if why := HOOK[name].turns_off.get(setting):
            return f"{name} in python: {why}"
    return ""


def check_hooks(draft: Draft, recipe: Recipe, facts: Facts) -> None:
    """RecipeError where the recipe sets what a hook turns off, or the engine cannot have the hook."""
    hooks = [HOOK[name] for name in draft.python.hooks]
    for hook in hooks:
        for setting, why in hook.turns_off.items():
            value = draft.at(setting)
            if draft.explicit(setting) and value not in _OFF:
                message = f"is {value!r}, but {hook.name} in python turns it off: {why}"
                hint = f"remove {setting}, or {hook.name} from the file"
                raise draft.refuse("hook-conflict", setting, message, hint)
        if hook.trains and shares(recipe):
            message = f"{hook.name} was not tried with ranks that share a copy"
            hint = f"drop tp_size, sp_size and cp_size, or {hook.name} from the file"
            raise draft.refuse("hook-conflict", "python", message, hint)
    if "optimizer" in draft.python.hooks:
        if conflict := engine_of(draft).own_optimizer_conflict(facts.profile or {}):
            raise draft.refuse("hook-conflict", "python", *conflict)
        draft.explain("trainer.optim", f"not used: {turned_off(draft, 'trainer.optim')}", source="default")


def uncounted(draft: Draft, facts: Facts) -> str:
    """What of the memory is not counted because of hooks; empty where all is."""
    known = {*draft.task.needed_hooks, *(() if facts.own_states is None else ("optimizer",))}
    found = [HOOK[name].uncounted for name in draft.python.hooks if name not in known]
    found = [what for what in found if what]
    return f"not counted: {', '.join(found)}" if found else ""


def widened(memory: MemoryEstimate, draft: Draft, facts: Facts) -> MemoryEstimate:
    """The estimate with a range that holds what hooks may change, and a note of what is not counted."""
    if facts.own_states is not None:
        traced = f"your optimizer keeps {facts.own_states:.2f} bytes of each trained value, as traced"
        memory = replace(memory, notes=(*memory.notes, traced))
    note = uncounted(draft, facts)
    if not note:
        return memory
    low, high = (round(share * memory.total) for share in UNCOUNTED_RANGE)
    notes = (*memory.notes, note)
    return replace(memory, low=min(memory.low, low), high=max(memory.high, high), notes=notes)
