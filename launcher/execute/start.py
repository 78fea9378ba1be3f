"""Prepare the data and start the ranks of a bundle, follow them, and return their result or error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from launcher.errors import RunFailed
from launcher.execute.binding import Bound, Order, bind_order, fill, whole_environment
from launcher.execute.endings import (
    PREPARE_LOG,
    failures_while_stopping,
    find_known,
    interruption,
    run_failure,
    saved_at,
    supervised_failure,
    was_stopped,
)
from launcher.execute.following import Ended, Look, Start, blind, follow
from launcher.execute.leftovers import remove_shared_buffers, remove_stale_locks
from launcher.execute.nodes.group import Group
from launcher.execute.nodes.hello import digest_of, prepared_data
from launcher.execute.processes import WORKERS_LEAVE_S
from launcher.execute.resume import show_start
from launcher.execute.run_dir import ENDED, MARKER, STOPPED, record_bound, unwritable
from launcher.execute.supervise import Limits, Watch
from launcher.facts import probe
from launcher.facts.checkpoint import FINISHED_BEFORE
from launcher.facts.job_member import JobMember
from launcher.facts.probe import has_killed, read_oom_kills
from launcher.facts.rank_status import PREPARE_STAGE, PREPARED, PREPARES
from launcher.facts.safe_files import parse_json, write_text
from launcher.knowledge.diagnose.findings import Finding
from launcher.knowledge.diagnose.run_dir import LOST
from launcher.plan.plan import Plan
from launcher.planner.stopping import slow_step_word
from launcher.render.bundle import Bundle
from launcher.render.command import HOSTFILE, PREPARE, WORKER, render_hostfile

ALONE = JobMember("", 0, 1, 1, 0, 1, 0, "", 0)
"""The place of a run on one machine."""
PREPARE_STOP_S = 10.0
"""The process that prepares data has nothing to save: its cache stays."""
LEAST_STOP_S = 60.0
"""Least time for a step and a save."""
_TRY = "==== try "
"""Beginning of the line between two attempts of a run in all its logs."""


def bind(bundle: Bundle, values: Mapping[str, str]) -> tuple[list[str], list[str], dict[str, str]]:
    """The bundle's two argvs (prepare, launch) and environment with the late values in place."""
    env = dict(zip(bundle.env, fill(tuple(bundle.env.values()), values), strict=True))
    return fill(bundle.prepare, values), fill(bundle.command, values), env


def prepare_data(
    bundle: Bundle,
    run_dir: Path,
    *,
    samples: int | None = None,
    echo: Callable[[str], None],
    group: Group | None = None,
    look: Look = blind,
) -> None:
    """Prepare the data of a written run directory, in a process that ends before any rank starts.

    samples: how many of them data.json contains; None: as many as a run keeps. group: the other nodes of the
    job, which wait meanwhile. look: receives the progress. Raises as `execute`.
    """
    late = {"run_dir": str(run_dir), "devices": "", "master_port": "0", "master_addr": "", "node_rank": "0"}
    prepare, _, env = bind(bundle, late)
    if samples is not None:
        prepare.append(str(samples))
    log = run_dir / "logs" / PREPARE_LOG
    full_env, _ = whole_environment(env, bundle.plan.trainer.report_to)
    start = Start(
        prepare, full_env, log, echo, stop_s=PREPARE_STOP_S, orphaned_s=PREPARE_STOP_S, peers=group,
        stage=PREPARE_STAGE, look=look,
    )  # fmt: skip
    before = read_oom_kills()
    ended = follow(start)
    if group is not None:
        group.raise_if_over()
    if ended.stopped_by is not None:
        again = "run the command again; what was prepared before stays in the cache"
        raise interruption(run_dir, ended, again=again)
    if ended.code != 0 or not (run_dir / "data.json").is_file():
        oom = has_killed(before, read_oom_kills())
        raise run_failure(run_dir, ended.code, log.name, oom=oom, said=ended.reports)


