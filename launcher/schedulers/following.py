"""Follow submitted jobs to their end, and report how each run ended."""

from __future__ import annotations

import contextlib
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
from launcher.execute.endings import LAUNCHER_LOG, run_failure
from launcher.execute.run_dir import MARKER, read_stopped
from launcher.files.checkpoint import complete_checkpoints
from launcher.files.safe_files import parse_json, read_jsonl
from launcher.schedulers.queue import ASKED_TO_STOP, EXIT, RESULT, START, Queue, QueuedJob
from launcher.schedulers.submitted import Submitted, SubmittedRun

FIRST_POLL_S, LONGEST_POLL_S = 1.0, 15.0
"""A scheduler serves all users: it is asked rarely while nothing changes."""
_CERTAIN = 3
"""Times in a row that a job must be unknown, stuck, or ended in a state that may pass, before that counts."""
_CODES: Mapping[int, type[EffilaunchError]] = {2: RecipeError, 3: DoesNotFit, 4: MachineError}
_ERROR = re.compile(r"^(?:\d+: )?error: (.+)$")


@dataclass(slots=True)
class _SeenJob:
    """What was printed about a job, and how often in a row it was seen in a state."""

    text: str = ""
    gone: int = 0
    stuck: int = 0
    ended: int = 0
    metrics: int = 0
    """Bytes of metrics.jsonl that were read."""


def follow(
    queue: Queue, submitted: Submitted, say: Callable[[str], None], poll_s: float = FIRST_POLL_S
) -> dict[str, QueuedJob | None]:
    """Return when all jobs have ended: id -> its last state, None for one that the scheduler has forgotten.

    MachineError for a job that will never start; it stays in the queue.
    """
    seen = {number: _SeenJob() for number in submitted.jobs}
    ended: dict[str, QueuedJob | None] = {}
    wait, counts, is_silent = poll_s, "", False
    while True:
        spoke = False
        try:
            found = queue.jobs([number for number in seen if number not in ended])
        except MachineError as error:  # the jobs continue
            if not is_silent:
                say(f"{error.problems[0].message}; asking again")
            is_silent = True
        else:
            is_silent = False
            spoke |= _print_output(queue, submitted, found, say)
            for number in [number for number in seen if number not in ended]:
                job = found.get(number)
                if not submitted.is_sweep or number == submitted.prepare:
                    spoke |= _print_state(submitted, number, job, seen[number], say)
                if _is_over(submitted, number, job, seen[number]):
                    ended[number] = job
            if submitted.is_sweep and (now := _counts(submitted, {**ended, **found})) != counts:
                counts, spoke = now, True
                say(f"array {submitted.job}: {counts}")
        if len(ended) == len(seen):
            return ended
        wait = poll_s if spoke else min(wait * 1.3, LONGEST_POLL_S)
        time.sleep(wait)


def _print_output(
    queue: Queue, submitted: Submitted, found: Mapping[str, QueuedJob], say: Callable[[str], None]
) -> bool:
    """Fetch what the jobs have printed, where they do not write it here; whether there was anything new."""
    logs = {run.job: run.log for run in submitted.runs}
    if submitted.prepare:
        logs[submitted.prepare] = submitted.prepare_log
    texts = [queue.log(number, log) for number, log in logs.items() if number in found]
    for text in texts if not submitted.is_sweep else ():
        for line in text.splitlines():
            if not line.startswith((RESULT, EXIT)):
                say(f"  {line}")
    return any(texts)


def _is_over(submitted: Submitted, number: str, job: QueuedJob | None, seen: _SeenJob) -> bool:
    """Whether a job has ended, or was forgotten. MachineError where it will never start."""
    if job is None:
        seen.gone += 1
        return seen.gone >= _CERTAIN
    seen.gone = 0
    why = job.never_starts
    if job.lost_its_dependency and submitted.prepare:
        why = ""  # the scheduler cancels it, and `judge` reports it then
    seen.stuck = seen.stuck + 1 if why else 0
    if seen.stuck >= _CERTAIN:
        hint = f"`effilaunch submit {submitted.place} --cancel` removes it from the queue"
        message = f"job {number} will not start: {why}"
        raise MachineError(Problem(f"{submitted.to}-stuck", message, hint=hint))
    seen.ended = seen.ended + 1 if job.has_ended else 0
    return seen.ended >= (_CERTAIN if job.may_return else 1)


def _counts(submitted: Submitted, known: Mapping[str, QueuedJob | None]) -> str:
    """How many runs of a sweep are in which state, `2 pending, 1 running`, and what keeps them waiting."""
    jobs = [known.get(run.job) for run in submitted.runs]
    states = ["unknown" if job is None else job.state.lower() for job in jobs]
    counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    return ", ".join([*counts, *sorted({job.obstacle for job in jobs if job and job.obstacle})])


def _print_state(
    submitted: Submitted, number: str, job: QueuedJob | None, seen: _SeenJob, say: Callable[[str], None]
) -> bool:
    """Print what is new of a job, also the newest loss; whether anything was."""
    name = f"job {number}" + (" (prepare)" if number == submitted.prepare else "")
    text = f"{name} is no longer known to the scheduler" if job is None else f"{name} {job.text}"
    new = text != seen.text and (job is not None or seen.gone == _CERTAIN - 1)
    if new:
        seen.text = text
        say(text)
    run = next((run for run in submitted.runs if run.job == number), None)
    if run is None or submitted.is_sweep:
        return new
    return _print_loss(run.run_dir, seen, say) or new


