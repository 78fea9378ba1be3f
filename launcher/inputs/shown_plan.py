"""The plan that `plan` and the planner's page show: one that fits, else the nearest miss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from launcher.errors import DoesNotFit, Problem
from launcher.plan.inputs import Facts
from launcher.planner.elastic import plan_on
from launcher.planner.search import Search
from launcher.planner.search import search as search_plans
from launcher.recipe.loading import LoadedRecipe
from launcher.render.bundle import Bundle, render

if TYPE_CHECKING:
    from launcher.planner.alternatives import Alternative


@dataclass(frozen=True, slots=True)
class ShownPlan:
    """A plan, or the nearest miss and why it does not fit."""

    bundle: Bundle
    found: Search
    problems: Sequence[Problem] = ()
    would_fit: Sequence[Alternative] = ()

    @property
    def extra(self) -> dict[str, Any]:
        """The keys of `plan --json` that a plan which fits does not have."""
        return {"would_fit": [other.to_json() for other in self.would_fit]} if self.problems else {}


def shown_plan(loaded: LoadedRecipe, facts: Facts) -> ShownPlan:
    """What `plan` shows. Raises as `gather` and `plan_on`, except for a recipe that does not fit."""
    if loaded.recipe.launch.hostfile:
        from launcher.schedulers.hostfile import hostfile_warnings

        absent = hostfile_warnings(loaded.recipe, facts.hardware)
        facts = replace(facts, warnings=(*facts.warnings, *absent))
    found = search_plans(loaded, facts)
    try:
        return ShownPlan(render(plan_on(loaded, facts, found=found)), found)
    except DoesNotFit as error:
        return ShownPlan(render(error.nearest_miss), found, error.problems, error.would_fit)
