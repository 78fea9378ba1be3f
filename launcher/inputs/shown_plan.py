"""The plan that is shown of a recipe: one that fits, else the nearest miss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from launcher.errors import DoesNotFit, Problem
from launcher.inputs.planning_facts import gather, operator_warnings
from launcher.plan.inputs import Facts
from launcher.plan.plan import Plan
from launcher.planner.elastic import plan_on
from launcher.planner.search import Search, search_rows
from launcher.planner.search import search as search_plans
from launcher.recipe.loading import LoadedRecipe
from launcher.render.bundle import Bundle, render
from launcher.report.outcome import note
from launcher.report.terminal import Page
from launcher.report.text import PLAIN

if TYPE_CHECKING:
    from launcher.planner.alternatives import Alternative


@dataclass(frozen=True, slots=True)
class ShownPlan:
    """A plan, or the nearest miss and why it does not fit."""

    bundle: Bundle
    found: Search
    problems: Sequence[Problem] = ()
    would_fit: Sequence[Alternative] = ()
    traced: Mapping[str, Any] = field(default_factory=dict)
    """The traced memory of the real model beside the estimate; empty where it was not traced."""

    @property
    def data(self) -> dict[str, Any]:
        """The data of `plan --json`."""
        data = self.bundle.to_json()
        if self.problems:
            data["would_fit"] = [other.to_json() for other in self.would_fit]
        return {**data, "trace": self.traced} if self.traced else data

    @property
    def ranking(self) -> dict[str, Any]:
        """The keys that `--search` adds to it."""
        found = self.found
        return {
            "search": search_rows(found, self.bundle.plan.schedule.steps),
            "compared": {
                "configurations": found.estimated + found.implied,
                "estimated": found.estimated,
                "implied": found.implied,
            },
            "left_out": [{"what": entry.what, "reason": entry.reason} for entry in found.left_out],
        }

    def text(self, page: Page = PLAIN) -> str:
        """What `plan` prints."""
        from launcher.report.plan_text import plan_text, trace_text

        return plan_text(self.bundle, page) + (trace_text(self.traced) if self.traced else "")

    def search_text(self) -> str:
        """What `plan --search` prints."""
        from launcher.report.plan_text import search_text

        shown, others = self.ranking, [other.text for other in self.would_fit]
        timed = self.bundle.plan.time.figures_known
        return search_text(shown["search"], shown["compared"], shown["left_out"], others, timed=timed)


def shown_plan(loaded: LoadedRecipe, facts: Facts) -> ShownPlan:
    """What `plan` shows. Raises as `gather` and `plan_on`, except for a recipe that does not fit."""
    if loaded.recipe.launch.hostfile:
        from launcher.schedulers.hostfile import hostfile_warnings

        absent = hostfile_warnings(loaded.recipe, facts.hardware)
        facts = replace(facts, warnings=(*facts.warnings, *absent))
    found = search_plans(loaded, facts)
    try:
        plan = plan_on(loaded, facts, found=found)
        return ShownPlan(render(plan), found, traced=_traced(plan, facts))
    except DoesNotFit as error:
        plan = error.nearest_miss
        return ShownPlan(render(plan), found, error.problems, error.would_fit, _traced(plan, facts))


def planned(loaded: LoadedRecipe, on: str | None, *, trace: bool = False) -> ShownPlan:
    """What `plan` shows of a recipe on this hardware; notes what this machine lacks for it.

    trace: trace the memory of the real model. Raises as `shown_plan`.
    """
    made = shown_plan(*gather(loaded, on, trace=trace))
    for warning in operator_warnings(made.bundle.plan):
        note(warning)
    return made


def _traced(plan: Plan, facts: Facts) -> Mapping[str, Any]:
    if facts.trace is None:
        return {}
    from launcher.inputs.model_trace import trace_rows

    return trace_rows(plan, facts) or {}
