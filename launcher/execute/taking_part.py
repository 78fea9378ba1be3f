"""A node other than node rank 0: it plans nothing, starts its ranks when it is told, and leaves as the first.

Node rank 0 is found by its file in the run directory. If the port of the rendezvous answers and there is no
such file, this node does not see the run directory of the others: it still takes part in their roll call, in
which that is told to all.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import (
    DoesNotFit,
    EffilaunchError,
    Interrupted,
    MachineError,
    Problem,
    RecipeError,
    RunFailed,
)
from launcher.execute.binding import Order, bind_order
from launcher.execute.following import Ended, Start, follow
from launcher.execute.leftovers import remove_shared_buffers, remove_stale_locks, reserved_folder
from launcher.execute.nodes import Nodes, Said, host_lost, read_node
from launcher.execute.processes import WORKERS_LEAVE_S
from launcher.execute.run_dir import scratch_run_dir
from launcher.execute.signals import Stops, stopped_between
from launcher.execute.start_checks import check_free_memory
from launcher.execute.supervise import Limits, Watch
from launcher.machine.gpus import visible_gpus
from launcher.machine.job_member import JobMember
from launcher.machine.node_facts import FIRST
from launcher.machine.probe import has_killed, read_oom_kills
from launcher.render.command import render_agent

UNSEEN_S = 20.0
"""A file of node rank 0 that is not visible so long after its port answers is on another disk. New files take
some seconds on a network disk."""
NAME_S = 60.0
"""A name that nobody knows may be that of a pod that is starting; more often it is a typing error."""
_SILENT_S = 3.0
"""A user who waits longer than this is told for what."""
_JUST_ENDED_S = 20.0
"""An error that node rank 0 wrote at most this long before a node came is told to that node."""
_CONNECT_S, _POLL_S = 5.0, 0.3
_LEAVE_S = 60.0
"""After a signal before its first start a node waits so long for the end that node rank 0 tells."""
_CAUSE_S = 30.0
"""After its part has failed, a node that is alone waits so long for what node rank 0 says of it."""

Say = Callable[[str], None]


def take_part(
    place: JobMember, run_dir: Path, asked: str, devices_per_node: int, say: Say, limits: Limits | None = None
) -> None:
    """Take part in the run of node rank 0 until that has ended; raises what it raises there.

    asked: a digest of the recipe and options. MachineError (4) where node rank 0 does not come; RunFailed (5)
    where it is lost; Interrupted (130) after a signal.
    """
    limits = limits or Limits()
    with Stops() as stops:
        run = _find_first(place, run_dir, asked, limits.come, stops, say)
        if run is None:
            raise _unseen(place, run_dir, asked, devices_per_node, say)
        earlier = read_node(run_dir, place.member) or {}
        began = int(earlier["attempt"]) if earlier.get("run") == run else 0
        with Nodes(place, run_dir, asked) as nodes:
            nodes.follow_run(run)
            say(
                f"node {place.member} of {place.members} in {run_dir}; the first node is {nodes.first_host()}"
            )
            _obey(nodes, stops, say, began)


def _find_first(
    place: JobMember, run_dir: Path, asked: str, limit_s: float, stops: Stops, say: Say
) -> str | None:
    """The run of node rank 0, once its file changes; None where it lives and has none here."""
    began, first = time.monotonic(), read_node(run_dir, 0)
    before = (read_node(run_dir, place.member) or {}).get("run")
    open_since, told = None, False
    while True:
        now, values = time.monotonic(), read_node(run_dir, 0)
        if values is not None and _is_of_this_job(values, first, place.job, asked, before):
            return str(values["run"])
        why, known = _connects(place)
        open_since = None if why else (open_since or now)
        if open_since is not None and values is None and now - open_since > UNSEEN_S:
            return None
        limit = limit_s if known else min(limit_s, NAME_S)
        if now - began > limit:
            raise MachineError(_head_missing(place, why, limit, run_dir))
        if now - began > _SILENT_S and not told:
            told = True
            say(f"waiting up to {limit:.0f} s for node rank 0 ({why or run_dir})")
        if stops.first is not None:
            raise Interrupted(stopped_between(stops))
        time.sleep(_POLL_S)


def _is_of_this_job(
    values: Mapping[str, Any], first: Mapping[str, Any] | None, job: str, asked: str, before: object
) -> bool:
    """Whether this is the file of a node rank 0 that takes part in the same job as this node.

    first: what it was when this node came. A file may be left by an earlier command; one that has just ended
    with an error belongs to this node's command, which was started a moment later, unless it is of another
    job, or of the run in which this node took part `before`: a scheduler may restart a run within seconds.
    """
    if "verdict" in values and values.get("run") == before:
        return False
    if first is None or values.get("run") != first.get("run"):
        return True
    if "verdict" in values:
        is_same = (values.get("job"), values.get("asked")) == (job, asked)
        return is_same and time.time() - float(values["verdict"]["at"]) < _JUST_ENDED_S
    return values != first


def _connects(place: JobMember) -> tuple[str, bool]:
    """Why nobody answers at the port of the rendezvous, empty where somebody does; is the name known."""
    try:
        with socket.create_connection((place.head, place.port), _CONNECT_S):
            return "", True
    except (OSError, UnicodeError) as error:  # the second: what could be no name
        why = f"{place.head}:{place.port}: {getattr(error, 'strerror', None) or error}"
        return why, not (
            isinstance(error, UnicodeError) or getattr(error, "errno", None) == socket.EAI_NONAME
        )


def _head_missing(place: JobMember, why: str, limit: float, run_dir: Path) -> Problem:
    message = f"node rank 0 did not start within {limit:.0f} s ({why or f'nothing new in {run_dir}'})"
    hint = (
        "start the same command there with --node-rank 0, with the same --output-dir on a disk that all "
        "nodes share; --master-addr is the name or address under which this node reaches it"
    )
    return Problem("head-missing", message, hint=hint)


def _unseen(place: JobMember, run_dir: Path, asked: str, devices_per_node: int, say: Say) -> EffilaunchError:
    """Call the roll without the run directory, which this node does not see: the error of that."""
    command = render_agent(sys.executable, place.num_nodes, devices_per_node)
    order = Order(
        str(run_dir), tuple(command), {}, place.port, place.num_nodes * devices_per_node, devices_per_node,
        False, "none", stop_s=10.0, save_s=0.0, resume=None,
    )  # fmt: skip
    with scratch_run_dir("node") as folder:
        (folder / "logs").mkdir()
        bound = bind_order(order, place, (), asked)
        ended = follow(Start(bound.argv, bound.env, folder / "logs" / "agent.log", say, 10.0, 10.0))
    if ended.stopped_by is not None:
        return Interrupted(
            Problem("interrupted", f"{ended.stopped_by.name}: stopped while no rank was running")
        )
    problems = [problem for report in ended.reports for problem in report.problems]
    message = f"{socket.gethostname()} does not see {run_dir}, to which node rank 0 writes"
    hint = "all nodes must see it under this path, on a disk that they share"
    return MachineError(problems or Problem("not-shared", message, hint=hint))


def _obey(nodes: Nodes, stops: Stops, say: Say, began: int) -> None:
    """Start this node's part of each attempt, until node rank 0 tells how the run has ended.

    began: the attempt in which an `effilaunch` of this node took part that ended before this one came.
    """
    done, lost = began, ""
    leave_by = cause_by = float("inf")
    while True:
        now = time.monotonic()
        if now > cause_by or nodes.vanished:
            raise RunFailed(host_lost(lost or nodes.vanished))
        if (verdict := nodes.verdict) is not None:
            return _leave(int(verdict["code"]), [Problem(**problem) for problem in verdict["problems"]])
        if stops.first is not None:
            nodes.tell(Said(stop=stops.first))
            # Later it leaves only with node rank 0, whose ranks may be the last that stop.
            leave_by = min(leave_by, now + _LEAVE_S) if done == began else float("inf")
            if now > leave_by or stops.at_once or not nodes.takes_part:
                raise Interrupted(stopped_between(stops))
        if (found := nodes.take_order(done)) is not None:
            done, order = found
            if not nodes.takes_part:
                say(f"{len(order.seats)} other nodes train; this one is a spare")
                continue
            lost, cause_by = _take_part(nodes, order, say).lost_node, float("inf")
            if lost.startswith(FIRST):
                cause_by = 0.0
            elif lost and not order.elastic:  # another one's loss is told by node rank 0
                cause_by = time.monotonic() + _CAUSE_S
        time.sleep(_POLL_S)


def _leave(code: int, problems: list[Problem]) -> None:
    if code == 0:
        return
    kinds: dict[int, type[EffilaunchError]] = {
        kind.exit_code: kind for kind in (RecipeError, DoesNotFit, MachineError, RunFailed, Interrupted)
    }
    raise kinds.get(code, EffilaunchError)(problems)


def _holding_nvme(place: JobMember, order: Order) -> contextlib.AbstractContextManager[object]:
    """This node's folder of an offload: node rank 0 holds its own, one task of each other node does here."""
    if order.nvme is None or place.node_rank == 0 or place.local_task != 0:
        return contextlib.nullcontext()
    return reserved_folder(Path(order.nvme))


