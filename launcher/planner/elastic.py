"""Plans of a run that continues with fewer nodes (`launch.min_nodes`). Pure.

Every number of nodes has the global batch of all of them: accumulation grows as nodes leave. What else the
plan of all nodes decided stays, except that the micro-batch shrinks where it would not fit otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.errors import DoesNotFit, Problem, RecipeError
from launcher.plan.inputs import Facts, Pace
from launcher.plan.plan import NodeCount, Plan
from launcher.planner.planner import make_plan, plan_first
from launcher.planner.search import Search, search
from launcher.recipe.loading import LoadedRecipe, with_changes

if TYPE_CHECKING:
    from launcher.planner.adapting import Changes

BY = "launch.min_nodes"
"""What sets the values of a plan for fewer nodes, as `plan --explain` shows it."""
_GIB = 2**30


def plan_on(
    loaded: LoadedRecipe, facts: Facts, nodes: int | None = None, found: Search | None = None
) -> Plan:
    """The plan of a run in which `nodes` nodes take part; by default those of the hardware.

    found: the search on that hardware, where it is known. An elastic run uses the largest number of nodes of
    `plan.elastic` that is there and not refused. Raises as `make_plan`, and RecipeError (2) or DoesNotFit (3)
    where `launch.min_nodes` nodes are of no use.
    """
    launch, hardware = loaded.recipe.launch, facts.hardware
    if launch.min_nodes is None:
        if launch.max_nodes is not None:
            hint = "add launch.min_nodes, or remove it"
            raise RecipeError(
                Problem("elastic-nodes", "needs launch.min_nodes", path="launch.max_nodes", hint=hint)
            )
        return plan_first(loaded, facts, found or search(loaded, facts))
    if facts.tiny:  # on one node
        return make_plan(loaded, facts)
    most = launch.max_nodes or hardware.num_nodes
    there = hardware.num_nodes if nodes is None else nodes
    _check_bounds(launch.min_nodes, most, there)
    whole = make_plan(loaded, _facts_on(facts, most))
    plans = {most: whole, **dict(_fewer(loaded, facts, whole, launch.min_nodes))}
    counts = tuple(_count(plans[number], whole) for number in sorted(plans, reverse=True))
    _check_least(counts, whole)
    used = max(count.num_nodes for count in counts if not count.refused and count.num_nodes <= there)
    plan = plans[used]
    assert isinstance(plan, Plan), "it is not refused"
    return replace(plan, elastic=counts)


def _check_bounds(least: int, most: int, there: int) -> None:
    path = "launch.min_nodes"
    if most == 1:
        message, hint = "the run has one node", "plan for several: hardware.num_nodes or launch.max_nodes"
    elif least > most:
        message, hint = f"is {least}, and the run has at most {most} nodes", f"write {most} or less"
    elif there < least:
        message, hint = f"is {least}, and {there} node(s) are there", "start more nodes"
    elif there > most:
        path, message = "launch.max_nodes", f"is {most}, and {there} nodes are there"
        hint = "start fewer nodes, or write a larger number"
    else:
        return
    raise RecipeError(Problem("elastic-nodes", message, path=path, hint=hint))


def _facts_on(facts: Facts, nodes: int) -> Facts:
    """The facts for another number of nodes, on which no step has been timed."""
    pace = facts.pace if nodes == facts.hardware.num_nodes else Pace(None, facts.pace.save)
    return replace(facts, hardware=replace(facts.hardware, num_nodes=nodes), pace=pace)


def _fewer(
    loaded: LoadedRecipe, facts: Facts, whole: Plan, least: int
) -> Iterator[tuple[int, Plan | NodeCount]]:
    """Number of nodes -> its plan, or why it has none."""
    batch, most = whole.batch, whole.hardware.num_nodes
    for nodes in range(least, most):
        copies, rest = divmod(batch.data_parallel * nodes, most)
        if rest or copies == 0:
            group = whole.ranks // batch.data_parallel
            yield nodes, NodeCount(nodes, None, None, f"groups of {group} ranks do not divide their devices")
        elif batch.global_size % copies:
            why = f"{batch.global_size} samples are no multiple of their data-parallel ranks"
            yield nodes, NodeCount(nodes, None, None, why)
        else:
            yield nodes, _plan_of(loaded, _facts_on(facts, nodes), whole)


def _plan_of(loaded: LoadedRecipe, facts: Facts, whole: Plan) -> Plan | NodeCount:
    """The plan on the hardware of `facts`; with the micro-batch of all nodes, or another one that fits."""
    nodes = facts.hardware.num_nodes
    refused = NodeCount(nodes, None, None, "nothing can be planned")
    for changes in _ways(loaded, whole, nodes):
        asked = with_changes(loaded, changes, BY)
        try:
            found = search(asked, facts)
            if found.first.fits:
                return plan_first(asked, facts, found)
        except RecipeError as error:
            refused = NodeCount(nodes, None, None, error.problems[0].message)
            continue
        memory, held = found.first.memory, facts.hardware.device_bytes or 0
        needed = memory.needed + memory.margin
        why = f"each device needs {needed / _GIB:.1f} GiB of {held / _GIB:.1f} GiB"
        if memory.fits is not False:
            why = f"each node needs {memory.host_bytes / _GIB:.1f} GiB of its own memory"
        refused = NodeCount(nodes, found.first.batch, needed, why, fits=False)
    return refused


def _ways(loaded: LoadedRecipe, whole: Plan, nodes: int) -> Iterator[Changes]:
    """What the recipe is planned with, in the order in which it is tried."""
    from launcher.planner.adapting import GENERATION, MICRO, kept_choices  # few recipes are elastic

    changes = kept_choices(loaded, whole)
    steps, most = whole.at(GENERATION), whole.hardware.num_nodes
    if isinstance(steps, int) and steps * most % nodes == 0:  # as many completions as before
        changes[GENERATION] = steps * most // nodes
    yield changes
    if not whole.task.compares(whole):
        yield {**changes, MICRO: None}


def _count(found: Plan | NodeCount, whole: Plan) -> NodeCount:
    """What is shown of a number of nodes."""
    from launcher.planner.resuming import compare_plans

    if isinstance(found, NodeCount):
        return found
    nodes, needed = found.hardware.num_nodes, found.memory.needed + found.memory.margin
    if found is whole:
        return NodeCount(nodes, found.batch, needed)
    continued = compare_plans(whole, found, whole.ranks)
    refused = next((f"{one.setting}: {one.reason}" for one in continued.refused), "")
    return NodeCount(nodes, found.batch, needed, refused, conversion=bool(continued.conversion))


def _check_least(counts: tuple[NodeCount, ...], whole: Plan) -> None:
    """RecipeError or DoesNotFit unless launch.min_nodes nodes can continue the run."""
    least = counts[-1]
    if not least.refused:
        return
    useful = [count.num_nodes for count in counts if not count.refused]
    message = f"is {least.num_nodes}, but a run on {least.num_nodes} node(s) is not possible: {least.refused}"
    hint = (
        f"write {min(useful)}"
        if min(useful) < whole.hardware.num_nodes
        else "remove it: the run needs all its nodes"
    )
    problem = Problem("elastic-nodes", message, path="launch.min_nodes", hint=hint)
    raise RecipeError(problem) if least.fits else DoesNotFit(problem, replace(whole, elastic=counts))
