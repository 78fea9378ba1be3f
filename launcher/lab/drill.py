"""The fault drill: interrupt a short run by one fault after the other, resume it and compare its losses.

Each run is a child process (`effilaunch run`). All of its descendants carry a token of the drill in their
environment, so that processes that outlive the run are found without relying on the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from launcher.execute.processes import processes_of, send
from launcher.execute.run_dir import FULL, unwritable
from launcher.execute.signals import ended_by_signals
from launcher.execute.start_checks import check_disk_space, check_machine
from launcher.files.checkpoint import complete_checkpoints
from launcher.files.safe_files import read_jsonl, read_record, write_text
from launcher.inputs.first_rows import data_problems
from launcher.inputs.planning_facts import gather
from launcher.lab.options import choose, make_folder
from launcher.plan.plan import Plan
from launcher.planner.planner import make_plan
from launcher.recipe.loading import load_recipe
from launcher.recipe.schema import Recipe
from launcher.render.bundle import dump_json
from launcher.report.outcome import SCHEMA_VERSION
from launcher.report.tables import table, wrapped

LEAST_STEPS = 6
"""At least two steps between saves, so that a fault can come between two of them."""
GONE_S = 60.0
"""A lost rank ends the run on all ranks within a minute; the save of a stopped run is added to that."""
TOLERANCE = 8.0
"""Times the difference of two undisturbed runs: a resumed run is one more sample of the same noise."""
VARIABLE, RESUME = "EFFILAUNCH_DRILL", "EFFILAUNCH_RESUME"
INJECTED = Path("logs") / ".drilled"
"""Written into the run directory by the worker that injects the fault (launcher/train/faults.py)."""
MARK = "EFFILAUNCH_DRILLED"
"""Environment variable of the processes of a drilled run: the token."""
UNDISTURBED = ("00-undisturbed", "00-undisturbed-again")
SLOWER, SLACK_S = 4.0, 180.0
"""A run is killed after SLACK_S and so many times the duration of the undisturbed one."""
REAP_S = 2.0
"""A process that was killed with the run may be visible for a moment longer."""
STOP_S = 180.0
"""Time for the run of an interrupted drill to save and end, before it is killed."""

Losses = Mapping[int, float | None]
"""Step -> loss; None: it was not finite."""


@dataclass(frozen=True, slots=True)
class DrillFault:
    """Something that happens to a run."""

    id: str
    """As in EFFILAUNCH_DRILL."""
    title: str
    code: int
    """Exit status that the run must end with."""
    causes: tuple[str, ...]
    """One of these must be in the cause that the run reports."""
    in_save: bool = False
    """Injected during a save; else between two steps."""

    def step(self, save_steps: int) -> int:
        """The step after which, or in whose save, the fault is injected."""
        return 2 * save_steps if self.in_save else save_steps + save_steps // 2


KILLED = ("SIGKILL", "killed", "signal 9", "was lost")
FAULTS = (
    DrillFault("terminate", "SIGTERM to the run", 130, ("SIGTERM",)),
    DrillFault("kill-rank", "SIGKILL of one rank", 5, KILLED),
    DrillFault("kill-all", "SIGKILL of all ranks", 5, KILLED),
    DrillFault("disk-full", "a full disk during a save", 5, ("disk", "space", "too large"), in_save=True),
    DrillFault("kill-save", "SIGKILL of all ranks during a save", 5, KILLED, in_save=True),
)


def choose_faults(only: str | None) -> tuple[DrillFault, ...]:
    """The faults that `--only` names, all without it."""
    return choose(only, {fault.id: fault for fault in FAULTS}, "fault")


def drill_overrides(recipe: Recipe, steps: int) -> list[str]:
    """What the drill changes in the recipe, as `--set` takes it: length, saves and reports.

    RecipeError for too few steps, and for a recipe whose checkpoints cannot be resumed.
    """
    if steps < LEAST_STEPS:
        message = f"--steps {steps}: expected at least {LEAST_STEPS}, for a fault between two saves"
        raise RecipeError(Problem("usage", message, "--steps"))
    if recipe.trainer.get("save_only_model"):
        raise RecipeError(
            Problem(
                "checkpoint-without-states",
                "a checkpoint without optimizer states cannot be resumed, so there is nothing to drill",
                path="trainer.save_only_model",
                hint="--set trainer.save_only_model=false",
            )
        )
    save_steps = steps // 3
    changes: dict[str, object] = {
        "trainer.num_train_epochs": "null",
        "trainer.max_steps": steps,
        "trainer.save_strategy": "steps",
        "trainer.save_steps": save_steps,
        "trainer.logging_strategy": "steps",
        "trainer.logging_steps": 1,
        "trainer.report_to": "none",
        "early_stopping": "null",
        "launch.max_restarts": 0,
        "on_oom": "fail",  # else a killed process might be taken for one without memory
    }
    if recipe.trainer.get("push_to_hub"):
        changes["trainer.push_to_hub"] = False
    # The best checkpoint needs an evaluation with each save, which the plan then adds itself.
    if recipe.trainer.get("eval_strategy", "no") != "no" or recipe.trainer.get("load_best_model_at_end"):
        changes |= {"trainer.eval_strategy": "steps", "trainer.eval_steps": save_steps}
    return [f"{key}={value}" for key, value in changes.items()]


def _check_states(plan: Plan) -> None:
    """RecipeError if states are on NVMe, by the recipe or a base profile: such a run cannot be resumed."""
    for name in ("sharding.offload_optimizer", "sharding.offload_param"):
        if plan.at(name) == "nvme":
            raise RecipeError(
                Problem(
                    "nvme-resume",
                    "DeepSpeed cannot reload states from NVMe, so there is nothing to drill",
                    path=name,
                    hint=f"--set {name}=cpu, or none, drills the rest of it",
                )
            )


@dataclass(frozen=True, slots=True)
class EndedProcess:
    """A child process that has ended."""

    code: int | None
    """Exit status; None: it was killed after its time."""
    answer: Mapping[str, Any]
    """The JSON that it printed, {} without one."""
    seconds: float
    """Until none of its processes was left."""
    ended_at: float
    """Seconds since 1970."""
    left: int
    """Processes that outlived it and were killed here."""

    @property
    def cause(self) -> str:
        """The message of its first error."""
        errors = self.answer.get("errors") or [{}]
        return str(errors[0].get("message", ""))


def watch_run(argv: Sequence[str], env: Mapping[str, str], log: Path, limit_s: float | None) -> EndedProcess:
    """Run a command that prints one JSON object, until it and all of its descendants have ended.

    log: its stderr; its stdout goes into the same name with .json. limit_s: then it is killed. After a
    KeyboardInterrupt the command gets SIGTERM and time to save; a second one kills all.
    """
    token = uuid.uuid4().hex
    answer = log.with_suffix(".json")
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as err, answer.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            list(argv), env={**env, MARK: token}, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = _wait(process, limit_s)
        finally:
            left = kill_marked(token, REAP_S)
            process.wait()
    ended_at, seconds = time.time(), time.monotonic() - began
    try:
        return EndedProcess(code, read_record(answer), seconds, ended_at, left)
    except RecipeError:  # not a JSON object
        return EndedProcess(code, {}, seconds, ended_at, left)


def _wait(process: subprocess.Popen[bytes], limit_s: float | None) -> int | None:
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(STOP_S)
        raise


def kill_marked(token: str, wait_s: float) -> int:
    """Kill the processes with this token that still run after `wait_s`; their number."""
    deadline = time.monotonic() + wait_s
    while (found := processes_of(token, MARK)) and time.monotonic() < deadline:
        time.sleep(0.05)
    send(found, signal.SIGKILL)
    return len(found)


def bad_ending(
    fault: DrillFault, ended: EndedProcess, injected: bool, seconds: float, stop_s: float
) -> str | None:
    """What is wrong with the end of a run; None if nothing is.

    injected: whether the fault happened. seconds: from the fault until no process was left. stop_s: time for
    a step and a save of this plan.
    """
    limit = GONE_S + (stop_s if fault.id == "terminate" else 0.0)
    cause = ended.cause or "none"
    if ended.code is None:
        return "the run did not end"
    if not injected:
        return f"the fault was not injected: the run ended with exit status {ended.code}, cause: {cause}"
    if ended.code != fault.code:
        return f"the run ended with exit status {ended.code}, expected {fault.code}; cause: {cause}"
    if ended.left:
        return f"{ended.left} processes outlived the run"
    if seconds > limit:
        return f"the run took {seconds:.0f} s to end, expected at most {limit:.0f} s"
    if not any(name.casefold() in ended.cause.casefold() for name in fault.causes):
        return f"the cause that the run reports is not the fault: {cause}"
    return None


def bad_checkpoint(fault: DrillFault, save_steps: int, found: int | None) -> str | None:
    """What is wrong with the last complete checkpoint (its step) after the fault; None if nothing is."""
    if found is None:
        return "no complete checkpoint was left"
    # A stopped run has saved once more, at the step of the fault or later.
    wanted = fault.step(save_steps) if fault.id == "terminate" else save_steps
    good = found >= wanted if fault.id == "terminate" else found == wanted
    return None if good else f"the last complete checkpoint is of step {found}, expected {wanted}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Losses of a run compared with those of the undisturbed one."""

    steps: int
    """Steps that both have."""
    difference: float | None
    """The largest; None if just one of two losses is finite, or there was nothing to compare."""
    worst: int | None
    """The step of it."""
    missing: tuple[int, ...]
    """Steps that only one of them has."""


