"""`doctor --rehearse`: the run's own launcher and ranks, with measurements in the place of training."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from launcher.doctor.rehearsal import Planned, judge
from launcher.doctor.start_checks import check_machine
from launcher.errors import EffilaunchError, Interrupted, MachineError, Problem, RunFailed
from launcher.execute.endings import HANG, LAUNCHER_LOST, RANK_LOST
from launcher.execute.nodes.group import HOST_LOST, Group
from launcher.execute.run_dir import MARKER, written
from launcher.execute.signals import ended_by_signals
from launcher.execute.start import execute
from launcher.execute.supervise import Limits
from launcher.facts import probe
from launcher.facts.rank_status import read_statuses
from launcher.facts.rehearsal_course import COURSE, PREFIX, RESULT, SHARES, Course
from launcher.facts.safe_files import parse_json, write_text
from launcher.inputs.planning_facts import find_hardware, gather
from launcher.knowledge.lint.document import printable
from launcher.plan.plan import Plan
from launcher.planner.planner import make_plan
from launcher.planner.rehearsal import SECONDS, make_course
from launcher.recipe.loading import LoadedRecipe, load_recipe
from launcher.render.bundle import Bundle, dump_json, render
from launcher.report.outcome import Outcome, echo, note
from launcher.report.rehearsal_text import course_line, rehearsal_text
from launcher.schedulers.rendezvous import (
    Request,
    await_members,
    digest_of_request,
    find_gathering,
    gathered,
    take_part,
)

REHEARSE = "launcher.train.rehearsal.run"
TOLD = ("ranks", "all_reduce", "links", "devices", "waiting", "save")
"""Of what rank 0 wrote: what `--json` shows."""
_LEAVE_S, _GONE_S = 5.0, 10.0
"""A rank that failed has nothing to save: the others may end by themselves, then are killed."""


@ended_by_signals()
def rehearse_command(
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
    """Rehearse a recipe's run. Exit 4 where a machine, link or save is bad, or a rank did not come; else 0.

    node_rank, master_addr, command_line: as in `run`. meet_s: how long the last rank is waited for.
    Raises RecipeError (2), DoesNotFit (3) as planning does, MachineError (4) where nothing could be started,
    Interrupted (130).
    """
    say = note if as_json else echo
    loaded = load_recipe(recipe, overrides)
    hardware = partial(find_hardware, loaded.recipe, on)
    gathering = find_gathering(Request(loaded, hardware, note, node_rank, master_addr, command_line))
    asked = digest_of_request(loaded, overrides, on=on, rehearse=True, seconds=seconds)
    if gathering is not None and not gathering.place.is_head:
        return Outcome(take_part(gathering.place, asked, say), "the run has finished")
    with gathered(gathering, asked, say) as group:
        outcome = _rehearse(
            loaded, group, say, on=on, seconds=seconds, output_dir=output_dir, meet_s=meet_s,
            named=recipe + (f" on {on}" if on else ""),
        )  # fmt: skip
        if group is not None and outcome.exit_code:
            group.goodbye(MachineError(outcome.problems or _bad(outcome)))
        return outcome


def _bad(outcome: Outcome) -> Problem:
    """What the other members are told of a rehearsal that found something."""
    failed = [row["message"] for row in outcome.data["checks"] if row["status"] == "fail"]
    return Problem("rehearsal-failed", "; ".join(failed), file=outcome.data["run_dir"])


def _rehearse(
    loaded: LoadedRecipe,
    group: Group | None,
    say: Callable[[str], None],
    *,
    on: str | None,
    seconds: float | None,
    output_dir: str | None,
    meet_s: float | None,
    named: str,
) -> Outcome:
    planned, facts = gather(loaded, on)
    plan = make_plan(planned, facts)
    course = make_course(plan, SECONDS if seconds is None else seconds, meet_s)
    if group is not None:
        await_members(group, say)
    devices = check_machine(plan, group)
    run_dir = Path(output_dir).absolute() if output_dir else rehearsal_dir(str(loaded.path), Path.cwd())
    bundle = render_rehearsal(plan, course)
    say(course_line(course, plan.hardware.num_devices, printable(str(run_dir))))
    with written(bundle, run_dir, resume=False) as lock:
        start = partial(
            execute, bundle, run_dir, devices=devices, master_port=probe.free_port(), resume=None, echo=say,
            prepare=False, limits=limits_of(course, plan.hardware.num_devices), lock=lock, group=group,
        )  # fmt: skip
        failed = _outcome_of(start, run_dir)
    each_alone = group is not None and group.place.is_one_rank
    launcher = "srun" if each_alone else str(plan.launch.launcher)
    return conclude(plan, course, run_dir, failed, named, launcher)


def render_rehearsal(plan: Plan, course: Course) -> Bundle:
    """The bundle of the run, whose launcher starts the rehearsal's module in the place of the worker."""
    bundle = render(plan, worker=REHEARSE)
    return replace(bundle, files={**bundle.files, COURSE: dump_json(course.to_json())})


