"""`submit --follow` and `--cancel`: what became of jobs that were submitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import EffilaunchError, Interrupted, MachineError, Problem, RunFailed
from launcher.execute.queued import follow, in_words, judge
from launcher.execute.record import total_seconds
from launcher.execute.submit import Run, Submitted, cancel, read_submitted
from launcher.facts.queue import Job, read_jobs
from launcher.facts.user_files import read_jsonl
from launcher.report.outcome import Outcome
from launcher.report.submit_text import cancelled_text, sweep_text
from launcher.report.text import result_text

Say = Callable[[str], None]


def follow_command(folder: str, say: Say) -> Outcome:
    """Follow what was submitted from a run directory, or a sweep's, to its end."""
    return follow_submitted(read_submitted(Path(folder).absolute()), say)


def cancel_command(folder: str) -> Outcome:
    """Take the jobs out of the queue, or end them: they are not requeued. Of one run of a sweep its own."""
    submitted = read_submitted(Path(folder).absolute())
    cancel(submitted)
    try:
        states = {number: job.state for number, job in read_jobs(submitted.jobs).items()}
    except MachineError:  # it took the order, and has no time for more
        states = {}
    return Outcome({**submitted.to_json(), "states": states}, cancelled_text(submitted))


def follow_submitted(submitted: Submitted, say: Say) -> Outcome:
    """Follow to the end; the result of the run, or the table of the sweep. Raises as `run` does."""
    try:
        jobs = follow(submitted, say)
    except KeyboardInterrupt:
        raise Interrupted(_goes_on(submitted)) from None
    if submitted.is_sweep:
        return _sweep(submitted, jobs)
    (run,) = submitted.runs
    result = judge(submitted, run, jobs)
    data = {"run_dir": str(run.run_dir), **submitted.to_json(), "result": result}
    return Outcome(data, result_text(result, str(run.run_dir), []))


def _goes_on(submitted: Submitted) -> Problem:
    return Problem(
        "interrupted",
        f"nobody follows job {submitted.job} any more; it goes on",
        hint=f"`effilaunch submit {submitted.place} --follow` follows it again, `--cancel` ends it",
    )


def _sweep(submitted: Submitted, jobs: Mapping[str, Job | None]) -> Outcome:
    """A row for each run, and what became of those that did not finish."""
    rows: list[dict[str, Any]] = []
    problems: list[Problem] = []
    for run in submitted.runs:
        row, problem = _row(submitted, run, jobs)
        rows.append(row)
        if problem is not None:
            problems.append(problem)
    code = RunFailed.exit_code if problems else 0
    return Outcome({**submitted.to_json(), "table": rows}, sweep_text(submitted, rows), problems, code)


def _row(
    submitted: Submitted, run: Run, jobs: Mapping[str, Job | None]
) -> tuple[dict[str, Any], Problem | None]:
    metrics = read_jsonl(run.run_dir / "metrics.jsonl")
    row: dict[str, Any] = {
        "run_dir": str(run.run_dir),
        "job": run.job,
        "values": dict(run.values),
        "state": "done",
        "loss": _last(metrics, "loss"),
        "eval_loss": _last(metrics, "eval_loss"),
        "seconds": None,
    }
    try:
        result = judge(submitted, run, jobs)
    except EffilaunchError as error:
        job = jobs.get(run.job)
        row["state"] = "gone" if job is None else in_words(job)
        problem = error.problems[0]
        return row, Problem(
            problem.code, f"run {run.run_dir.name}: {problem.message}", problem.file, hint=problem.hint
        )
    row |= {"loss": result["loss"]["last"], "seconds": total_seconds(result) or result["seconds"]}
    row["eval_loss"] = (result.get("eval") or {}).get("eval_loss", row["eval_loss"])
    return row, None


def _last(rows: list[dict[str, Any]], name: str) -> float | None:
    found = [row[name] for row in rows if isinstance(row.get(name), (int, float))]
    return float(found[-1]) if found else None
