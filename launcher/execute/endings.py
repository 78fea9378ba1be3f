"""How a run ended, as an error: what the supervisor saw, what the ranks reported, the known failure."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.errors import EffilaunchError, Interrupted, MachineError, Problem, RecipeError, RunFailed
from launcher.execute.following import Ended
from launcher.execute.nodes.peers import Part
from launcher.execute.run_dir import last_step, read_stopped
from launcher.execute.signals import STOPPING
from launcher.execute.supervise import STATES, Stack, Watch, describe_lost
from launcher.facts.checkpoint import complete_checkpoints
from launcher.facts.probe import OomKills, has_killed, read_oom_kills
from launcher.facts.rank_status import LEFT_EARLY, RankStatus
from launcher.facts.safe_files import parse_json, write_text
from launcher.knowledge.diagnose.examine import diagnose
from launcher.knowledge.diagnose.findings import Error, Finding
from launcher.knowledge.diagnose.matching import recognise, weight
from launcher.knowledge.diagnose.run_dir import LOST, earlier_bytes, launcher_logs
from launcher.knowledge.failures.catalogue import FAILURES
from launcher.render.bundle import dump_json

RANK_LOST, LAUNCHER_LOST, HANG = "rank-lost", "launcher-lost", "hang"
"""Codes of the problems."""

# torchrun's table of processes and deepspeed's last line; the numbers below 0 are signals.
_OF_A_PID = re.compile(r"exitcode\s*: (-?\d+) \(pid: (\d+)\)")
_OF_ANY = re.compile(r"exits with return code = (-?\d+)")


def was_stopped(run_dir: Path, ended: Ended) -> bool:
    """Whether the ranks were stopped, and saved, by somebody else than this process.

    A scheduler may signal the ranks and their launcher but not `effilaunch run`; such a run must not be
    restarted. Where the launcher was lost in another way, this process has stopped the ranks itself. Before
    the first step they have nothing to save, and leave only their exit code.
    """
    stopped = read_stopped(run_dir)
    if stopped is None and _left_early(run_dir, ended):
        return not ended.asked or -ended.code in STOPPING
    if stopped is None or stopped.get("signal") is None:
        return stopped is not None and ended.code == 0
    return not ended.asked or -ended.code in STOPPING


def _left_early(run_dir: Path, ended: Ended) -> bool:
    """Whether a signal ended ranks before the first step, and no rank failed otherwise.

    A launcher, too, signals the remaining ranks when one has failed.
    """
    watch = ended.watch
    if watch is None or watch.lost or ended.hang is not None:
        return False
    codes = [status.code for status in watch.statuses.values()]
    text = launcher_said(run_dir)
    said = [int(code) for code, _ in _OF_A_PID.findall(text)] + [int(code) for code in _OF_ANY.findall(text)]
    by_signal = {LEFT_EARLY, *(-number for number in STOPPING)}
    return LEFT_EARLY in codes and by_signal.issuperset(said)


def interruption(
    run_dir: Path,
    ended: Ended,
    failed: Sequence[str] = (),
    again: str = "continue it with --resume auto",
) -> Interrupted:
    """The error of a run that a signal stopped.

    failed: errors of ranks that failed while they stopped; again: the hint.
    """
    stopped = read_stopped(run_dir)
    name = ended.stopped_by.name if ended.stopped_by else str((stopped or {}).get("signal", "a signal"))
    message = f"{name}: {_where(run_dir, stopped, ended.killed)}"
    if failed:
        message += f"; while it stopped, {failed[0]}"
    return Interrupted(Problem("interrupted", message, file=str(run_dir), hint=again))


def _where(run_dir: Path, stopped: dict[str, Any] | None, killed: str) -> str:
    if stopped is not None and stopped.get("checkpoint"):
        return f"the run was stopped after step {stopped.get('step')}, with {stopped['checkpoint']}"
    how = f"the run was killed: {killed}" if killed else "the run was stopped"
    whole = complete_checkpoints(run_dir / "checkpoints")
    if whole:
        return f"{how}; its newest complete checkpoint is {whole[max(whole)].name}"
    return f"{how} before its first checkpoint"


def saved_at(run_dir: Path) -> str:
    """Where a run stopped that got no signal from outside; empty without a checkpoint."""
    stopped = read_stopped(run_dir)
    if stopped is None or not stopped.get("checkpoint"):
        return ""
    return f"its ranks stopped after step {stopped.get('step')}, with {stopped['checkpoint']}"


def lost_ranks(run_dir: Path, ended: Ended, watch: Watch) -> tuple[str, int | None]:
    """One sentence on the ranks that vanished, and their exit code: negative for a signal."""
    code = _exit_code(run_dir, ended, watch)
    hosts = {rank: status.host for rank, status in watch.lost.items() if watch.others}
    return describe_lost(watch.lost, ending(code), last_step(run_dir), hosts), code


def ending(code: int | None) -> str:
    """How a process ended, as a verb phrase."""
    if code is None:
        return "was lost"
    return (
        f"was killed by {signal_name(-code)}"
        if code < 0
        else f"ended with exit code {code} without an error message"
    )


def _exit_code(run_dir: Path, ended: Ended, watch: Watch) -> int | None:
    pids = {status.pid for status in watch.lost.values()}
    text = launcher_said(run_dir)
    for code, pid in _OF_A_PID.findall(text):
        if int(pid) in pids:
            return int(code)
    if own := [ended.rank_codes[rank] for rank in watch.lost if rank in ended.rank_codes]:
        return own[0]
    # DeepSpeed reports the rank that it saw first; above 0 that may have failed because another was lost.
    said = [int(code) for code in _OF_ANY.findall(text)]
    if found := [code for code in said if code < 0 or len(watch.statuses) == 1]:
        return found[0]
    if ended.killed or len(watch.statuses) > 1:
        return None
    return ended.code  # of the one rank, which needs no launcher


def launcher_said(run_dir: Path) -> str:
    """The output of the launchers of all nodes and of rank 0 in the last attempt."""
    said, earlier = [], earlier_bytes(run_dir)
    for log in launcher_logs(run_dir):
        try:
            with log.open("rb") as stream:
                stream.seek(earlier.get(log.name, 0))
                said.append(stream.read().decode("utf-8", "replace"))
        except OSError:
            continue
    return "\n".join(said)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def lost_problem(run_dir: Path, message: str, ranks: Sequence[int]) -> Problem:
    """The problem of a lost rank without a known cause."""
    return Problem(
        RANK_LOST,
        message,
        file=str(run_dir / "logs" / f"rank-{ranks[0]}.log"),
        hint="somebody or the scheduler ended that process; `--resume auto` continues from the last "
        "checkpoint, launch.max_restarts does so automatically",
    )


def launcher_problem(run_dir: Path, code: int, host: str = "", log: str = "launcher.log") -> Problem:
    """The problem of a launcher that was killed while its ranks lived. host, log: on another node."""
    message = f"the launcher {f'on {host} ' if host else ''}{ending(code)}"
    if saved := saved_at(run_dir):
        message += f"; {saved}"
    hint = "continue it with --resume auto"
    return Problem(LAUNCHER_LOST, message, file=str(run_dir / "logs" / log), hint=hint)


def hang_problem(run_dir: Path, ended: Ended) -> Problem:
    """The problem of a run without progress: which ranks are behind, and what every rank executes."""
    hang = ended.hang
    assert hang is not None, "asked for a run that hung"
    if not hang.statuses:
        return Problem(
            HANG,
            f"no rank had started after {hang.seconds:.0f} s (limit {hang.limit:.0f} s)",
            file=str(run_dir / "logs" / "launcher.log"),
            hint="the launcher never started them; the last lines of the log may show what it waits for",
        )
    step = max(status.step for status in hang.statuses.values())
    stopped = [rank for rank, stack in sorted(ended.stacks.items()) if stack.is_stopped]
    behind = stopped or hang.behind
    if not behind:  # all are in the same step: the ranks that do not wait for another one are the cause
        busy = [rank for rank, stack in sorted(ended.stacks.items()) if stack.frames and not stack.waits]
        behind = busy if len(busy) < len(hang.statuses) else []
    others = [rank for rank in sorted(hang.statuses) if rank not in behind]
    where = [
        _standing(hang.statuses[rank], ended.stacks[rank], is_behind=rank in behind)
        for rank in [*behind, *others][:_NAMED]
        if rank in ended.stacks
    ]
    message = f"no progress for {hang.seconds:.0f} s after step {step} (limit {hang.limit:.0f} s)"
    if len(hang.statuses) > _NAMED:
        where.append(f"{len(hang.statuses) - _NAMED} more ranks are in their logs")
    first = (behind or others)[0]
    return Problem(
        HANG,
        "; ".join([message, *where]),
        file=str(run_dir / "logs" / f"rank-{first}.log"),
        hint="every rank's calls are in its log; launch.hang_factor sets the limit",
    )


def _standing(status: RankStatus, stack: Stack, *, is_behind: bool) -> str:
    """What one rank of a run without progress executes."""
    if not stack.frames and stack.state in STATES:
        return f"rank {status.rank} (pid {status.pid}) {STATES[stack.state]}, after step {status.step}"
    if is_behind:
        return f"rank {status.rank} is behind, after step {status.step}, in {stack}"
    return f"rank {status.rank} is in {stack}"


_NAMED = 4
"""Ranks that a message names; the others are in the logs."""


DRILLED = ".drilled"
"""In logs/: written by a rank into which a drill injects a fault (launcher/train/faults.py)."""
PREPARE_LOG = "prepare.log"
"""In logs/: output of the process that prepares the data."""
_PREPARES = "prepare"
"""In place of the rank in the error report of a data preparation."""
PREPARE_FAILED = "prepare-failed"
"""Code of the problem of data that could not be prepared."""
_AGAIN = "see the last lines of the log; run it again: what was prepared before is in the cache"
_HOST_MEMORY = "sigkill-oom"
"""The known failure of a process that was killed for its memory."""
_ENDS_A_PROCESS = tuple(failure for failure in FAILURES if failure.patterns and failure.id != _HOST_MEMORY)
"""Known failures that may end a process; not those that only show in the losses."""


class KnownFailure(RunFailed):
    """A run that failed with a known failure."""

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
    """The error of a run that ended with `code` and without the marker; `log`: output of its launcher.

    how: a clause, where more is known than the code. oom: whether the kernel's OOM killer killed a process
    meanwhile, as `has_killed`. said: `Ended.reports`.

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
    """The error of a run whose ranks were supervised; what the supervisor saw comes first.

    before: the counters of the OOM killer when the ranks were started. known: for a run that hung, the
    findings in its logs before it was killed.
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
    """The node that failed before any other, where its launcher ended and no rank was lost."""
    hosts = [(host, part) for host, part in ended.elsewhere.items() if part.first and not part.lost]
    return hosts[0] if hosts else None


def failures_while_stopping(run_dir: Path, said: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """The errors that the ranks reported, the earliest first. said: `Ended.reports`."""
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
    """The error of ranks that vanished. That the others cannot reach them is no cause.

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
    """Rank 0 was lost while it prepared the data: nothing was trained, so no other batch size helps."""
    problem = failure.problems[0]
    if problem.code != RANK_LOST:
        return RunFailed(problem)
    message = f"{problem.message}: it prepared the data"
    return RunFailed(replace(problem, code=PREPARE_FAILED, message=message, hint=_AGAIN))


