"""How a run that did not finish is told: its first rank's own problems, or the known failure it met."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.diagnose.examine import diagnose
from launcher.diagnose.findings import Error, Finding
from launcher.diagnose.matching import recognise
from launcher.errors import EffilaunchError, MachineError, Problem, RecipeError, RunFailed
from launcher.failures import FAILURES

PREPARE_LOG = "prepare.log"
"""In logs/: what the process wrote that prepared the data."""


class KnownFailure(RunFailed):
    """The workers ended with a failure that the registry knows."""

    def __init__(self, problem: Problem, finding: Finding) -> None:
        super().__init__(problem)
        self.finding = finding


def run_failure(run_dir: Path, code: int, log: str) -> EffilaunchError:
    """The error to raise for a run that ended with `code` and no marker; `log`: what its launcher wrote.

    Problems that a worker named itself keep their exit code (RecipeError, MachineError); everything else is
    RunFailed, with the id of the known failure where there is one (KnownFailure, when data was prepared).
    """
    reports = _reports(run_dir)
    if reports and reports[0].get("problems"):
        problems = [Problem(**p) for p in reports[0]["problems"]]
        own: dict[int, type[EffilaunchError]] = {
            RecipeError.exit_code: RecipeError,
            MachineError.exit_code: MachineError,
        }
        kind = own.get(int(reports[0].get("exit_code", 0)), RunFailed)
        return kind(problems)
    problem = _reported(run_dir, reports) if reports else _ended(run_dir, code, log)
    try:
        findings: Sequence[Finding] = diagnose([str(run_dir)], FAILURES).findings
    except RecipeError:  # its logs cannot be read
        findings = []
    if not (findings or reports):  # nobody wrote anything, but the way that it ended may say enough
        failure = recognise((problem.message,), FAILURES)
        findings = [] if failure is None else [Finding(failure, Error("", problem.message), (), None)]
    if not findings:
        return RunFailed(problem)
    known = _known(problem, findings[0])
    return RunFailed(known) if log == PREPARE_LOG else KnownFailure(known, findings[0])


def _reports(run_dir: Path) -> list[dict[str, Any]]:
    """What the processes wrote when they ended, the earliest first."""
    reports = []
    for path in (run_dir / "logs").glob("error-*.json"):
        try:
            reports.append(json.loads(path.read_text("utf-8")))
        except ValueError:
            continue
    return sorted(reports, key=lambda r: (r.get("time", 0), str(r.get("rank", 0))))


def _ended(run_dir: Path, code: int, log: str) -> Problem:
    """The exit code, where no process could write why."""
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    if code == 0:
        how = "without finishing, although its launcher reported success"
    return Problem(
        "run-failed",
        f"the run ended {how}",
        file=str(run_dir / "logs" / log),
        hint="the log's last lines say more",
    )


def _reported(run_dir: Path, reports: list[dict[str, Any]]) -> Problem:
    """The first rank's error, in its own words."""
    first = reports[0]
    if first["rank"] == "prepare":
        return Problem(
            "prepare-failed",
            f"the data could not be prepared: {first['type']}: {first['message']}",
            file=str(run_dir / "logs" / "error-prepare.json"),
            hint="the traceback is in that file",
        )
    return Problem(
        "run-failed",
        f"rank {first['rank']} failed first: {first['type']}: {first['message']}",
        file=str(run_dir / "logs" / f"rank-{first['rank']}.log"),
        hint=f"{len(reports)} of the ranks reported an error; the traceback is in that log",
    )


def _known(problem: Problem, finding: Finding) -> Problem:
    """The problem with the known failure's id, title, cause and mend; the error's own words stay in it."""
    failure = finding.failure
    said = finding.error.headline.partition("\n")[0]
    rank = finding.first_rank
    if rank is not None:
        said = f"rank {rank} failed first: {said}"
    log = problem.file
    if rank is not None and problem.code == "run-failed" and log is not None:
        log = str(Path(log).with_name(f"rank-{rank}.log"))
    message = f"{failure.id}: {failure.title}. {failure.cause.rstrip('.')} ({said})"
    return replace(problem, code=failure.id, message=message, file=log, hint=failure.mend)
