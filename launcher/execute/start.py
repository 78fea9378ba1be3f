"""Prepare the data and start the ranks of a bundle, follow them, and return their result or error."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from launcher.errors import MachineError, RunFailed
from launcher.execute.binding import Bound, Order, bind_order, complete_environment, with_late_values
from launcher.execute.endings import (
    LAUNCHER_LOG,
    PREPARE_LOG,
    failures_while_stopping,
    find_known,
    interruption,
    push_failure,
    run_failure,
    saved_at,
    supervised_failure,
    was_stopped,
)
from launcher.execute.following import NO_PEERS, Look, Start, blind, follow
from launcher.execute.leftovers import remove_shared_buffers, remove_stale_locks
from launcher.execute.nodes import Nodes, host_lost
from launcher.execute.processes import WORKERS_LEAVE_S
from launcher.execute.resume import LATEST
from launcher.execute.run_dir import ENDED, MARKER, STOPPED, record_bound, unwritable
from launcher.execute.supervise import Limits, Watch
from launcher.files.checkpoint import FINISHED_BEFORE
from launcher.files.rank_status import PREPARE_STAGE, PREPARED, PREPARES
from launcher.files.safe_files import parse_json, write_text
from launcher.knowledge.diagnose.findings import Finding
from launcher.knowledge.diagnose.run_dir import LOST
from launcher.machine import probe
from launcher.machine.gpus import Gpu
from launcher.machine.job_member import JobMember
from launcher.machine.probe import has_killed, read_oom_kills
from launcher.plan.plan import Plan
from launcher.plan.settings import LEAST_STOP_S
from launcher.planner.stopping import slow_step_word
from launcher.render.bundle import Bundle, dump_json
from launcher.render.command import PREPARE, WORKER, render_agent

ALONE = JobMember("", 0, 1, 1, 0, 1, 0, "127.0.0.1", 0)
"""The place of a run on one node."""
PREPARE_STOP_S = 10.0
"""The process that prepares data has nothing to save: its cache stays."""
_TRY = "==== try "
"""Beginning of the line between two attempts of a run in all its logs."""


def bind(bundle: Bundle, values: Mapping[str, str]) -> tuple[list[str], list[str], dict[str, str]]:
    """The bundle's two argvs (prepare, launch) and environment with the late values in place."""
    env = dict(zip(bundle.env, with_late_values(tuple(bundle.env.values()), values), strict=True))
    return with_late_values(bundle.prepare, values), with_late_values(bundle.command, values), env


def prepare_data(
    bundle: Bundle,
    run_dir: Path,
    *,
    samples: int | None = None,
    echo: Callable[[str], None],
    nodes: Nodes | None = None,
    look: Look = blind,
) -> None:
    """Prepare the data of a written run directory, in a process that ends before any rank starts.

    samples: how many of them data.json contains; None: as many as a run keeps. nodes: the other nodes of the
    job, which wait meanwhile. look: receives the progress. Raises as `execute`.
    """
    late = {"run_dir": str(run_dir), "devices": "", "master_port": "0", "master_addr": "", "node_rank": "0"}
    prepare, _, env = bind(bundle, late)
    if samples is not None:
        prepare.append(str(samples))
    log = run_dir / "logs" / PREPARE_LOG
    full_env, _ = complete_environment(env, bundle.plan.trainer.report_to)
    start = Start(
        prepare, full_env, log, echo, stop_s=PREPARE_STOP_S, orphaned_s=PREPARE_STOP_S,
        peers=nodes or NO_PEERS, stage=PREPARE_STAGE, look=look,
    )  # fmt: skip
    before = read_oom_kills()
    ended = follow(start)
    if nodes is not None:
        nodes.raise_if_over()
    if ended.stopped_by is not None:
        again = "run the command again; what was prepared before stays in the cache"
        raise interruption(run_dir, ended, again=again)
    if ended.code != 0 or not (run_dir / "data.json").is_file():
        oom = has_killed(before, read_oom_kills())
        raise run_failure(run_dir, ended.code, log.name, oom=oom, reported=ended.reports)