def _print_loss(run_dir: Path, seen: _SeenJob, say: Callable[[str], None]) -> bool:
    """Print the newest loss of a run; whether there is a new one."""
    path = run_dir / "metrics.jsonl"
    try:
        size = path.stat().st_size
    except OSError:  # not written yet, or a network file system lost it
        size = seen.metrics
    rows = [] if size == seen.metrics else [row for row in read_jsonl(path) if "loss" in row]
    seen.metrics = size
    if rows:
        loss = rows[-1]["loss"]
        shown = f"{loss:.4f}" if isinstance(loss, int | float) else "not finite"
        say(f"  step {rows[-1].get('step')}: loss {shown}")
    return bool(rows)


def judge(
    queue: Queue, submitted: Submitted, run: SubmittedRun, jobs: Mapping[str, QueuedJob | None]
) -> dict[str, Any]:
    """result.json of a run whose job has ended; raises what `run` would raise where it did not finish."""
    if (run.run_dir / MARKER).is_file():
        result: dict[str, Any] = parse_json((run.run_dir / "result.json").read_text("utf-8"))
        return result
    if not queue.shares_files and (printed := printed_result(run.log)) is not None:
        return printed
    prepare = jobs.get(submitted.prepare) if submitted.prepare else None
    if prepare is not None and prepare.phase != "done":
        raise _failed_prepare(submitted, prepare)
    job, again = jobs.get(run.job), f"`effilaunch submit {run.run_dir} --requeue` resumes the run"
    if job is not None and job.code is None and (code := printed_exit(run.log)) is not None:
        job = replace(job, code=code, failure="")
    if job is None:
        message = f"job {run.job} is no longer known to the scheduler, and its run has not finished"
        raise RunFailed(Problem(f"{submitted.to}-job-gone", message, file=str(run.log), hint=again))
    if job.phase == "cancelled" or job.code in ASKED_TO_STOP:
        raise _stopped(run, job, again)
    if job.failure:
        raise RunFailed(Problem(f"{submitted.to}-ended", job.failure, file=str(run.log), hint=again))
    raise _failed(run, job)


def _failed_prepare(submitted: Submitted, job: QueuedJob) -> EffilaunchError:
    if job.phase == "cancelled":
        return Interrupted(Problem("cancelled", "the job that prepares the data was cancelled"))
    errors = printed_errors(submitted.prepare_log)
    why = errors[-1] if errors else job.failure or f"it ended with exit code {job.code}"
    message = f"the data could not be prepared: {why}"
    kind = _CODES.get(job.code or 0, RunFailed)
    return kind(Problem("prepare-failed", message, file=str(submitted.prepare_log)))


def _stopped(run: SubmittedRun, job: QueuedJob, again: str) -> Interrupted:
    complete, stopped = complete_checkpoints(run.run_dir / "checkpoints"), read_stopped(run.run_dir)
    newest = f"its newest complete checkpoint is {complete[max(complete)].name}" if complete else ""
    how = f"{stopped.signal} stopped the run" if stopped and stopped.signal else "the run was stopped"
    how = "the job was cancelled" if job.phase == "cancelled" else how
    message = f"{how}; {newest or 'it has no checkpoint'}"
    return Interrupted(Problem("interrupted", message, file=str(run.run_dir), hint=again))


def _failed(run: SubmittedRun, job: QueuedJob) -> EffilaunchError:
    errors = printed_errors(run.log)
    kind = _CODES.get(job.code or 0)
    if kind is not None and errors:
        return kind([Problem("job-failed", error) for error in errors])
    failure = run_failure(run.run_dir, job.code or 0, LAUNCHER_LOG)
    problem = replace(failure.problems[0], file=str(run.log))
    if errors:  # `run` itself saw the end, and its message is more complete
        problem = replace(problem, message=errors[-1], file=None, hint=None)
    failure.problems = [problem]
    return failure


def printed_errors(log: Path) -> list[str]:
    """The errors that a job printed since its last start, without those that several nodes repeat."""
    found = [match[1] for line in _last_start(log) if (match := _ERROR.match(line))]
    return list(dict.fromkeys(found))


def printed_result(log: Path) -> dict[str, Any] | None:
    """The result that a job printed since its last start."""
    for line in _last_start(log):
        if line.startswith(RESULT):
            with contextlib.suppress(ValueError):
                result: dict[str, Any] = parse_json(line.removeprefix(RESULT))
                return result
    return None


def printed_exit(log: Path) -> int | None:
    """The exit status that a job printed since its last start."""
    codes = [line.removeprefix(EXIT) for line in _last_start(log) if line.startswith(EXIT)]
    return int(codes[0]) if codes and codes[0].isdecimal() else None


def _last_start(log: Path) -> list[str]:
    """The lines of a log since the last start of the job."""
    try:
        lines = log.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    last = max((number for number, line in enumerate(lines) if line.startswith(START)), default=0)
    return lines[last:]
