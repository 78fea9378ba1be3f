"""How a run that did not finish is told: its first rank's own problems, or the known failure it met."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.errors import EffilaunchError, MachineError, Problem, RecipeError, RunFailed
from launcher.execute.endings import LOST as LOST_RANK
from launcher.execute.endings import (
    hang_problem,
    launcher_problem,
    lost_problem,
    lost_ranks,
    signal_name,
)
from launcher.execute.following import Ended
from launcher.execute.peers import Part
from launcher.execute.supervise import Watch
from launcher.facts.atomic_writes import write_text
from launcher.facts.oom_kills import OomKills, has_killed, read_oom_kills
from launcher.facts.user_files import parse_json
from launcher.knowledge.diagnose.examine import diagnose
from launcher.knowledge.diagnose.findings import Error, Finding
from launcher.knowledge.diagnose.matching import recognise, weight
from launcher.knowledge.diagnose.run_dir import LOST
from launcher.knowledge.failures.catalogue import FAILURES
from launcher.render.bundle import dump_json

DRILLED = ".drilled"
"""In logs/: written by the rank that strikes itself (launcher/train/faults.py)."""
PREPARE_LOG = "prepare.log"
"""In logs/: what the process wrote that prepared the data."""
_PREPARES = "prepare"
"""Stands for the rank in the report of data that could not be prepared, whoever did it."""
PREPARE_FAILED = "prepare-failed"
"""Code of the problem of data that could not be prepared."""
_AGAIN = "the log's last lines say more; run it again, what was prepared before is in the cache"
_HOST_MEMORY = "sigkill-oom"
"""The known failure of a process that was killed for its memory."""
_ENDS_A_PROCESS = tuple(failure for failure in FAILURES if failure.patterns and failure.id != _HOST_MEMORY)
"""Known failures that may be why a rank is gone: none that only shows in the losses."""


class KnownFailure(RunFailed):
    """The workers ended with a failure that the registry knows."""

    def __init__(self, problem: Problem, finding: Finding) -> None:
        super().__init__(problem)
        self.finding = finding


def run_failure(
    run_dir: Path,
    code: int,
    log: str,
    how: str = "",
    *,
    oom: bool | None = None,
    said: Sequence[Mapping[str, Any]] = (),
) -> EffilaunchError:
    """The error to raise for a run that ended with `code` and no marker; `log`: what its launcher wrote.

    how: in words, where more is known than the code. oom: whether the kernel's OOM killer ended a process
    meanwhile, as `has_killed`; without that evidence a SIGKILL is somebody's. said: `Ended.reports`.

    Problems that a worker named itself keep their exit code (RecipeError, MachineError); everything else is
    RunFailed, with the id of the known failure where there is one (KnownFailure, when data was prepared).
    """
    reports = _reports(run_dir, said)
    if (own := _own_problems(reports)) is not None:
        return own
    problem = _reported(run_dir, reports) if reports else _ended(run_dir, code, log, how)
    findings = find_known(run_dir)
    if not (findings or reports):  # nobody wrote anything, but the way that it ended may say enough
        if code == -signal.SIGKILL:
            problem = _of_a_kill(problem, oom)
        failure = recognise((problem.message,), FAILURES)
        if failure is not None and (oom or failure.id != _HOST_MEMORY or code != -signal.SIGKILL):
            findings = [Finding(failure, Error("", problem.message), (), None)]
    if not findings:
        return RunFailed(problem)
    known = _known(problem, findings[0])
    if log == PREPARE_LOG or (reports and reports[0]["rank"] == _PREPARES):
        return RunFailed(known)
    return KnownFailure(known, findings[0])


def supervised_failure(
    run_dir: Path, ended: Ended, before: OomKills, known: Sequence[Finding]
) -> EffilaunchError:
    """The same for the ranks of a run, with what the supervisor saw itself: it names the cause first.

    before: the counters of the OOM killer when the ranks were started. known: for a run that hung, what its
    logs said before it was killed.
    """
    reports = _reports(run_dir, ended.reports)
    if (own := _own_problems(reports)) is not None:
        return own
    if ended.hang is not None:
        problem = hang_problem(run_dir, ended)
        return KnownFailure(_known(problem, known[0]), known[0]) if known else RunFailed(problem)
    watch, has_cause = ended.watch, any(map(_is_cause, reports))
    oom = has_killed(before, read_oom_kills())
    if (first := _first_elsewhere(ended)) and not has_cause:
        host, part = first
        code = part.code or 0
        if code >= 0:
            return run_failure(run_dir, code, part.log or "launcher.log", f"on {host} {part.trouble}")
        return _launcher_lost(launcher_problem(run_dir, code, host, part.log), code, part.oom)
    if watch is not None and watch.lost and (watch.lost_alone or not has_cause):
        failure = _lost(run_dir, ended, watch, oom)
        rank_0 = watch.lost.get(0)
        return _died_preparing(failure) if rank_0 and rank_0.phase == _PREPARES else failure
    if ended.code < 0 and watch is not None and watch.statuses and not reports:
        return _launcher_lost(launcher_problem(run_dir, ended.code), ended.code, oom)
    return run_failure(run_dir, ended.code, "launcher.log", oom=oom, said=ended.reports)


def _first_elsewhere(ended: Ended) -> tuple[str, Part] | None:
    """The machine that was in trouble before any other, where it lost no rank: its launcher ended."""
    hosts = [(host, part) for host, part in ended.elsewhere.items() if part.first and not part.lost]
    return hosts[0] if hosts else None


def failures_while_stopping(run_dir: Path, said: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """What the ranks reported, the earliest first, one sentence each. said: `Ended.reports`."""
    reports = [(report, report.get("rank")) for report in _reports(run_dir, said)]
    return [
        f"{'preparing the data' if rank == _PREPARES else f'rank {rank}'} failed: "
        f"{report.get('type')}: {report.get('message')}"
        for report, rank in reports
    ]


def find_known(run_dir: Path) -> Sequence[Finding]:
    """The known failures that the logs show; none where they cannot be read."""
    try:
        return diagnose([str(run_dir)], FAILURES).findings
    except RecipeError:
        return []


def _launcher_lost(problem: Problem, code: int, oom: bool | None) -> RunFailed:
    return _killed(problem, oom) if oom and code == -signal.SIGKILL else RunFailed(problem)


def _lost(run_dir: Path, ended: Ended, watch: Watch, killed: bool | None) -> EffilaunchError:
    """Ranks that vanished. What the others say then, that they cannot reach them, is no cause.

    killed: whether the kernel's OOM killer ended a process of this machine.
    """
    sentence, code = lost_ranks(run_dir, ended, watch)
    for part in ended.elsewhere.values():
        if part.lost & set(watch.lost):
            killed = part.oom  # the kernel of the machine on which the rank ran
    if code == -signal.SIGKILL and (strike := struck_by_drill(run_dir)):
        killed, sentence = False, f"{sentence}: {strike} did it"
    problem = lost_problem(run_dir, sentence, sorted(watch.lost))
    record = {"message": sentence, "ranks": sorted(watch.lost), "oom": killed}
    with contextlib.suppress(OSError):  # a full disk: `diagnose` then has the logs alone
        write_text(run_dir / "logs" / LOST, dump_json(record))
    if code == -signal.SIGKILL:
        return _killed(problem, killed)
    findings = [found for found in find_known(run_dir) if found.failure in _ENDS_A_PROCESS]
    if findings:  # such as a collective's timeout, at which NCCL aborts the process
        told = _known(problem, findings[0])
        message = f"{told.message.rstrip('.')}; {sentence}"
        return KnownFailure(replace(told, code=findings[0].failure.id, message=message), findings[0])
    return RunFailed(problem)


def _died_preparing(failure: EffilaunchError) -> RunFailed:
    """Rank 0 was lost while it prepared the data: nothing was trained, so no other batch size mends it."""
    problem = failure.problems[0]
    if problem.code != LOST_RANK:
        return RunFailed(problem)
    message = f"{problem.message}: it prepared the data"
    return RunFailed(replace(problem, code=PREPARE_FAILED, message=message, hint=_AGAIN))


def struck_by_drill(run_dir: Path) -> str:
    """The fault on purpose that struck in this try, in words; empty where none did."""
    marker, begun = run_dir / "logs" / DRILLED, run_dir / "environment.json"
    try:
        if marker.stat().st_mtime >= begun.stat().st_mtime:
            return f"the drill's {marker.read_text('utf-8').partition(' ')[0]}"
    except OSError:
        pass
    return ""


def _killed(problem: Problem, oom: bool | None) -> RunFailed:
    """A process that somebody killed; with the known failure where the kernel did, for its memory."""
    problem = _of_a_kill(problem, oom)
    if not oom:
        return RunFailed(problem)
    failure = next(failure for failure in FAILURES if failure.id == _HOST_MEMORY)
    finding = Finding(failure, Error("", problem.message), (), None)
    return KnownFailure(_known(problem, finding), finding)


def _of_a_kill(problem: Problem, oom: bool | None) -> Problem:
    """The problem with what the kernel's counters say of it."""
    said = {
        True: ": the kernel's OOM killer did it",
        None: ": no counter of the kernel tells whether its OOM killer did it",
    }
    return replace(problem, message=problem.message + said.get(oom, ""))