def execute(
    bundle: Bundle,
    run_dir: Path,
    *,
    gpus: Sequence[Gpu],
    master_port: int,
    resume: str | None,
    echo: Callable[[str], None],
    prepare: bool = True,
    limits: Limits | None = None,
    lock: int | None = None,
    nodes: Nodes | None = None,
    look: Look = blind,
) -> dict[str, Any]:
    """Run the bundle in `run_dir` (already written) and return result.json.

    `echo` gets each output line, `look` the ranks' statuses. gpus: those of this node. master_port: for one
    node; another one is used where it is taken by the time that the ranks start. The data is prepared first,
    by rank 0 or in a process of its own; without `prepare` the run directory has its data.json already. lock:
    descriptor of the run directory's lock, where it is held. nodes: the other nodes, which start their part.
    Raises RunFailed (5; KnownFailure for a failure of the registry), RecipeError (2) or MachineError (4) when
    a process found the recipe, its data or the machine at fault or the run directory cannot be written,
    Interrupted (130) after a signal that asks to stop. No process outlives this call, whatever ends it.
    """
    place, asked = (ALONE, "") if nodes is None else (nodes.seat, nodes.asked)
    order = _order(bundle, run_dir, place.port or master_port, resume, limits or Limits(), place)
    bound = bind_order(order, place, gpus, asked)
    _write_attempt(bundle, run_dir, _recorded(bundle.plan, order, gpus, bound, nodes), resume)
    for note in bound.notes:
        echo(note)
    in_ranks = prepare and _prepared_in_ranks(bundle, run_dir, echo, nodes, look)
    if nodes is None and not probe.is_free(order.master_port):  # preparing may have taken hours
        order = replace(order, master_port=probe.free_port())
        bound = bind_order(order, place, gpus, asked)
        _record_port(run_dir, order, bound)
    order = replace(order, prepares=in_ranks)
    bound.env[PREPARES] = "1" if in_ranks else ""
    for build_lock in remove_stale_locks(bound.env):
        echo(f"removed {build_lock}: a killed build left it, and every later build would wait for it")
    watch = _watch(bundle.plan, run_dir, order.limits, nodes)
    start = Start(
        bound.argv, bound.env, run_dir / "logs" / LAUNCHER_LOG, echo,
        stop_s=order.stop_s, orphaned_s=WORKERS_LEAVE_S, master_port=order.master_port, lock=lock,
        watch=watch, judge_step=partial(slow_step_word, bundle.plan), peers=nodes or NO_PEERS, look=look,
    )  # fmt: skip
    if nodes is not None:
        nodes.begin(order)
    return _outcome(run_dir, start, nodes)


def _prepared_in_ranks(
    bundle: Bundle, run_dir: Path, echo: Callable[[str], None], nodes: Nodes | None, look: Look
) -> bool:
    """Whether the ranks are to prepare the data; otherwise it is prepared now, in a process of its own.

    The preparation of some tasks waits for all ranks, of which one alone would come.
    """
    meets = not bundle.plan.task.prepared_by_ranks
    if not meets and PREPARE in bundle.prepare and WORKER in bundle.command:
        return True
    prepare_data(bundle, run_dir, echo=echo, nodes=nodes, look=look)
    with contextlib.suppress(OSError):  # the next attempt prepares it again
        (run_dir / "logs" / PREPARED).touch()
    return False


def is_prepared(run_dir: Path) -> bool:
    """Whether the last attempt has prepared the data."""
    return (run_dir / "logs" / PREPARED).is_file()


def _write_attempt(bundle: Bundle, run_dir: Path, bound: Mapping[str, Any], resume: str | None) -> None:
    """Write the files of this attempt."""
    try:
        begin_attempt(run_dir, bound, resume)
        show_start(bundle, run_dir, resume)
    except OSError as error:
        raise unwritable(run_dir, error) from error


