"""Plan and start a rehearsal, and report its verdicts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from launcher.engines import engine_of
from launcher.errors import (
    EffilaunchError,
    Interrupted,
    MachineError,
    Problem,
    RecipeError,
    RunFailed,
    printable,
)
from launcher.execute.endings import HANG, LAUNCHER_LOST, RANK_LOST
from launcher.execute.nodes import Nodes
from launcher.execute.run_dir import MARKER, claimed, default_run_dir, written
from launcher.execute.signals import ended_by_signals
from launcher.execute.start import execute
from launcher.execute.start_checks import check_machine
from launcher.execute.supervise import Limits
from launcher.execute.taking_part import take_part
from launcher.files.rank_status import read_statuses
from launcher.files.safe_files import read_record, write_text
from launcher.inputs.planning_facts import find_hardware, gather
from launcher.knowledge.doctor.check import CheckResult
from launcher.lab.rehearsal.verdicts import Planned, amount, duration, judge, rate
from launcher.machine import probe
from launcher.machine.node_facts import HOST_LOST
from launcher.memory.tensor_parallel import on_rank
from launcher.plan.plan import Plan
from launcher.plan.rehearsal import PLANNED, PREFIX, RESULT, SHARE, Rehearsal
from launcher.planner.planner import make_plan
from launcher.recipe.loading import load_recipe
from launcher.render.bundle import Bundle, dump_json, render
from launcher.report.doctor_text import finding_lines
from launcher.report.outcome import Outcome, echo, note
from launcher.report.tables import table
from launcher.schedulers.rendezvous import digest_of_request, find_gathering, leading, shared_run_dir
from launcher.schedulers.scheduler import StartRequest

SECONDS = 20.0
LEAST_SECONDS, MOST_SECONDS = 1.0, 600.0
MEET_S = 120.0
"""Ranks of one start come within seconds; reading torch from a slow network disk takes minutes."""
JOIN_S = 300.0
"""Importing the training stack, compiling DeepSpeed's operator for CPUs, connecting thousands of ranks."""
LINKS_S, DEVICES_S, SAVE_S = 120.0, 60.0, 300.0

SMALL = 4 * 2**10
"""Bytes of the message that shows the latency of an all-reduce."""
LARGE = 64 * 2**20
"""A message of at least this size shows the bandwidth of every network."""
MOST = 2**30
"""Largest message in bytes: two copies of it fit on every device."""
CAP = 2**30
"""Bytes that a rank writes at most: more than the write cache of a disk, and soon written."""
WORKER = "launcher.train.rehearsal.run"
MEASURED = ("ranks", "all_reduce", "links", "devices", "waiting", "save")
"""Keys of the measurements in the answer of `--json`."""
LEAVE_S, GONE_S = 5.0, 10.0
"""A failed rank has nothing to save: the others may end by themselves for this long, then are killed."""
MOST_LINKS = 12
"""Links that are shown: the slowest ones; result.json has all."""


def plan_rehearsal(plan: Plan, seconds: float | None = None, meet_s: float | None = None) -> Rehearsal:
    """The rehearsal of a plan. RecipeError for a useless or excessive number of seconds.

    meet_s: how long to wait for a rank.
    """
    seconds = SECONDS if seconds is None else seconds
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        message = f"--seconds {seconds:g}: expected {LEAST_SECONDS:g} to {MOST_SECONDS:g}"
        raise RecipeError(Problem("usage", message, path="--seconds"))
    first, each = _shares(plan)
    return Rehearsal(
        seconds=seconds,
        sizes=message_sizes(plan),
        gradient_bytes=_gradient_bytes(plan),
        first_bytes=first,
        each_bytes=each,
        cap_bytes=CAP,
        meet_s=MEET_S if meet_s is None else meet_s,
        join_s=JOIN_S,
        links_s=LINKS_S,
        devices_s=DEVICES_S,
        save_s=SAVE_S,
    )


def message_sizes(plan: Plan) -> tuple[int, ...]:
    """A small message, the run's own bucket, and a large one if the bucket is smaller."""
    bucket = max(SMALL, min(bucket_bytes(plan), MOST))
    return tuple(sorted({SMALL, bucket, max(bucket, LARGE)}))


def bucket_bytes(plan: Plan) -> int:
    """Bytes of a message in which the run reduces its gradients."""
    return engine_of(plan).bucket_bytes(plan, max(1, _gradient_bytes(plan)))


def _gradient_bytes(plan: Plan) -> int:
    """Gradient bytes that a rank reduces with other copies of the model; 0 if there is one copy."""
    _, job = on_rank(plan.spec, plan.job)
    return 0 if job.data_parallel == 1 else int(job.trainable_params * _gradient_width(plan))


def _gradient_width(plan: Plan) -> int:
    return int(plan.job.engine.widths(plan.job).gradient)