def rehearsal_dir(recipe_file: str, root: Path) -> Path:
    """`runs/<recipe-stem>/rehearsal-<UTC time>`: on the disk that the run will write to."""
    folder = root / "runs" / Path(recipe_file).stem
    stamp = f"{PREFIX}{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    free, number = folder / stamp, 1
    while free.exists():
        number += 1
        free = folder / f"{stamp}-{number}"
    return free


def _outcome_of(start: Callable[[], Any], run_dir: Path) -> EffilaunchError | None:
    """Start the ranks and wait for their end; the error that ended them."""
    try:
        start()
    except Interrupted as stop:
        message = f"{stop.problems[0].message.partition(':')[0]}: the rehearsal was stopped"
        hint = "start it again; nothing of it goes on"
        raise Interrupted(Problem("interrupted", message, file=str(run_dir), hint=hint)) from stop
    except (RunFailed, MachineError) as failed:
        return failed
    finally:
        _remove_shares(run_dir)
    return None


def limits_of(course: Course, ranks: int) -> Limits:
    """The ranks look at the clock themselves, and say more; the supervisor's limits come after theirs."""
    most = course.limit_s(ranks) + 60.0
    return Limits(
        step=most, first_steps=most, start=most, load=most, skip=most, evaluate=most, save=most, finish=most,
        launcher_ends=_LEAVE_S, all_gone=_GONE_S,
    )  # fmt: skip


def _remove_shares(run_dir: Path) -> None:
    """What ranks saved that were killed before they removed it."""
    for path in (run_dir / "checkpoints").glob(SHARES):
        with contextlib.suppress(OSError):
            path.unlink()


def conclude(
    plan: Plan, course: Course, run_dir: Path, failed: EffilaunchError | None, asked: str, launcher: str
) -> Outcome:
    """The verdicts, in result.json and to the user. asked: the recipe, as the user named it; launcher: who
    started the ranks."""
    problems = [] if failed is None else [_of_a_rehearsal(p, run_dir) for p in failed.problems]
    measured = _read(run_dir)
    planned = Planned(
        launcher=launcher,
        ranks=plan.hardware.num_devices,
        on_cpu=plan.hardware.is_cpu,
        gradient_bytes=course.gradient_bytes,
        stop_seconds=plan.runtime.stop_seconds,
    )
    findings = judge(measured, planned, problems)
    rows = [finding.to_json() for finding in findings]
    bad = any(finding.verdict.status == "fail" for finding in findings)
    told = {key: measured.get(key) for key in TOLD}
    with contextlib.suppress(OSError):  # a full disk: the answer is on the screen
        write_text(run_dir / RESULT, dump_json({**measured, "verdicts": rows}))
    data = {
        "checks": rows,
        "ready": not bad,
        "run_dir": str(run_dir),
        "rehearsal": {**told, "verdicts": rows, "limits": asdict(course), "completed": _completed(run_dir)},
    }
    text = rehearsal_text(findings, measured, asked, str(run_dir))
    return Outcome(data, text, problems, exit_code=MachineError.exit_code if bad else 0)


def _of_a_rehearsal(problem: Problem, run_dir: Path) -> Problem:
    """A process that was lost, told for a rehearsal: on which machine, and without a checkpoint to go on
    from."""
    if problem.code not in (RANK_LOST, LAUNCHER_LOST, HANG, HOST_LOST):
        return problem
    statuses = read_statuses(run_dir)
    named = {int(number) for number in re.findall(r"\brank (\d+)", problem.message)}
    where = [f"rank {number} ran on {statuses[number].host}" for number in sorted(named & statuses.keys())]
    hint = "look at that machine and at logs/, then start the rehearsal again"
    return replace(problem, message="; ".join([problem.message, *where]), hint=hint)


def _completed(run_dir: Path) -> bool:
    return (run_dir / MARKER).is_file()


def _read(run_dir: Path) -> dict[str, Any]:
    """What rank 0 wrote, as far as it came."""
    try:
        found = parse_json((run_dir / RESULT).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