def _take_part(nodes: Nodes, order: Order, say: Say) -> Ended:
    """Start this node's ranks and follow them to their end; node rank 0 is told how they ended."""
    place, run_dir = nodes.seat, Path(order.run_dir)
    own = frozenset(place.ranks(order.devices_per_node))
    watch = Watch(run_dir, 0.0, order.save_s, 0.0, order.limits, own=own)
    log = run_dir / "logs" / f"launcher-{nodes.place.member}.log"
    before, trouble = read_oom_kills(), ""
    try:
        gpus = visible_gpus() if order.on_gpus else []
        alone = place.is_one_rank and len(gpus) > 1  # the other tasks may have begun on the other GPUs
        ours = gpus[place.local_task :][:1] if alone else gpus[: order.devices_per_node]
        check_free_memory(order.needed, ours, say)
        bound = bind_order(order, place, gpus, nodes.asked)
        for build_lock in remove_stale_locks(bound.env):
            say(f"removed {build_lock}: a killed build left it, and every later build would wait for it")
        start = Start(
            bound.argv, bound.env, log, say, stop_s=order.stop_s, orphaned_s=WORKERS_LEAVE_S,
            master_port=order.master_port, watch=watch, peers=nodes,
        )  # fmt: skip
        remove_shared_buffers(order.master_port)
        with _holding_nvme(place, order):
            ended = follow(start)
    except (OSError, EffilaunchError) as error:  # such as a variable that is not set here
        trouble = f"it could not be started: {error}"
        ended = Ended(code=1, killed=trouble)
    finally:
        remove_shared_buffers(order.master_port)
    nodes.end_part(
        ended.code, log.name, oom=has_killed(before, read_oom_kills()), trouble=trouble,
        cut_off=ended.lost_node.startswith(FIRST),
    )  # fmt: skip
    return ended