def struck_by_drill(run_dir: Path) -> str:
    """The fault that a drill injected in this attempt; empty without one."""
    marker, begun = run_dir / "logs" / DRILLED, run_dir / "environment.json"
    try:
        if marker.stat().st_mtime >= begun.stat().st_mtime:
            return f"the drill's {marker.read_text('utf-8').partition(' ')[0]}"
    except OSError:
        pass
    return ""


def _killed(problem: Problem, oom: bool | None) -> RunFailed:
    """The error of a killed process; a known failure where the kernel killed it for its memory."""
    problem = _of_a_kill(problem, oom)
    if not oom:
        return RunFailed(problem)
    failure = next(failure for failure in FAILURES if failure.id == _HOST_MEMORY)
    finding = Finding(failure, Error("", problem.message), (), None)
    return KnownFailure(_known(problem, finding), finding)


def _of_a_kill(problem: Problem, oom: bool | None) -> Problem:
    """The problem with what the kernel's counters tell of the kill."""
    said = {
        True: ": the kernel's OOM killer did it",
        None: ": whether the OOM killer did it is unknown, since no counter of the kernel is readable",
    }
    return replace(problem, message=problem.message + said.get(oom, ""))


def _is_cause(report: dict[str, Any]) -> bool:
    """Whether a reported error may have ended the run: not that another rank is gone."""
    return weight(Error(str(report.get("type", "")), str(report.get("message", "")))) == 0