def compare(found: Losses, expected: Losses) -> Comparison:
    """Compare two runs step by step."""
    both = sorted(found.keys() & expected.keys())
    gaps = {step: _gap(found[step], expected[step]) for step in both}
    worst = max(both, key=lambda step: (gaps[step] is None, gaps[step] or 0.0), default=None)
    missing = tuple(sorted(found.keys() ^ expected.keys()))
    return Comparison(len(both), None if worst is None else gaps[worst], worst, missing)


def _gap(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return 0.0 if one is other else None
    return abs(one - other)


def bad_losses(found: Comparison, tolerance: float) -> str | None:
    """What is wrong with the losses of a run; None if nothing is."""
    if found.missing:
        more = ", …" if len(found.missing) > 6 else ""
        return f"steps {', '.join(map(str, found.missing[:6]))}{more} are not in both runs"
    if found.worst is None:
        return "there is nothing to compare"
    if found.difference is None:
        return f"step {found.worst}: the loss is not finite in one run"
    if found.difference > tolerance:
        expected = "bit-identical losses" if tolerance == 0 else f"at most {tolerance:.2g}"
        return f"step {found.worst}: losses differ by {found.difference:.3g}, expected {expected}"
    return None


def tolerance_of(runs: Sequence[Losses]) -> float:
    """How much losses may differ: not at all if two undisturbed runs agree, or only one was made."""
    return 0.0 if len(runs) < 2 else TOLERANCE * (compare(runs[1], runs[0]).difference or 0.0)


@dataclass(slots=True)
class Drill:
    """A drill in progress."""

    folder: Path
    command: list[str]
    """`run` without its run directory."""
    save_steps: int
    """Steps between two of the three saves."""
    plan: Plan
    data: dict[str, Any]
    """The content of drill.json."""
    expected: Losses = field(default_factory=dict)
    """Losses of the run without a fault."""

    def save(self) -> None:
        """Write drill.json with the results so far."""
        write_text(self.folder / "drill.json", dump_json(self.data))

    def run(self, name: str, *more: str, fault: dict[str, Any] | None = None) -> EndedProcess:
        """`effilaunch run` into the folder `name`, in a process of its own."""
        env = {key: value for key, value in os.environ.items() if key not in (VARIABLE, RESUME)}
        if fault is not None:
            env[VARIABLE] = json.dumps(fault)
        usual = self.data["reference"]["seconds"]
        limit = None if usual is None else SLACK_S + SLOWER * usual
        log = self.folder / f"{name}{'-resumed' if more else ''}.log"
        return watch_run([*self.command, "--output-dir", str(self.folder / name), *more], env, log, limit)


def drill_recipe(
    recipe: str,
    *,
    overrides: Sequence[str],
    on: str | None,
    tiny: bool,
    steps: int,
    only: str | None,
    output_dir: str | None,
    say: Callable[[str], None],
) -> Drill:
    """Inject every fault into a run of its own, resume it and compare; the results are in `data`.

    Results so far are kept after Interrupted.
    """
    faults = choose_faults(only)
    drill = _plan(recipe, overrides, on=on, tiny=tiny, steps=steps, output_dir=output_dir)
    drill.data["faults"] = [new_record(fault) for fault in faults]
    say(f"{len(faults)} faults, runs of {steps} steps, saved every {drill.save_steps}, in {drill.folder}")
    place = "the undisturbed run"
    try:
        with ended_by_signals():
            _run_undisturbed(drill, say)
            drill.save()
            for number, (fault, record) in enumerate(zip(faults, drill.data["faults"], strict=True), start=1):
                place = fault.id
                say(f"[{number}/{len(faults)}] {fault.id}: {fault.title} …")
                _inject(drill, fault, record, f"{number:02d}-{fault.id}")
                drill.save()
                say(f"[{number}/{len(faults)}] {fault_line(record)}")
    except (KeyboardInterrupt, Interrupted) as stop:
        drill.save()
        hint = f"results so far are in {drill.folder}"
        raise Interrupted(Problem("interrupted", f"stopped at {place}", hint=hint)) from stop
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise unwritable(drill.folder, error) from error
    return drill


def _plan(
    recipe: str, overrides: Sequence[str], *, on: str | None, tiny: bool, steps: int, output_dir: str | None
) -> Drill:
    """The drill before anything has run; its runs are planned as they will plan themselves."""
    sets = [*overrides, *drill_overrides(load_recipe(recipe, overrides).recipe, steps)]
    loaded = load_recipe(recipe, sets)
    if not tiny and (absent := data_problems(loaded)):
        raise RecipeError(absent)
    planned, facts = gather(loaded, on, tiny=tiny)
    plan = make_plan(planned, facts)
    _check_states(plan)
    check_machine(plan)
    check_disk_space(
        plan, Path(output_dir or "runs").absolute()
    )  # for one run: its weights go before the next begins
    command = [sys.executable, "-m", "launcher.cli", "run", recipe, "--json"]
    command += ["--tiny"] if tiny else []
    command += [] if on is None else ["--on", on]
    command += [word for value in sets for word in ("--set", value)]
    data = {
        "schema_version": SCHEMA_VERSION,
        "recipe": str(loaded.path),
        "model": facts.model.name,
        "hardware": facts.hardware.label,
        "steps": steps,
        "save_steps": steps // 3,
        "tiny": tiny,
        "versions": dict(facts.versions),
        "reference": {"runs": 0, "seconds": None, "spread": None, "tolerance": 0.0},
    }
    return Drill(make_folder(output_dir, str(loaded.path), "drill"), command, steps // 3, plan, data)


def _run_undisturbed(drill: Drill, say: Callable[[str], None]) -> None:
    """Run without a fault: once on a CPU, where a run is reproducible to the bit; twice on GPUs."""
    runs: list[Losses] = []
    seconds: list[float] = []
    for name in UNDISTURBED[:1] if drill.plan.hardware.is_cpu else UNDISTURBED:
        say(f"{name.partition('-')[2]} …")
        ended = drill.run(name)
        if ended.code != 0:
            raise _own_error(drill, name, ended)
        runs.append(losses(drill.folder / name))
        seconds.append(ended.seconds)
        _drop_weights(drill.folder / name)
    drill.expected = runs[0]
    drill.data["reference"] = {
        "runs": len(runs),
        "seconds": round(max(seconds), 3),
        "spread": compare(runs[1], runs[0]).difference if len(runs) > 1 else None,
        "tolerance": tolerance_of(runs),
    }


def _own_error(drill: Drill, name: str, ended: EndedProcess) -> EffilaunchError:
    """The error of a run that failed without a fault, as that run reported it."""
    kinds: dict[int | None, type[EffilaunchError]] = {
        kind.exit_code: kind for kind in (RecipeError, DoesNotFit, MachineError, Interrupted)
    }
    problems = [Problem(**problem) for problem in ended.answer.get("errors", [])]
    if not problems:
        message = f"the run without a fault ended with exit status {ended.code}"
        problems = [Problem("run-failed", message, file=str(drill.folder / f"{name}.log"))]
    return kinds.get(ended.code, RunFailed)(problems)


def new_record(fault: DrillFault) -> dict[str, Any]:
    """The record of a fault before it is injected."""
    unknown = (
        "reason", "struck", "exit_code", "seconds", "left", "cause", "checkpoint", "resumed_at", "compared",
        "difference", "run_dir",
    )  # fmt: skip
    return {"id": fault.id, "title": fault.title, "status": "not-run", **dict.fromkeys(unknown)}


def _inject(drill: Drill, fault: DrillFault, record: dict[str, Any], name: str) -> None:
    """Run into one fault and resume; the result goes into its record."""
    if fault.id == "kill-rank" and drill.plan.hardware.num_devices == 1:
        record |= {"status": "same", "reason": "one process: killing its only rank kills all"}
        return
    run_dir = drill.folder / name
    record["run_dir"] = str(run_dir)
    wrong = _run_into(drill, fault, record, name) or _resume(drill, record, name)
    record |= {"status": "passed" if wrong is None else "failed", "reason": wrong}
    if wrong is None:
        _drop_weights(run_dir)


def _run_into(drill: Drill, fault: DrillFault, record: dict[str, Any], name: str) -> str | None:
    """Run into the fault; what is wrong with the end of the run."""
    run_dir, step = drill.folder / name, fault.step(drill.save_steps)
    rank = {"rank": drill.plan.hardware.num_devices - 1} if fault.id == "kill-rank" else {}
    ended = drill.run(name, fault={"fault": fault.id, "step": step, "times": 1, **rank})
    marker = run_dir / INJECTED
    injected = marker.is_file()
    seconds = ended.ended_at - marker.stat().st_mtime if injected else ended.seconds
    last = max(complete_checkpoints(run_dir / "checkpoints"), default=None)
    record |= {
        "struck": step if injected else None,
        "exit_code": ended.code,
        "seconds": round(seconds, 3) if injected else None,
        "left": ended.left,
        "cause": ended.cause or None,
        "checkpoint": last,
    }
    stop_s = float(drill.plan.runtime.stop_seconds or 0)
    wrong = bad_ending(fault, ended, injected, seconds, stop_s)
    return wrong or bad_checkpoint(fault, drill.save_steps, last)


def _resume(drill: Drill, record: dict[str, Any], name: str) -> str | None:
    """Resume from the last checkpoint; what is wrong with that."""
    run_dir = drill.folder / name
    before = losses(run_dir)
    early = {step: loss for step, loss in drill.expected.items() if step in before}
    ended = drill.run(name, "--resume", "auto")
    if ended.code != 0:
        return f"the resumed run ended with exit status {ended.code}; cause: {ended.cause or 'none'}"
    found, wanted = _resumed_at(run_dir), record["checkpoint"]
    record["resumed_at"] = found
    if found != wanted:
        return f"resumed from {f'step {found}' if found else 'the start'}, expected step {wanted}"
    after = compare(losses(run_dir), drill.expected)
    record |= {"compared": after.steps, "difference": after.difference}
    tolerance = drill.data["reference"]["tolerance"]
    return bad_losses(after, tolerance) or bad_losses(compare(before, early), tolerance)


def _resumed_at(run_dir: Path) -> int | None:
    """The step of the checkpoint that rank 0 resumed from, by its log."""
    log = (run_dir / "logs" / "rank-0.log").read_text(encoding="utf-8", errors="replace")
    found = re.findall(r"^resuming from .*/checkpoint-(\d+)$", log, re.MULTILINE)
    return int(found[-1]) if found else None


def losses(run_dir: Path) -> dict[int, float | None]:
    """Step -> training loss."""
    rows = read_jsonl(run_dir / "metrics.jsonl")
    return {row["step"]: row["loss"] for row in rows if "loss" in row and isinstance(row.get("step"), int)}


def _drop_weights(run_dir: Path) -> None:
    """Remove the weights of a run of few steps, which would fill the disk."""
    for name in ("checkpoints", "model", "adapter"):
        shutil.rmtree(run_dir / name, ignore_errors=True)


HEAD = (
    "fault", "the run ended", "gone after", "checkpoint", "resumed at", "steps compared", "loss differs by",
    "verdict",
)  # fmt: skip


def fault_line(fault: Mapping[str, Any]) -> str:
    """The result of one fault."""
    if fault["status"] != "passed":
        return f"{fault['id']}: {fault['status']}: {fault['reason']}"
    cells = dict(zip(HEAD, _row(fault), strict=True))
    return (
        f"{fault['id']}: {cells['the run ended']}, no process left after {cells['gone after']}, resumed at "
        f"{cells['resumed at']}; {fault['compared']} losses differ by {cells['loss differs by']}"
    )


def drill_text(data: Mapping[str, Any], folder: Path) -> str:
    """The table, what failed, and the path of drill.json."""
    title = f"{data['recipe']} on {data['hardware']}: {data['steps']} steps, saved every {data['save_steps']}"
    reference = data["reference"]
    expected = "expected: bit-identical losses of every step, as in the run without a fault"
    if reference["tolerance"]:
        expected = (
            f"expected: losses differ by at most {reference['tolerance']:.3g}; two runs without a fault "
            f"differed by {reference['spread']:.3g}"
        )
    lines = ["", title, *table([HEAD, *(_row(fault) for fault in data["faults"])]), "", expected]
    for fault in data["faults"]:
        if fault["reason"]:
            lines += wrapped(f"{fault['id']}: {fault['reason']}", "")
    return "\n".join([*lines, f"all numbers: {folder}/drill.json"]) + "\n"


def _row(fault: Mapping[str, Any]) -> tuple[str, ...]:
    def cell(key: str, text: Callable[[Any], str]) -> str:
        return "" if fault[key] is None else text(fault[key])

    ended = "not at all" if fault["exit_code"] is None else f"exit code {fault['exit_code']}"
    return (
        fault["title"],
        ended if fault["struck"] else "",
        cell("seconds", "{:.1f} s".format),
        cell("checkpoint", "step {}".format),
        cell("resumed_at", "step {}".format),
        cell("compared", str),
        cell("difference", lambda value: f"{value:.3g}" if value else "nothing"),
        fault["status"],
    )
