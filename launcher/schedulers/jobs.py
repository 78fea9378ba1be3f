"""Follow submitted jobs to their end, and tell how each run ended."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
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
from launcher.execute.run_dir import MARKER, read_stopped
from launcher.facts.checkpoint import complete_checkpoints
from launcher.facts.safe_files import parse_json, read_jsonl
from launcher.schedulers import queue_named
from launcher.schedulers.scheduler import ASKED_TO_STOP, START, Job
from launcher.schedulers.submitted import Run, Submitted

FIRST_POLL_S, LONGEST_POLL_S = 1.0, 15.0
"""A scheduler serves all users: it is asked rarely while nothing changes."""
_CERTAIN = 3
"""Times in a row that a job must be unknown, stuck, or ended in a state that may pass, before that counts."""
_CODES: Mapping[int, type[EffilaunchError]] = {2: RecipeError, 3: DoesNotFit, 4: MachineError}
_ERROR = re.compile(r"^(?:\d+: )?error: (.+)$")


@dataclass(slots=True)
class _Seen:
    """What was told of a job, and how often in a row it was seen in a state."""

    said: str = ""
    gone: int = 0
    stuck: int = 0
    ended: int = 0
    metrics: int = 0
    """Bytes of metrics.jsonl that were told."""


def follow(
    submitted: Submitted, say: Callable[[str], None], poll_s: float = FIRST_POLL_S
) -> dict[str, Job | None]:
    """Return when all jobs have ended: id -> its last state, None for one that the scheduler has forgotten.

    MachineError for a job that will never start; it stays in the queue.
    """
    queue = queue_named(submitted.to)
    seen = {number: _Seen() for number in submitted.jobs}
    ended: dict[str, Job | None] = {}
    wait, told, is_silent = poll_s, "", False
    while len(ended) < len(seen):
        try:
            found = queue.jobs([number for number in seen if number not in ended])
        except MachineError as error:  # tells nothing about the jobs, which continue
            if not is_silent:
                say(f"{error.problems[0].message}; asking again")
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
            if _is_over(submitted, number, job, state):
                ended[number] = job
        if submitted.is_sweep and (counts := _counts(submitted, {**ended, **found})) != told:
            told, spoke = counts, True
            say(f"array {submitted.job}: {counts}")
        wait = poll_s if spoke else min(wait * 1.3, LONGEST_POLL_S)
        if len(ended) < len(seen):
            time.sleep(wait)
    return ended


def _is_over(submitted: Submitted, number: str, job: Job | None, seen: _Seen) -> bool:
    """Whether a job has ended, or was forgotten. MachineError where it will never start."""
    if job is None:
        seen.gone += 1
        return seen.gone >= _CERTAIN
    seen.gone = 0
    why = job.never_starts
    if job.lost_its_dependency and submitted.prepare:
        why = ""  # the scheduler cancels it, and it is judged then
    seen.stuck = seen.stuck + 1 if why else 0
    if seen.stuck >= _CERTAIN:
        hint = f"`effilaunch submit {submitted.place} --cancel` takes it out of the queue"
        message = f"job {number} will not start: {why}"
        raise MachineError(Problem(f"{submitted.to}-stuck", message, hint=hint))
    seen.ended = seen.ended + 1 if job.has_ended else 0
    return seen.ended >= (_CERTAIN if job.may_return else 1)


def _counts(submitted: Submitted, known: Mapping[str, Job | None]) -> str:
    """How many runs of a sweep are in which state, `2 pending, 1 running`, and what keeps them waiting."""
    jobs = [known.get(run.job) for run in submitted.runs]
    states = ["unknown" if job is None else job.state.lower() for job in jobs]
    counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    return ", ".join([*counts, *sorted({job.obstacle for job in jobs if job and job.obstacle})])


def _tell(
    submitted: Submitted, number: str, job: Job | None, seen: _Seen, say: Callable[[str], None]
) -> bool:
    """Tell what is new of a job; whether anything was."""
    name = f"job {number}" + (" (prepare)" if number == submitted.prepare else "")
    text = f"{name} is no longer known to the scheduler" if job is None else f"{name} {job.text}"
    new = text != seen.said and (job is not None or seen.gone == _CERTAIN - 1)
    if new:
        seen.said = text
        say(text)
    run = next((run for run in submitted.runs if run.job == number), None)
    if run is None or submitted.is_sweep:
        return new
    return _tell_metrics(run.run_dir, seen, say) or new


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


def judge(submitted: Submitted, run: Run, jobs: Mapping[str, Job | None]) -> dict[str, Any]:
    """result.json of a run whose job has ended; raises what `run` would raise where it did not finish."""
    if (run.run_dir / MARKER).is_file():
        result: dict[str, Any] = parse_json((run.run_dir / "result.json").read_text("utf-8"))
        return result
    prepare = jobs.get(submitted.prepare) if submitted.prepare else None
    if prepare is not None and not prepare.has_succeeded:
        raise _failed_prepare(submitted, prepare)
    job, again = jobs.get(run.job), queue_named(submitted.to).restart_hint(run.run_dir)
    if job is None:
        message = f"job {run.job} is no longer known to the scheduler, and its run has not finished"
        raise RunFailed(Problem(f"{submitted.to}-job-gone", message, file=str(run.log), hint=again))
    if job.was_cancelled or job.code in ASKED_TO_STOP:
        raise _stopped(run, job, again)
    if job.failure:
        raise RunFailed(Problem(f"{submitted.to}-ended", job.failure, file=str(run.log), hint=again))
    raise _failed(run, job)


def _failed_prepare(submitted: Submitted, job: Job) -> EffilaunchError:
    errors = said_errors(submitted.prepare_log)
    if job.was_cancelled:
        return Interrupted(Problem("cancelled", "the job that prepares the data was cancelled"))
    why = errors[-1] if errors else job.failure or f"it ended with exit code {job.code}"
    kind = _CODES.get(job.code or 0, RunFailed)
    message = f"the data could not be prepared: {why}"
    return kind(Problem("prepare-failed", message, file=str(submitted.prepare_log)))


def _stopped(run: Run, job: Job, again: str) -> Interrupted:
    whole = complete_checkpoints(run.run_dir / "checkpoints")
    at = f"its newest complete checkpoint is {whole[max(whole)].name}" if whole else "it has no checkpoint"
    stopped = read_stopped(run.run_dir)
    asked = f"{stopped.get('signal')} stopped the run" if stopped else "the run was stopped"
    what = "the job was cancelled" if job.was_cancelled else asked
    return Interrupted(Problem("interrupted", f"{what}; {at}", file=str(run.run_dir), hint=again))


def _failed(run: Run, job: Job) -> EffilaunchError:
    errors = said_errors(run.log)
    kind = _CODES.get(job.code or 0)
    if kind is not None and errors:
        return kind([Problem("job-failed", error) for error in errors])
    failure = run_failure(run.run_dir, job.code or 0, "launcher.log")
    if errors:  # `run` itself saw the end, and its message tells more
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
