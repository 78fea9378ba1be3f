"""Continue a run on the nodes that are left (`launch.min_nodes`), when some are lost or have not come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from launcher.errors import EffilaunchError, Interrupted, MachineError, Problem, RecipeError, RunFailed
from launcher.execute.endings import KnownFailure
from launcher.execute.following import Look
from launcher.execute.nodes import Nodes
from launcher.execute.resume import CONVERTED, converted, remove_converted
from launcher.execute.run_dir import FAULTY_GPU
from launcher.execute.start_point import plan_of_checkpoint, stored_plan
from launcher.files.checkpoint import read_manifest
from launcher.machine.node_facts import HOST_LOST, HOST_MISSING
from launcher.plan.plan import Plan
from launcher.planner.resuming import compare_plans
from launcher.render.bundle import Bundle


def take_seats(plan: Plan, nodes: Nodes) -> None:
    """Choose the nodes of the first attempt of an elastic run: the first ones, if the plan has fewer.

    RecipeError (2) where a node has several tasks.
    """
    if not plan.elastic:
        return
    if nodes.place.tasks_per_node > 1:
        message = "an elastic run needs one task per node, which starts the ranks of its node"
        hint = "start it with --ntasks-per-node=1, or remove launch.min_nodes"
        raise RecipeError(Problem("elastic-nodes", message, path="launch.min_nodes", hint=hint))
    nodes.seats = tuple(range(plan.hardware.num_nodes))


def is_loss(failure: EffilaunchError, plan: Plan, nodes: Nodes | None) -> bool:
    """Whether a failure is the loss of nodes without which a run of this plan may continue.

    Those that were asked to stop leave the run to the others, unless node rank 0 was asked, too.
    """
    if nodes is None or not plan.elastic:
        return False
    if isinstance(failure, Interrupted):
        return nodes.others_leave
    return failure.problems[0].code in (HOST_LOST, HOST_MISSING)


def is_faulty_gpu(failure: EffilaunchError) -> bool:
    """Whether a run failed of the hardware of a GPU."""
    return failure.problems[0].code in FAULTY_GPU


def excludes_faulty(failure: EffilaunchError, plan: Plan, nodes: Nodes | None) -> bool:
    """Exclude the node of a faulty GPU from an elastic run; whether enough others are left.

    Node rank 0 leads the run, and stays.
    """
    known = failure.finding.first_rank if isinstance(failure, KnownFailure) else None
    if nodes is None or known is None or not (plan.elastic and is_faulty_gpu(failure)):
        return False
    member = nodes.seats[known // plan.hardware.devices_per_node]
    least = min((count.num_nodes for count in plan.elastic if not count.refused), default=0)
    if member == nodes.place.member or nodes.place.members - len(nodes.excluded | {member}) < max(1, least):
        return False
    nodes.excluded.add(member)
    return True


def seats_left(plan: Plan, nodes: Nodes, failure: EffilaunchError, say: Callable[[str], None]) -> int:
    """Choose the nodes of the next attempt among those that are left; their number.

    The failure, with that number, where too few are left.
    """
    alive, problem = nodes.alive(), failure.problems[0]
    useful = [count.num_nodes for count in plan.elastic if not count.refused]
    number = max((count for count in useful if count <= len(alive)), default=0)
    if not number and isinstance(failure, Interrupted):
        raise failure
    if not number:
        left = f"{len(alive)} of at least {plan.launch.min_nodes} nodes are left (launch.min_nodes)"
        hint = "start it again on enough nodes with --resume auto"
        kind = MachineError if isinstance(failure, MachineError) else RunFailed
        raise kind(replace(problem, message=f"{problem.message}; {left}", hint=hint)) from failure
    nodes.seats = tuple(alive[:number])
    spare = f", {len(alive) - number} spare" if len(alive) > number else ""
    say(f"\n{problem.message}: the run continues on {number} node(s){spare}")
    return number


def readable(
    resume: str | None, bundle: Bundle, run_dir: Path, say: Callable[[str], None], look: Look
) -> str | None:
    """What the ranks of this bundle resume (EFFILAUNCH_RESUME): a checkpoint, converted where it must be.

    Raises as `converted`; RecipeError where the plan cannot continue from it.
    """
    if resume is None:
        return None
    checkpoint = Path(resume)
    if checkpoint.parent == run_dir / CONVERTED:  # any number of ranks reads it
        return resume
    manifest = read_manifest(checkpoint)
    assert manifest is not None, "it is complete"
    found = compare_plans(plan_of_checkpoint(checkpoint), stored_plan(bundle), manifest.world_size)
    if found.refused:
        raise RecipeError([difference.problem() for difference in found.refused])
    if not found.conversion:
        return resume
    target = converted(checkpoint, run_dir, found.conversion, say, look)
    remove_converted(run_dir, keep=target)
    return str(target)