def execute(
    bundle: Bundle,
    run_dir: Path,
    *,
    devices: str,
    master_port: int,
    resume: str | None,
    echo: Callable[[str], None],
    prepare: bool = True,
    limits: Limits | None = None,
    lock: int | None = None,
    group: Group | None = None,
    look: Look = blind,
) -> dict[str, Any]:
    """Run the bundle in `run_dir` (already written) and return result.json.

    `echo` gets each output line, `look` what the ranks say. master_port: another one is taken where something
    listens there by the time that the ranks are started. The data is prepared first: by rank 0 where there is
    one machine, else in a process of its own; without `prepare` the run directory has its data.json already.
    lock: descriptor of the run directory's lock, where it is held. group: the other members of the job, where
    the plan is for several machines: they start their part of it.
    Raises MachineError (4) or RecipeError (2) where the run directory cannot be written before the start;
    RunFailed (5; KnownFailure where the workers met a failure of the registry), RecipeError (2) or
    MachineError (4) when a process found the recipe, its data or the machine at fault, Interrupted (130)
    after a signal that asks to stop. No process that it started outlives this call, whatever ends it.
    """
    order = _order(bundle, run_dir, master_port, resume, limits or Limits(), group)
    ids = [device for device in devices.split(",") if device]
    place = ALONE if group is None else group.place
    bound = bind_order(order, place, ids)
    _write_try(bundle, run_dir, _recorded(bundle.plan, order, devices, bound, group), resume, group)
    for note in bound.notes:
        echo(note)
    in_ranks = prepare and _prepared_in_ranks(bundle, run_dir, echo, group, look)
    if not probe.is_free(order.master_port):  # preparing may have taken hours
        order, bound = _with_another_port(order, place, ids, run_dir)
    for build_lock in remove_stale_locks(bound.env):
        echo(f"removed {build_lock}: a killed build left it, and every later build would wait for it")
    bound.env[PREPARES] = "1" if in_ranks else ""
    watch = _watch(bundle.plan, run_dir, order.limits, group)
    start = Start(
        bound.argv, bound.env, run_dir / "logs" / "launcher.log", echo,
        stop_s=order.stop_s, orphaned_s=WORKERS_LEAVE_S, master_port=order.master_port, lock=lock,
        watch=watch, judge_step=partial(slow_step_word, bundle.plan), peers=group, look=look,
    )  # fmt: skip
    if group is not None:
        group.look(prepared_data(run_dir))
        group.begin(order)
        echo(group.described(bound.interface))
    return _outcome(run_dir, start, group, order.devices_per_node)


def _prepared_in_ranks(
    bundle: Bundle, run_dir: Path, echo: Callable[[str], None], group: Group | None, look: Look
) -> bool:
    """Whether the ranks are to prepare the data; otherwise it is prepared now, in a process of its own.

    The preparation of some tasks waits for all ranks, of which one alone would come.
    """
    meets = not bundle.plan.task.prepared_by_ranks
    if group is None and not meets and PREPARE in bundle.prepare and WORKER in bundle.command:
        return True
    prepare_data(bundle, run_dir, echo=echo, group=group, look=look)
    with contextlib.suppress(OSError):  # the next attempt prepares it again
        (run_dir / "logs" / PREPARED).touch()
    return False


def is_prepared(run_dir: Path) -> bool:
    """Whether the last attempt has prepared the data."""
    return (run_dir / "logs" / PREPARED).is_file()


def _write_try(
    bundle: Bundle, run_dir: Path, bound: Mapping[str, Any], resume: str | None, group: Group | None
) -> None:
    """Write the files of this attempt; all nodes must see them."""
    try:
        _begin_try(run_dir, bound, resume)
        show_start(bundle, run_dir, resume)
        if group is not None:
            write_hostfile(bundle.plan, run_dir, group)
    except OSError as error:
        raise unwritable(run_dir, error) from error
    if group is not None:
        plan, python = run_dir / "plan.json", bundle.plan.interpreter
        group.look({str(plan): digest_of(plan), **({python: None} if Path(python).is_absolute() else {})})


def _order(
    bundle: Bundle, run_dir: Path, master_port: int, resume: str | None, limits: Limits, group: Group | None
) -> Order:
    """This attempt, as every node starts its part of it."""
    plan = bundle.plan
    save_s = _stop_seconds(plan)
    return Order(
        str(run_dir), bundle.command, bundle.worker, bundle.env,
        master_addr="127.0.0.1" if group is None else group.members.address_for(), master_port=master_port,
        num_devices=plan.hardware.num_devices, devices_per_node=plan.hardware.devices_per_node,
        on_gpus=not plan.hardware.is_cpu, report_to=plan.trainer.report_to,
        stop_s=max(LEAST_STOP_S, 2 * save_s) + 5.0, save_s=save_s, resume=resume, limits=limits,
        nvme=_nvme_folder(plan),
    )  # fmt: skip


def _nvme_folder(plan: Plan) -> str | None:
    sharding = plan.sharding
    return sharding.nvme_path if "nvme" in (sharding.offload_optimizer, sharding.offload_param) else None