def _order(
    bundle: Bundle, run_dir: Path, master_port: int, resume: str | None, limits: Limits, place: JobMember
) -> Order:
    """This attempt, as every node starts its part of it."""
    plan, sharding = bundle.plan, bundle.plan.sharding
    command = bundle.command
    if (
        place.is_one_rank and plan.hardware.num_nodes == 1
    ):  # the plan's launcher would start all ranks of the node
        command = tuple(render_agent(plan.interpreter, 1, plan.hardware.devices_per_node, command[-2]))
    save_s = _stop_seconds(plan)
    offloads = "nvme" in (sharding.offload_optimizer, sharding.offload_param)
    return Order(
        str(run_dir), command, bundle.env, master_port=master_port,
        num_devices=plan.hardware.num_devices, devices_per_node=plan.hardware.devices_per_node,
        on_gpus=not plan.hardware.is_cpu,
        report_to=plan.trainer.report_to,
        stop_s=max(LEAST_STOP_S, 2 * save_s) + 5.0, save_s=save_s, resume=resume, limits=limits,
        nvme=sharding.nvme_path if offloads else None, elastic=bool(plan.elastic),
        needed=plan.memory.needed if WORKER in command else 0,
    )  # fmt: skip


def _outcome(run_dir: Path, start: Start, nodes: Nodes | None = None) -> dict[str, Any]:
    """Run the ranks to their end; result.json, or the error of their end."""
    known: list[Finding] = []  # before a hanging run is killed
    before = read_oom_kills()
    remove_shared_buffers(start.master_port)
    try:
        ended = follow(start, lambda: known.extend(find_known(run_dir)))
        if nodes is not None:
            nodes.await_ended()
            ended.elsewhere = nodes.parts()
    finally:
        remove_shared_buffers(start.master_port)
    if (run_dir / MARKER).is_file():
        if (unpushed := push_failure(run_dir, ended.reports)) is not None:
            raise unpushed
        result: dict[str, Any] = parse_json((run_dir / "result.json").read_text("utf-8"))
        return result
    failed = failures_while_stopping(run_dir, () if ended.lost_node else ended.reports)
    if nodes is not None:
        if not ended.reports and (problems := nodes.not_started()):
            raise MachineError(problems)
        if lost := ended.lost_node or nodes.vanished:
            saved = saved_at(run_dir)
            if ended.stopped_by is None or not saved:
                raise RunFailed(host_lost(lost, saved))
            failed = [lost, *failed]
    if ended.stopped_by is not None or (not failed and was_stopped(run_dir, ended)):
        raise interruption(run_dir, ended, failed=failed)
    raise supervised_failure(run_dir, ended, before, known)


def _stop_seconds(plan: Plan) -> float:
    return float(plan.runtime.stop_seconds or 0)


def _watch(plan: Plan, run_dir: Path, limits: Limits, nodes: Nodes | None) -> Watch:
    step_s = 0.0 if plan.time.seconds is None else plan.time.seconds[1]
    watch = Watch(run_dir, plan.launch.hang_factor, _stop_seconds(plan), step_s, limits)
    if nodes is not None:
        watch.own = frozenset(nodes.seat.ranks(plan.hardware.devices_per_node))
    return watch


def _recorded(
    plan: Plan, order: Order, gpus: Sequence[Gpu], bound: Bound, nodes: Nodes | None
) -> dict[str, Any]:
    """The values bound at the start, for environment.json; logs/nodes.json has the nodes."""
    values: dict[str, Any] = {
        "master_port": str(order.master_port), "run_dir": order.run_dir,
        "devices": ",".join(gpu.index for gpu in gpus), "uuids": [gpu.uuid for gpu in gpus],
        "command": bound.argv,
    }  # fmt: skip
    if nodes is not None:
        if plan.launch.hostfile is not None:
            values["hostfile"] = plan.launch.hostfile
        values |= {"master_addr": nodes.place.head, "node_rank": "0"}
    return values