def _own_problems(reports: list[dict[str, Any]]) -> EffilaunchError | None:
    """The problems that the first failing process reported, as an error of its exit status."""
    if not reports or not reports[0].get("problems"):
        return None
    problems = [Problem(**p) for p in reports[0]["problems"]]
    own: dict[int, type[EffilaunchError]] = {
        RecipeError.exit_code: RecipeError,
        MachineError.exit_code: MachineError,
    }
    return own.get(int(reports[0].get("exit_code", 0)), RunFailed)(problems)


def _reports(run_dir: Path, said: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The error reports of the processes, from files and from their output, the earliest first."""
    reports = [dict(report) for report in said]
    for path in (run_dir / "logs").glob("error-*.json"):
        try:
            reports.append(parse_json(path.read_text("utf-8")))
        except (OSError, ValueError):
            continue
    return sorted(reports, key=lambda r: (r.get("time", 0), str(r.get("rank", 0))))


def _ended(run_dir: Path, code: int, log: str, told: str = "") -> Problem:
    """The problem of a run without error reports; told: what is known besides the code."""
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
        hint="see the last lines of the log",
    )


def _reported(run_dir: Path, reports: list[dict[str, Any]]) -> Problem:
    """The problem that the first failing rank reported."""
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
    """The problem with the known failure's id, title, cause and fix; the original error stays in the
    message."""
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
