"""Gives job scripts to Slurm, and keeps in the run directory which jobs these are."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from launcher.execute.endings import run_failure
from launcher.execute.run_dir import MARKER, read_stopped, unwritable
from launcher.facts.atomic_writes import write_text
from launcher.facts.checkpoint import complete_checkpoints
from launcher.facts.user_files import parse_json, read_jsonl
from launcher.render.bundle import dump_json
from launcher.schedulers.slurm_queue import ENDED, PASSING, Job, ask, read_jobs, submit
from launcher.schedulers.slurm_script import ASKED_TO_STOP, START

RECORD, SWEEP = "submit.json", "sweep.json"
"""In a run directory; in the directory of a sweep."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a submission."""

    run_dir: Path
    job: str
    """Its job's number; of a sweep with the task: 12_3."""
    log: Path
    """What the job printed."""
    values: Mapping[str, Any]
    """What a sweep has set for it."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """What was given to Slurm at once."""

    folder: Path
    recipe: str
    prepare: str | None
    """Number of the job that prepares the data."""
    job: str
    """Number of the job, or of the array."""
    runs: tuple[Run, ...]

    @property
    def is_sweep(self) -> bool:
        return len(self.runs) > 1 or bool(self.runs[0].values)

    @property
    def is_part(self) -> bool:
        """Whether it is one run of a sweep, whose prepare job is that of the other runs, too."""
        return "_" in self.job

    @property
    def place(self) -> Path:
        """The directory whose record this is: of the run, or of the sweep."""
        return self.runs[0].run_dir if self.is_part else self.folder

    @property
    def own_jobs(self) -> list[str]:
        """What ends with it: of one run of a sweep its task alone."""
        return [self.job, *([self.prepare] if self.prepare and not self.is_part else [])]

    @property
    def jobs(self) -> list[str]:
        """Every job, the one that prepares first."""
        return [*([self.prepare] if self.prepare else []), *(run.job for run in self.runs)]

    @property
    def prepare_log(self) -> Path:
        return self.folder / "logs" / f"slurm-prepare-{self.prepare}.out"

    def to_json(self) -> dict[str, Any]:
        return {
            "to": "slurm",
            "recipe": self.recipe,
            "jobs": {"prepare": self.prepare, "run": self.job},
            "runs": [
                {"run_dir": str(run.run_dir), "job": run.job, "log": str(run.log), "values": dict(run.values)}
                for run in self.runs
            ],
        }


def submit_scripts(
    folder: Path,
    scripts: tuple[Path | None, Path],
    recipe: str,
    run_dirs: Sequence[Path],
    values: Sequence[Mapping[str, Any]],
) -> Submitted:
    """Submit the prepare script, where there is one, and the job behind it; the record is written.

    values: of a sweep, for each run directory; empty for one run. RecipeError where Slurm takes one of the
    scripts not, and then none stays in the queue; MachineError where it does not answer.
    """
    first, second = scripts
    prepare = None if first is None else _submit(first, None)
    try:
        job = _submit(second, prepare)
    except (RecipeError, MachineError):
        if prepare is not None:
            ask("scancel", prepare)
        raise
    runs = []
    for index, run_dir in enumerate(run_dirs):
        number = f"{job}_{index}" if values else job
        runs.append(
            Run(run_dir, number, folder / "logs" / f"slurm-{number}.out", values[index] if values else {})
        )
    done = Submitted(folder, recipe, prepare, job, tuple(runs))
    stamp = {"submitted": time.time()}
    try:
        write_text(folder / (SWEEP if values else RECORD), dump_json({**done.to_json(), **stamp}))
        for run in runs if values else ():
            own = Submitted(folder, recipe, prepare, run.job, (run,))
            write_text(run.run_dir / RECORD, dump_json({**own.to_json(), **stamp}))
    except OSError as error:
        ask("scancel", job, *([prepare] if prepare else []))
        raise unwritable(folder, error) from error
    return done


def _submit(script: Path, behind: str | None) -> str:
    answer = submit(script, dependency=behind)
    number = answer.out.strip().partition(";")[0]
    if answer.code == 0 and number.isdigit():
        return number
    if answer.code == 124:  # the controller may have taken it, and been too slow to say so
        message = f"{answer.said}: the job of {script.name} may have been submitted"
        hint = "`squeue --me` shows whether it was; `scancel` takes it out of the queue"
        raise MachineError(Problem("slurm-no-answer", message, file=str(script), hint=hint))
    kind = MachineError if answer.code == 127 else RecipeError
    message = f"Slurm does not take the job: {answer.said}"
    raise kind(Problem("slurm-refused", message, file=str(script), hint="nothing was submitted"))


def read_submitted(folder: Path) -> Submitted:
    """The record of a run directory or of a sweep. RecipeError where nothing was submitted from there."""
    for name in (SWEEP, RECORD):
        try:
            found = parse_json((folder / name).read_text("utf-8"))
            runs = tuple(
                Run(Path(run["run_dir"]), run["job"], Path(run["log"]), run["values"])
                for run in found["runs"]
            )
            first = runs[0].log.parent.parent
            return Submitted(first, found["recipe"], found["jobs"]["prepare"], found["jobs"]["run"], runs)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            message = f"cannot be read: {error}"
            raise RecipeError(Problem("not-submitted", message, file=str(folder / name))) from error
    hint = "name the run directory that `effilaunch submit RECIPE` has written, or the one of a sweep"
    raise RecipeError(Problem("not-submitted", f"no job was submitted from {folder}", hint=hint))


def cancel(submitted: Submitted) -> None:
    """End its own jobs for good. MachineError where Slurm does not do it."""
    answer = ask("scancel", *submitted.own_jobs)
    if answer.code != 0:
        problem = Problem("slurm-no-answer", f"the job cannot be cancelled: {answer.said}")
        raise MachineError(problem)


FIRST_POLL_S, LONGEST_POLL_S = 1.0, 15.0
"""The controller serves all users: it is asked rarely while nothing changes."""
_CERTAIN = 3
"""So often in a row a job must be gone, or stuck, or in a state that may pass, before that counts."""
_WAITS = {
    "Resources": "waits for free nodes",
    "Priority": "waits behind jobs of higher priority",
    "Dependency": "waits for the job that prepares the data",
    "BeginTime": "waits; Slurm starts a requeued job after two minutes",
    "JobHeldUser": "is held: `scontrol release` lets it go",
    "JobHeldAdmin": "is held by an administrator",
    "JobArrayTaskLimit": "waits for other jobs of the sweep (launch.slurm.array_limit)",
    "ReqNodeNotAvail": "waits for nodes that are down, drained or reserved",
    "PartitionDown": "waits until its partition is up: it is down",
    "PartitionInactive": "waits until its partition starts jobs again: it is inactive",
    "NodeDown": "waits for a node that is down",
    "Reservation": "waits for its reservation",
    "Licenses": "waits for licenses",
}
"""Why a job waits, as Slurm says it -> in words."""
_STUCK = {
    "DependencyNeverSatisfied": "the job that it waits for failed",
    "BadConstraints": "no node has what it asks for",
    "PartitionConfig": "the partition does not take such a job (its limits of time, nodes or users)",
    "PartitionTimeLimit": "it asks for more time than the partition gives",
    "PartitionNodeLimit": "it asks for more nodes than the partition gives",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its quality of service is not valid",
    "AccountNotAllowed": "its account may not use the partition",
    "QOSNotAllowed": "its quality of service may not use the partition",
}
"""The same of a job that does not start unless it, its partition or its account is changed."""
_OF_ONE_PARTITION = (
    "PartitionConfig", "PartitionTimeLimit", "PartitionNodeLimit", "AccountNotAllowed", "QOSNotAllowed",
)  # fmt: skip
"""Slurm shows the reason of the partition that it tried last: the others may take the job."""
_HINDERED = (
    "PartitionDown", "PartitionInactive", "NodeDown", "ReqNodeNotAvail", "JobHeldUser", "JobHeldAdmin",
)  # fmt: skip
"""What passes once somebody mends it: told also of a sweep, whose other reasons are not."""
_FAILED = {
    "CANCELLED": "the job was cancelled",
    "TIMEOUT": "the job reached its time limit before it could save",
    "NODE_FAIL": "a node of the job failed",
    "BOOT_FAIL": "a node of the job did not boot",
    "OUT_OF_MEMORY": "Slurm killed the job for its memory (launch.slurm.mem)",
    "DEADLINE": "the job reached its deadline",
    "REVOKED": "the job was revoked",
    "PREEMPTED": "the job had to make room for another one, and was not requeued",
}
_CODES: Mapping[int, type[EffilaunchError]] = {2: RecipeError, 3: DoesNotFit, 4: MachineError}
_ERROR = re.compile(r"^(?:\d+: )?error: (.+)$")


@dataclass(slots=True)
class _Seen:
    """What was told of a job."""

    said: str = ""
    gone: int = 0
    stuck: int = 0
    ended: int = 0
    metrics: int = 0
    """Bytes of metrics.jsonl that were told."""


def follow(
    submitted: Submitted, say: Callable[[str], None], poll_s: float = FIRST_POLL_S
) -> dict[str, Job | None]:
    """Return when all jobs have ended: id -> its last state, None for one that Slurm has forgotten.

    MachineError for a job that will not start by itself; it stays in the queue.
    """
    seen = {number: _Seen() for number in submitted.jobs}
    ended: dict[str, Job | None] = {}
    wait, told, is_silent = poll_s, "", False
    while len(ended) < len(seen):
        try:
            found = read_jobs([number for number in seen if number not in ended])
        except MachineError as error:  # says nothing about the jobs, which go on
            if not is_silent:
                say(f"{error.problems[0].message}; it is asked again")
            is_silent, wait = True, min(wait * 1.3, LONGEST_POLL_S)
            time.sleep(wait)
            continue
        spoke, is_silent = False, False
        for number, state in seen.items():
            if number in ended:
                continue
            job = found.get(number)
            if not submitted.is_sweep or number == submitted.prepare:
                spoke |= _tell(submitted, number, job, state, say)
            if job is None:
                state.gone += 1
                if state.gone >= _CERTAIN:
                    ended[number] = None
            else:
                state.gone = 0
                _check_stuck(submitted, job, state)
                state.ended = state.ended + 1 if job.state in ENDED else 0
                if state.ended >= (_CERTAIN if job.state in PASSING else 1):
                    ended[number] = job
        if submitted.is_sweep and (counts := _counts(submitted, found, ended)) != told:
            told, spoke = counts, True
            say(f"array {submitted.job}: {counts}")
        wait = poll_s if spoke else min(wait * 1.3, LONGEST_POLL_S)
        if len(ended) < len(seen):
            time.sleep(wait)
    return ended


def _counts(submitted: Submitted, found: Mapping[str, Job], ended: Mapping[str, Job | None]) -> str:
    """How many runs of a sweep are in which state, `2 pending, 1 running`, and what hinders them."""
    known = {**ended, **found}
    jobs = [known.get(run.job) for run in submitted.runs]
    states = ["unknown" if job is None else job.state.lower() for job in jobs]
    counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    why = {in_words(job) for job in jobs if job and job.state == "PENDING" and _reason(job) in _HINDERED}
    return ", ".join([*counts, *sorted(why)])


def _reason(job: Job) -> str:
    """Its first word: `ReqNodeNotAvail,_UnavailableNodes:n1` names the nodes behind it."""
    return job.reason.partition(",")[0]


def _tell(
    submitted: Submitted, number: str, job: Job | None, seen: _Seen, say: Callable[[str], None]
) -> bool:
    """Say what is new of a job; whether anything was."""
    name = f"job {number}" + (" (prepare)" if number == submitted.prepare else "")
    text = f"{name} is not known to Slurm any more" if job is None else f"{name} {in_words(job)}"
    new = text != seen.said and (job is not None or seen.gone == _CERTAIN - 1)
    if new:
        seen.said = text
        say(text)
    run = next((run for run in submitted.runs if run.job == number), None)
    if run is None or submitted.is_sweep:
        return new
    return _tell_metrics(run.run_dir, seen, say) or new


def in_words(job: Job) -> str:
    """What a job does just now."""
    if job.state == "PENDING":
        reason = _reason(job)
        words = _WAITS.get(reason, f"waits ({reason})" if reason else "waits")
        again = f"; it was requeued {job.restarts} time(s)" if job.restarts else ""
        return words + again
    if job.state == "RUNNING":
        again = f", after {job.restarts} requeue(s)" if job.restarts else ""
        return f"runs on {job.nodes}{again}"
    if job.state == "COMPLETED":
        return "is done"
    if job.state == "FAILED":
        return f"failed with exit code {job.code}"
    return f"is {job.state.lower().replace('_', ' ')}"


def _tell_metrics(run_dir: Path, seen: _Seen, say: Callable[[str], None]) -> bool:
    """The newest loss of the run."""
    path = run_dir / "metrics.jsonl"
    try:
        size = path.stat().st_size
    except OSError:
        return False
    if size == seen.metrics:
        return False
    seen.metrics = size
    rows = [row for row in read_jsonl(path) if "loss" in row]
    if not rows:
        return False
    loss = rows[-1]["loss"]
    shown = f"{loss:.4f}" if isinstance(loss, int | float) else "not finite"
    say(f"  step {rows[-1].get('step')}: loss {shown}")
    return True


def _check_stuck(submitted: Submitted, job: Job, seen: _Seen) -> None:
    why = _STUCK.get(_reason(job)) if job.state == "PENDING" else None
    elsewhere = "," in job.partition and _reason(job) in _OF_ONE_PARTITION
    if why is None or elsewhere or (job.reason == "DependencyNeverSatisfied" and submitted.prepare):
        seen.stuck = 0  # what waits for a job that failed is cancelled by Slurm, and judged then
        return
    seen.stuck += 1
    if seen.stuck < _CERTAIN:
        return
    message = f"job {job.id} will not start: {why} ({job.reason})"
    hint = f"`effilaunch submit {submitted.place} --cancel` takes it out of the queue"
    raise MachineError(Problem("slurm-stuck", message, hint=hint))


def judge(submitted: Submitted, run: Run, jobs: Mapping[str, Job | None]) -> dict[str, Any]:
    """result.json of a run whose job has ended; raises what `run` would have, where it did not finish."""
    if (run.run_dir / MARKER).is_file():
        result: dict[str, Any] = parse_json((run.run_dir / "result.json").read_text("utf-8"))
        return result
    prepare = jobs.get(submitted.prepare) if submitted.prepare else None
    if prepare is not None and prepare.state != "COMPLETED":
        raise _failed_prepare(submitted, prepare)
    job = jobs.get(run.job)
    if job is None:
        message = f"Slurm does not know job {run.job} any more, and its run has not finished"
        raise RunFailed(Problem("slurm-job-gone", message, file=str(run.log), hint=_again(run)))
    raise _failed_run(run, job)


def _failed_prepare(submitted: Submitted, job: Job) -> EffilaunchError:
    """The job that prepares the data failed: its own words."""
    errors = said_errors(submitted.prepare_log)
    if job.state == "CANCELLED":
        return Interrupted(Problem("cancelled", "the job that prepares the data was cancelled"))
    why = errors[-1] if errors else _FAILED.get(job.state, f"it ended with exit code {job.code}")
    kind = _CODES.get(job.code or 0, RunFailed)
    message = f"the data could not be prepared: {why}"
    return kind(Problem("prepare-failed", message, file=str(submitted.prepare_log)))


def _failed_run(run: Run, job: Job) -> EffilaunchError:
    errors = said_errors(run.log)
    if job.state == "CANCELLED" or job.code in ASKED_TO_STOP:
        whole = complete_checkpoints(run.run_dir / "checkpoints")
        at = f"its newest whole checkpoint is {whole[max(whole)].name}" if whole else "it has no checkpoint"
        stopped = read_stopped(run.run_dir)
        asked = f"{stopped.get('signal')} stopped the run" if stopped else "the run was stopped"
        what = "the job was cancelled" if job.state == "CANCELLED" else asked
        return Interrupted(Problem("interrupted", f"{what}; {at}", file=str(run.run_dir), hint=_again(run)))
    if job.state in _FAILED:
        hint = _again(run)
        return RunFailed(Problem("slurm-ended", _FAILED[job.state], file=str(run.log), hint=hint))
    kind = _CODES.get(job.code or 0)
    if kind is not None and errors:
        return kind([Problem("job-failed", error) for error in errors])
    failure = run_failure(run.run_dir, job.code or 0, "launcher.log")
    if errors:  # `run` has said it better: it saw the end itself
        failure.problems = [replace(failure.problems[0], message=errors[-1], file=None, hint=None)]
    else:
        failure.problems = [replace(failure.problems[0], file=str(run.log))]
    return failure


def said_errors(log: Path) -> list[str]:
    """The errors that a job printed since its last start; every member of a group says the same once."""
    try:
        lines = log.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    last = max((number for number, line in enumerate(lines) if line.startswith(START)), default=0)
    found = [match[1] for line in lines[last:] if (match := _ERROR.match(line))]
    return list(dict.fromkeys(found))


def _again(run: Run) -> str:
    return f"`sbatch {run.run_dir}/job.sbatch` goes on where the run stands"