def _record_port(run_dir: Path, order: Order, bound: Bound) -> None:
    known = parse_json((run_dir / "environment.json").read_text("utf-8"))["bound"]
    try:
        record_bound(run_dir, {**known, "master_port": str(order.master_port), "command": bound.argv})
    except OSError as error:
        raise unwritable(run_dir, error) from error


def begin_attempt(run_dir: Path, bound: Mapping[str, Any], resume: str | None) -> None:
    """Remove the status files of earlier attempts, and mark the beginning of this one in every log."""
    logs = run_dir / "logs"
    number = _attempts_in(logs / LAUNCHER_LOG) + 1
    begins = f"from {Path(resume).name}" if resume else "from the start"
    moment = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for log in logs.glob("*.log"):
        with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as stream:
            stream.write(f"{_TRY}{number}, {moment}, {begins} ====\n")
    # Without these sizes the errors of an earlier attempt would be taken for those of this one.
    written = {log.name: log.stat().st_size for log in logs.glob("*.log")}
    record_bound(run_dir, {**bound, "log_bytes": written})
    if (run_dir / MARKER).is_file():  # its result is used until this attempt has a newer one
        (run_dir / MARKER).replace(run_dir / FINISHED_BEFORE)
    stale = (*logs.glob("error-*.json"), *logs.glob("status-rank-*.json"))
    for path in (run_dir / STOPPED, logs / LOST, logs / PREPARED, logs / ENDED, *stale):
        path.unlink(missing_ok=True)


def _attempts_in(log: Path) -> int:
    """How often the ranks were started before: the first start writes no line, it only creates the log."""
    if not log.is_file():
        return 0
    with log.open(encoding="utf-8", errors="replace") as stream:
        return 1 + sum(line.startswith(_TRY) for line in stream)


def show_start(bundle: Bundle, run_dir: Path, resume: str | None) -> None:
    """Write ds_config.json and command.sh of this start, with the checkpoint that it resumes from.

    `load_universal` is set only for a converted checkpoint: no other can be read with it. command.sh names
    that checkpoint; started manually when it is gone, it fails instead of training from the start.
    """
    is_converted = resume is not None and (Path(resume) / LATEST).is_file()
    if bundle.ds_config is not None:
        config = dict(bundle.ds_config)
        if is_converted:
            config["checkpoint"] = {**config.get("checkpoint", {}), "load_universal": True}
        write_text(run_dir / "ds_config.json", dump_json(config))
    script = bundle.files["command.sh"]
    if resume is not None:
        lines = _OF_CONVERTED + f"export EFFILAUNCH_RESUME={_shell(resume, run_dir)}\n"
        script = _RUN_DIR.sub(
            lambda line: line[0] + (lines if is_converted else _OF_RESUMED), script, count=1
        )
    write_text(run_dir / "command.sh", script)
    (run_dir / "command.sh").chmod(0o755)


def _shell(checkpoint: str, run_dir: Path) -> str:
    """A checkpoint's path as command.sh writes it: the run directory may be moved."""
    path = Path(checkpoint)
    inside = path.is_relative_to(run_dir)
    return f'"$run_dir"/{shlex.quote(str(path.relative_to(run_dir)))}' if inside else shlex.quote(checkpoint)


_RUN_DIR = re.compile(r"^run_dir=.*\n", re.MULTILINE)
_OF_RESUMED = """\
# This start resumed from a checkpoint. Started manually, it resumes from the newest complete one of this run,
# else from the one of another run that it began with (origin.json).
export EFFILAUNCH_RESUME="${EFFILAUNCH_RESUME-auto}"
"""
_OF_CONVERTED = """\
# This start resumed from a converted checkpoint, which is removed once the run has saved one of its own.
# ds_config.json (checkpoint.load_universal) reads no other: from then on use `effilaunch run --resume auto`,
# which writes both files again.
"""