def _shares(plan: Plan) -> tuple[int, int]:
    """Bytes of a checkpoint that rank 0 writes, and every other rank.

    All ranks write their shard of the states, rank 0 writes the model.
    """
    job = plan.job
    weights = job.engine.result(plan.spec, job)
    if plan.trainer.save_only_model:
        return weights, 0
    _, part = on_rank(plan.spec, job)  # a tensor-parallel rank has the states of its own matrices alone
    states = int(part.trainable_params * job.engine.widths(job).optimizer)
    return engine_of(plan).written_shares(plan, weights, states, part.data_parallel)


@ended_by_signals()
def rehearse_recipe(
    recipe: str,
    *,
    overrides: Sequence[str] = (),
    on: str | None,
    seconds: float | None,
    output_dir: str | None,
    as_json: bool,
    node_rank: int | None = None,
    master_addr: str | None = None,
    command_line: Sequence[str] = (),
    meet_s: float | None = None,
) -> Outcome:
    """Rehearse a recipe's run. Exit status 4 if a check fails or a rank does not come.

    node_rank, master_addr, command_line: as in `run`. meet_s: how long to wait for the last rank.
    """
    say = note if as_json else echo
    loaded = load_recipe(recipe, overrides)
    hardware = partial(find_hardware, loaded.recipe, on)
    gathering = find_gathering(StartRequest(loaded, hardware, note, node_rank, master_addr, command_line))
    digest = digest_of_request(loaded, on=on, rehearse=True, seconds=seconds)
    default = default_run_dir(str(loaded.path), Path.cwd()).absolute()  # on the disk of the run
    folder = Path(output_dir).absolute() if output_dir else default.with_name(PREFIX + default.name)
    if gathering is not None:
        shared = shared_run_dir(folder, not output_dir, gathering.place)
        folder = shared if output_dir else shared.with_name(PREFIX + shared.name)
        if not gathering.place.is_head:
            take_part(gathering.place, folder, digest, hardware().devices_per_node, say)
            return Outcome({"node_rank": gathering.place.node_rank}, "the rehearsal has finished")
    with leading(gathering, folder, digest, say) as nodes:
        planned, facts = gather(loaded, on)
        plan = make_plan(planned, facts)
        rehearsal = plan_rehearsal(plan, seconds, meet_s)  # before the folder is made: it refuses the seconds
        if gathering is None and not output_dir:
            folder = claimed(folder)
        outcome = _rehearse(
            plan, rehearsal, folder, nodes, say,
            subject=recipe + (f" on {on}" if on else ""),
        )  # fmt: skip
        if nodes is not None and outcome.exit_code:
            nodes.close(MachineError(outcome.problems or _failed_checks(outcome)))
        return outcome


def _failed_checks(outcome: Outcome) -> Problem:
    """The problem of failed checks, for the other nodes."""
    failed = [row["message"] for row in outcome.data["checks"] if row["status"] == "fail"]
    return Problem("rehearsal-failed", "; ".join(failed), file=outcome.data["run_dir"])


def _rehearse(
    plan: Plan,
    planned: Rehearsal,
    run_dir: Path,
    nodes: Nodes | None,
    say: Callable[[str], None],
    *,
    subject: str,
) -> Outcome:
    gpus = check_machine(plan, nodes)
    bundle = render_rehearsal(plan, planned)
    ranks = plan.hardware.num_devices
    say(start_line(planned, ranks, printable(str(run_dir))))
    with written(bundle.files, run_dir, resume=False) as lock:
        start = partial(
            execute, bundle, run_dir, gpus=gpus, master_port=probe.free_port(), resume=None, echo=say,
            prepare=False, limits=limits_of(planned, ranks), lock=lock, nodes=nodes,
        )  # fmt: skip
        failed = _error_of(start, run_dir)
    launcher = str(plan.launch.launcher) if nodes is None else "torchrun"
    return conclude(plan, planned, run_dir, failed, subject, launcher)


def render_rehearsal(plan: Plan, planned: Rehearsal) -> Bundle:
    """The bundle of the run; its launcher starts the module of the rehearsal instead of the worker."""
    bundle = render(plan, worker=WORKER)
    return replace(bundle, files={**bundle.files, PLANNED: dump_json(planned.to_json())})


def _error_of(start: Callable[[], Any], run_dir: Path) -> EffilaunchError | None:
    """Start the ranks and wait for their end; the error that ended them."""
    try:
        start()
    except Interrupted as stop:
        message = f"{stop.problems[0].message.partition(':')[0]}: the rehearsal was stopped"
        hint = "start it again; a rehearsal cannot be resumed"
        raise Interrupted(Problem("interrupted", message, file=str(run_dir), hint=hint)) from stop
    except (RunFailed, MachineError) as failed:
        return failed
    finally:
        for path in (run_dir / "checkpoints").glob(SHARE.format("*")):  # of ranks that were killed
            with contextlib.suppress(OSError):
                path.unlink()
    return None


def limits_of(planned: Rehearsal, ranks: int) -> Limits:
    """The supervisor's limits: above those of the ranks, which watch the clock and report more."""
    most = planned.limit_s(ranks) + 60.0
    return Limits(
        step=most, first_steps=most, start=most, load=most, skip=most, evaluate=most, save=most, finish=most,
        launcher_ends=LEAVE_S, all_gone=GONE_S,
    )  # fmt: skip