def _outcome(
    run_dir: Path, start: Start, group: Group | None = None, devices_per_node: int = 1
) -> dict[str, Any]:
    """Run the ranks to their end; result.json, or the error that says how they ended."""
    known: Sequence[Finding] = ()

    def look_before_the_kill() -> None:
        nonlocal known
        known = find_known(run_dir)

    before = read_oom_kills()
    remove_shared_buffers(start.master_port)
    try:
        ended: Ended = follow(start, look_before_the_kill)
        if group is not None:
            group.await_ended()
            ended.elsewhere, ended.rank_codes = group.parts(), group.rank_codes(devices_per_node, ended.code)
    finally:
        remove_shared_buffers(start.master_port)
    if (run_dir / MARKER).is_file():
        result: dict[str, Any] = parse_json((run_dir / "result.json").read_text("utf-8"))
        return result
    failed = failures_while_stopping(run_dir, ended.reports)
    if group is not None and group.vanished:
        saved = saved_at(run_dir)
        if ended.stopped_by is None or not saved:
            raise RunFailed(group.lost_problem(saved))
        failed = [group.vanished, *failed]
    if ended.stopped_by is not None or (not failed and was_stopped(run_dir, ended)):
        raise interruption(run_dir, ended, failed=failed)
    raise supervised_failure(run_dir, ended, before, known)


def _stop_seconds(plan: Plan) -> float:
    return float(plan.runtime.stop_seconds or 0)


def _watch(plan: Plan, run_dir: Path, limits: Limits, group: Group | None) -> Watch:
    """The limits by which the ranks are judged."""
    step = 0.0 if plan.time.seconds is None else plan.time.seconds[1]
    factor = plan.launch.hang_factor
    watch = Watch(run_dir, factor, _stop_seconds(plan), step, limits)
    if group is not None:
        watch.own, watch.others = frozenset(group.place.ranks(plan.hardware.devices_per_node)), True
    return watch


def _recorded(plan: Plan, order: Order, devices: str, bound: Bound, group: Group | None) -> dict[str, Any]:
    """The values bound at the start, for environment.json."""
    values: dict[str, Any] = {
        "master_port": str(order.master_port), "run_dir": order.run_dir, "devices": devices,
        "command": bound.argv,
    }  # fmt: skip
    if group is not None:
        if plan.launch.hostfile is not None:
            values["hostfile"] = plan.launch.hostfile
        values |= {"master_addr": order.master_addr, "node_rank": "0", "interface": bound.interface,
                   "nodes": group.recorded()}  # fmt: skip
    return values


def _with_another_port(
    order: Order, place: JobMember, ids: Sequence[str], run_dir: Path
) -> tuple[Order, Bound]:
    """The order with a port that is free, bound and recorded anew."""
    order = replace(order, master_port=probe.free_port())
    bound = bind_order(order, place, ids)
    known = parse_json((run_dir / "environment.json").read_text("utf-8"))["bound"]
    try:
        record_bound(run_dir, {**known, "master_port": str(order.master_port), "command": bound.argv})
    except OSError as error:
        raise unwritable(run_dir, error) from error
    return order, bound


def write_hostfile(plan: Plan, run_dir: Path, group: Group) -> None:
    """DeepSpeed's hostfile, in which every node finds the ids of its own devices."""
    ids = [int(device) for hello in group.members.hellos() for device in hello.devices]
    text = render_hostfile(plan, max(ids, default=0) + 1)
    if text is not None:
        write_text(run_dir / HOSTFILE, text)


def _begin_try(run_dir: Path, bound: Mapping[str, Any], resume: str | None) -> None:
    """Remove the status files of earlier attempts, and mark the beginning of this one in every log."""
    logs = run_dir / "logs"
    number = _tries_in(logs / "launcher.log") + 1
    begins = f"from {Path(resume).name}" if resume else "from the start"
    moment = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for log in logs.glob("*.log"):
        with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as stream:
            stream.write(f"{_TRY}{number}, {moment}, {begins} ====\n")
    # Without these sizes the errors of an earlier attempt would be taken for those of this one.
    written = {log.name: log.stat().st_size for log in logs.glob("*.log")}
    record_bound(run_dir, {**bound, "log_bytes": written})
    if (run_dir / MARKER).is_file():  # its result is of use until this attempt has a newer one
        (run_dir / MARKER).replace(run_dir / FINISHED_BEFORE)
    stale = [
        run_dir / STOPPED,
        logs / LOST,
        logs / PREPARED,
        logs / ENDED,
        *logs.glob("error-*.json"),
        *logs.glob("status-rank-*.json"),
    ]
    for path in stale:
        path.unlink(missing_ok=True)


def _tries_in(log: Path) -> int:
    """How often the ranks were started before: the first time leaves no line, only the log."""
    if not log.is_file():
        return 0
    with log.open(encoding="utf-8", errors="replace") as stream:
        return 1 + sum(line.startswith(_TRY) for line in stream)