def _is_cause(report: dict[str, Any]) -> bool:
    """Whether what a rank reported may have ended the run: not that another one is gone."""
    return weight(Error(str(report.get("type", "")), str(report.get("message", "")))) == 0


def _own_problems(reports: list[dict[str, Any]]) -> EffilaunchError | None:
    """The problems that the first process named itself, under the exit code that it chose."""
    if not reports or not reports[0].get("problems"):
        return None
    problems = [Problem(**p) for p in reports[0]["problems"]]
    own: dict[int, type[EffilaunchError]] = {
        RecipeError.exit_code: RecipeError,
        MachineError.exit_code: MachineError,
    }
    return own.get(int(reports[0].get("exit_code", 0)), RunFailed)(problems)


def _reports(run_dir: Path, said: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the processes wrote when they ended, or said where they could not, the earliest first."""
    reports = [dict(report) for report in said]
    for path in (run_dir / "logs").glob("error-*.json"):
        try:
            reports.append(parse_json(path.read_text("utf-8")))
        except (OSError, ValueError):
            continue
    return sorted(reports, key=lambda r: (r.get("time", 0), str(r.get("rank", 0))))


def _ended(run_dir: Path, code: int, log: str, told: str = "") -> Problem:
    """The exit code, where no process could write why; told: what is known instead."""
    how = f"by signal {-code} ({signal_name(-code)})" if code < 0 else f"with exit code {code}"
    if told:
        how = f"because {told}"
    elif code == 0:
        how = "without finishing, although its launcher reported success"
    if log == PREPARE_LOG:  # never restarted: a restart takes the data for prepared
        return Problem(
            PREPARE_FAILED,
            f"the run ended {how} while it prepared the data",
            file=str(run_dir / "logs" / log),
            hint=_AGAIN,
        )
    return Problem(
        "run-failed",
        f"the run ended {how}",
        file=str(run_dir / "logs" / log),
        hint="the log's last lines say more",
    )


def _reported(run_dir: Path, reports: list[dict[str, Any]]) -> Problem:
    """The first rank's error, in its own words."""
    first = reports[0]
    if first["rank"] == _PREPARES:
        return Problem(
            PREPARE_FAILED,
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
    return replace(problem, code=failure.id, message=message, file=log, hint=failure.fix)