def conclude(
    plan: Plan, planned: Rehearsal, run_dir: Path, failed: EffilaunchError | None, subject: str, launcher: str
) -> Outcome:
    """The verdicts, in result.json and for the user.

    subject: the recipe as the user named it. launcher: the program that started the ranks.
    """
    problems = [] if failed is None else [_of_a_rehearsal(p, run_dir) for p in failed.problems]
    try:
        measured = read_record(run_dir / RESULT)
    except RecipeError:  # the ranks did not get so far
        measured = {}
    wanted = Planned(
        launcher=launcher,
        ranks=plan.hardware.num_devices,
        on_cpu=plan.hardware.is_cpu,
        gradient_bytes=planned.gradient_bytes,
        stop_seconds=plan.runtime.stop_seconds,
    )
    findings = judge(measured, wanted, problems)
    rows = [finding.to_json() for finding in findings]
    bad = any(finding.verdict.status == "fail" for finding in findings)
    with contextlib.suppress(OSError):  # a full disk: the answer is on the screen
        write_text(run_dir / RESULT, dump_json({**measured, "verdicts": rows}))
    data = {
        "checks": rows,
        "ready": not bad,
        "run_dir": str(run_dir),
        "rehearsal": {
            **{key: measured.get(key) for key in MEASURED},
            "verdicts": rows,
            "limits": asdict(planned),
            "completed": (run_dir / MARKER).is_file(),
        },
    }
    text = rehearsal_text(findings, measured, subject, str(run_dir))
    return Outcome(data, text, problems, exit_code=MachineError.exit_code if bad else 0)


def _of_a_rehearsal(problem: Problem, run_dir: Path) -> Problem:
    """A lost process as a problem of a rehearsal: with its node, and without a checkpoint to resume."""
    if problem.code not in (RANK_LOST, LAUNCHER_LOST, HANG, HOST_LOST):
        return problem
    statuses = read_statuses(run_dir)
    named = {int(number) for number in re.findall(r"\brank (\d+)", problem.message)}
    where = [f"rank {number} ran on {statuses[number].host}" for number in sorted(named & statuses.keys())]
    hint = "look at that node and at logs/, then start the rehearsal again"
    return replace(problem, message="; ".join([problem.message, *where]), hint=hint)


def start_line(planned: Rehearsal, ranks: int, run_dir: str) -> str:
    """What will be measured, and how long it may take."""
    what, wait = "a save", ""
    if ranks > 1:
        what = f"{planned.seconds:g} s of all-reduce, then links, devices and a save"
        wait = f"; ranks that have not come after {planned.meet_s:.0f} s are reported"
    return f"rehearsal in {run_dir}: {what}, at most {planned.limit_s(ranks) / 60:.0f} minutes{wait}"


def rehearsal_text(
    findings: Sequence[CheckResult], measured: Mapping[str, Any], subject: str, run_dir: str
) -> str:
    """The numbers as tables, then a line per check, in the form of `doctor`."""
    failed = [finding.id for finding in findings if finding.verdict.status == "fail"]
    warned = sum(finding.verdict.status == "warn" for finding in findings)
    result = f"failed: {', '.join(failed)}" if failed else "passed"
    result += f"; {warned} warning{'s' if warned > 1 else ''}" if warned else ""
    lines = [*_all_reduce(measured.get("all_reduce") or []), *_links(measured), ""]
    lines += [*finding_lines(findings), "", f"the rehearsal of {printable(subject)} {result}"]
    return "\n".join([*lines, f"logs and result.json in {run_dir}"]).lstrip("\n") + "\n"


def _all_reduce(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    cells = [["all-reduce", "median", "fastest", "slowest", "messages", "bus bandwidth"]]
    cells += [
        [amount(row["bytes"]), duration(row["median_s"]), duration(row["min_s"]), duration(row["max_s"]),
         str(row["count"]), rate(row["bus_bytes_per_s"])]
        for row in rows
    ]  # fmt: skip
    return table(cells)


def _links(measured: Mapping[str, Any]) -> list[str]:
    rows = sorted(measured.get("links") or [], key=lambda row: float(row["bytes_per_s"]))
    if not rows:
        return []
    ranks = {facts["rank"]: facts for facts in measured["ranks"]}
    several = len({(facts["node"], facts["host"]) for facts in ranks.values()}) > 1

    def name(rank: int) -> str:
        facts = ranks[rank]
        return f"{facts['host']} ({facts['interface']})" if several else f"rank {rank}"

    cells = [["link from", "to", "bandwidth", "latency"]]
    cells += [
        [name(row["from"]), name(row["to"]), rate(row["bytes_per_s"]), duration(row["latency_s"])]
        for row in rows[:MOST_LINKS]
    ]
    more = [f"  and {len(rows) - MOST_LINKS} faster ones"] if len(rows) > MOST_LINKS else []
    return ["", *table(cells), *more]
