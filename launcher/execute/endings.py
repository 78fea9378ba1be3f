"""How a run ended, as an error: what the supervisor saw, what the ranks reported, the known failure."""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.errors import EffilaunchError, Interrupted, MachineError, Problem, RecipeError, RunFailed
from launcher.execute.following import Ended
from launcher.execute.output import Report, read_reports
from launcher.execute.run_dir import Stopped, last_step, read_stopped
from launcher.execute.signals import STOPPING
from launcher.execute.supervise import STATES, CallStack, Watch, describe_lost
from launcher.files.checkpoint import complete_checkpoints
from launcher.files.rank_status import LEFT_EARLY, PUSH_FAILED, PUSHING, RankStatus, fatal_log
from launcher.files.safe_files import write_text
from launcher.knowledge.diagnose.examine import diagnose
from launcher.knowledge.diagnose.findings import Error, Finding
from launcher.knowledge.diagnose.matching import recognise, weight
from launcher.knowledge.diagnose.run_dir import LOST, earlier_bytes, launcher_logs
from launcher.knowledge.failures.catalogue import FAILURES
from launcher.machine.probe import OomKills, has_killed, read_oom_kills
from launcher.render.bundle import dump_json

RANK_LOST, LAUNCHER_LOST, HANG, PREPARE_FAILED = "rank-lost", "launcher-lost", "hang", "prepare-failed"
"""Codes of the problems."""
DRILLED = ".drilled"
"""In logs/: written by a rank into which a drill injects a fault (launcher/train/faults.py)."""
LAUNCHER_LOG, PREPARE_LOG = "launcher.log", "prepare.log"
"""In logs/: output of the launcher, and of the process that prepares the data."""
_PREPARES = "prepare"
"""In place of the rank in the report of a data preparation; phase of a rank that prepares."""
_AGAIN = "see the last lines of the log; run it again: what was prepared before is in the cache"
_HOST_MEMORY = "sigkill-oom"
"""The known failure of a process that was killed for its memory."""
_ENDS_A_PROCESS = tuple(failure for failure in FAILURES if failure.patterns and failure.id != _HOST_MEMORY)
"""Known failures that may end a process; not those that only show in the losses."""
_NAMED = 4
"""Ranks that a message names; the others are in the logs."""
# torchrun's table of processes and deepspeed's last line; the numbers below 0 are signals.
_OF_A_PID = re.compile(r"exitcode\s*: (-?\d+) \(pid: (\d+)\)")
_OF_ANY = re.compile(r"exits with return code = (-?\d+)")


class KnownFailure(RunFailed):
    """A run that failed with a known failure."""

    def __init__(self, problem: Problem, finding: Finding) -> None:
        super().__init__(problem)
        self.finding = finding


class ProgramFailed(RunFailed):
    """A run that failed of its own code, such as a misspelt name in hooks.py: the next attempt would, too."""


OF_A_PROGRAM = (
    "AttributeError", "ImportError", "IndentationError", "ModuleNotFoundError", "NameError",
    "NotImplementedError", "SyntaxError", "TypeError", "UnboundLocalError",
)  # fmt: skip
"""Exceptions that no machine and no network causes."""


# Stopped by a signal.


def was_stopped(run_dir: Path, ended: Ended) -> bool:
    """Whether the ranks were stopped, and saved, by somebody else than this process.

    A scheduler may signal the ranks and their launcher but not `effilaunch run`; such a run must not be
    restarted. Where the launcher was lost in another way, this process has stopped the ranks itself. Before
    the first step they have nothing to save, and leave only their exit code.
    """
    stopped = read_stopped(run_dir)
    if _left_early(run_dir, ended) if stopped is None else stopped.signal is not None:
        return not ended.asked or -ended.code in STOPPING
    return stopped is not None and ended.code == 0


def _left_early(run_dir: Path, ended: Ended) -> bool:
    """Whether a signal ended ranks before the first step, and no rank failed otherwise.

    A launcher, too, signals the remaining ranks when one has failed.
    """
    watch = ended.watch
    if watch is None or watch.lost or ended.hang is not None:
        return False
    output = _launcher_output(run_dir)
    codes = [code for code, _ in _OF_A_PID.findall(output)] + _OF_ANY.findall(output)
    by_signal = {LEFT_EARLY, *(-number for number in STOPPING)}
    left_early = any(status.code == LEFT_EARLY for status in watch.statuses.values())
    return left_early and by_signal.issuperset(map(int, codes))


def interruption(
    run_dir: Path,
    ended: Ended,
    failed: Sequence[str] = (),
    again: str = "continue it with --resume auto",
) -> Interrupted:
    """The error of a run that a signal stopped.

    failed: errors of ranks that failed while they stopped; again: the hint.
    """
    stopped = read_stopped(run_dir) or Stopped()
    name = ended.stopped_by.name if ended.stopped_by else stopped.signal or "a signal"
    if stopped.checkpoint:
        message = f"the run was stopped after step {stopped.step}, with {stopped.checkpoint}"
    else:
        how = f"the run was killed: {ended.killed}" if ended.killed else "the run was stopped"
        complete = complete_checkpoints(run_dir / "checkpoints")
        newest = f"; its newest complete checkpoint is {complete[max(complete)].name}" if complete else ""
        message = how + (newest or " before its first checkpoint")
    during = f"; while it stopped, {failed[0]}" if failed else ""
    return Interrupted(Problem("interrupted", f"{name}: {message}{during}", file=str(run_dir), hint=again))


def saved_at(run_dir: Path) -> str:
    """Where a run stopped that got no signal from outside; empty without a checkpoint."""
    stopped = read_stopped(run_dir)
    if stopped is None or not stopped.checkpoint:
        return ""
    return f"its ranks stopped after step {stopped.step}, with {stopped.checkpoint}"


def failures_while_stopping(run_dir: Path, reported: Sequence[Report] = ()) -> list[str]:
    """The errors that the ranks reported, the earliest first. reported: `Ended.reports`."""
    return [
        f"{'preparing the data' if one.rank == _PREPARES else f'rank {one.rank}'} failed: {one.error}"
        for one in _reports(run_dir, reported)
    ]


# Failed.


def push_failure(run_dir: Path, reported: Sequence[Report] = ()) -> EffilaunchError | None:
    """The error of a finished run whose result was not pushed to the hub; None for others."""
    failed = _own_problems(_reports(run_dir, reported))
    if failed is not None and failed.problems[0].code == PUSH_FAILED:
        return failed
    if not (run_dir / PUSHING).is_dir():
        return None
    kinds = ("adapter", "model")
    places = [*(run_dir / PUSHING / f"{kind}-weights" for kind in kinds), *(run_dir / kind for kind in kinds)]
    folder = next((place for place in places if place.is_dir()), run_dir)
    message = "the run has finished, but was ended before its result was on the hub"
    hint = f"`hf upload OWNER/NAME {shlex.quote(str(folder))} .` pushes it"
    return RunFailed(Problem(PUSH_FAILED, message, str(run_dir), path="trainer.push_to_hub", hint=hint))


def run_failure(
    run_dir: Path,
    code: int,
    log: str,
    how: str = "",
    *,
    oom: bool | None = None,
    reported: Sequence[Report] = (),
) -> EffilaunchError:
    """The error of a run that ended with `code` and without the marker; `log`: output of its launcher.

    how: a clause, where more is known than the code. oom: whether the kernel's OOM killer killed a process
    meanwhile, as `has_killed`. reported: `Ended.reports`.

    Problems that a worker named itself keep their exit code (RecipeError, MachineError); everything else is
    RunFailed, with the id of the known failure where there is one (KnownFailure, when data was prepared).
    """
    reports = _reports(run_dir, reported)
    if (own := _own_problems(reports)) is not None:
        return own
    problem = _reported(run_dir, reports) if reports else _unreported(run_dir, code, log, how)
    findings = find_known(run_dir)
    if not (findings or reports):  # nobody wrote anything, but the way that it ended may be enough
        if code == -signal.SIGKILL:
            problem = _of_a_kill(problem, oom)
        failure = recognise((problem.message,), FAILURES)
        if failure is not None and (oom or failure.id != _HOST_MEMORY or code != -signal.SIGKILL):
            findings = [Finding(failure, Error("", problem.message), (), None)]
    if not findings:
        return (ProgramFailed if reports and reports[0].type in OF_A_PROGRAM else RunFailed)(problem)
    known = _known(problem, findings[0])
    if log == PREPARE_LOG or (reports and reports[0].rank == _PREPARES):
        return RunFailed(known.problems)
    return known


def supervised_failure(
    run_dir: Path, ended: Ended, before: OomKills, known: Sequence[Finding]
) -> EffilaunchError:
    """The error of a run whose ranks were supervised; what the supervisor saw comes first.

    before: the counters of the OOM killer when the ranks were started. known: for a run that hung, the
    findings in its logs before it was killed.
    """
    reports, watch = _reports(run_dir, ended.reports), ended.watch
    if (own := _own_problems(reports)) is not None:
        return own
    if ended.hang is not None:
        problem = hang_problem(run_dir, ended)
        return _known(problem, known[0]) if known else RunFailed(problem)
    # That another rank is gone is no cause.
    has_cause = any(weight(Error(report.type, report.message)) == 0 for report in reports)
    oom = has_killed(before, read_oom_kills())
    # The node that failed before any other, where its launcher ended and no rank was lost.
    first = [(host, part) for host, part in ended.elsewhere.items() if part.first and not part.lost]
    if first and not has_cause:
        host, part = first[0]
        if (part.code or 0) >= 0:
            return run_failure(run_dir, part.code or 0, part.log or LAUNCHER_LOG, f"on {host} {part.trouble}")
        return _launcher_lost(run_dir, part.code or 0, part.oom, f"on {host} ", part.log)
    if watch is not None and watch.lost and (watch.lost_alone or not has_cause):
        return _ranks_lost(run_dir, ended, watch, oom)
    if ended.code < 0 and watch is not None and watch.statuses and not reports:
        return _launcher_lost(run_dir, ended.code, oom)
    return run_failure(run_dir, ended.code, LAUNCHER_LOG, oom=oom, reported=ended.reports)


def find_known(run_dir: Path) -> Sequence[Finding]:
    """The known failures that the logs show; none where they cannot be read."""
    try:
        return diagnose([str(run_dir)], FAILURES).findings
    except RecipeError:
        return []


def _reports(run_dir: Path, reported: Sequence[Report]) -> list[Report]:
    """The error reports of the processes, from their output and from files, the earliest first."""
    reports = [*reported, *read_reports(run_dir / "logs")]
    return sorted(reports, key=lambda report: (report.time, str(report.rank)))


def _own_problems(reports: Sequence[Report]) -> EffilaunchError | None:
    """The problems that the first failing process reported, as an error of its exit status."""
    if not reports or not reports[0].problems:
        return None
    kinds: tuple[type[EffilaunchError], ...] = (RecipeError, MachineError)
    own = next((kind for kind in kinds if kind.exit_code == reports[0].exit_code), RunFailed)
    return own(reports[0].problems)


def _reported(run_dir: Path, reports: Sequence[Report]) -> Problem:
    """The problem that the first failing rank reported."""
    first, logs = reports[0], run_dir / "logs"
    if first.rank == _PREPARES:
        message, file = f"the data could not be prepared: {first.error}", str(logs / "error-prepare.json")
        return Problem(PREPARE_FAILED, message, file=file, hint="the traceback is in that file")
    message = f"rank {first.rank} failed first: {first.error}"
    hint = f"{len(reports)} of the ranks reported an error; the traceback is in that log"
    return Problem("run-failed", message, file=str(logs / f"rank-{first.rank}.log"), hint=hint)


def _unreported(run_dir: Path, code: int, log: str, how: str) -> Problem:
    """The problem of a run without error reports; how: what is known besides the code."""
    if how:
        how = f"because {how}"
    elif code == 0:
        how = "without finishing, although its launcher reported success"
    else:
        how = f"by signal {-code} ({_signal_name(-code)})" if code < 0 else f"with exit code {code}"
    file = str(run_dir / "logs" / log)
    if log == PREPARE_LOG:  # never restarted: a restart takes the data for prepared
        message = f"the run ended {how} while it prepared the data"
        return Problem(PREPARE_FAILED, message, file=file, hint=_AGAIN)
    return Problem("run-failed", f"the run ended {how}", file=file, hint="see the last lines of the log")


def _known(problem: Problem, finding: Finding) -> KnownFailure:
    """The known failure with its id, title, cause and fix; the original error stays in the message."""
    failure, rank, log = finding.failure, finding.first_rank, problem.file
    error = finding.error.headline.partition("\n")[0]
    if rank is not None:
        error = f"rank {rank} failed first: {error}"
        if problem.code == "run-failed" and log is not None:
            log = str(Path(log).with_name(f"rank-{rank}.log"))
    message = f"{failure.id}: {failure.title}. {failure.cause.rstrip('.')} ({error})"
    return KnownFailure(
        replace(problem, code=failure.id, message=message, file=log, hint=finding.fix), finding
    )


# Killed: a rank or its launcher vanished.


def _launcher_lost(
    run_dir: Path, code: int, oom: bool | None, host: str = "", log: str = LAUNCHER_LOG
) -> RunFailed:
    """A launcher that was killed while its ranks lived. host, log: on another node."""
    message = f"the launcher {host}{_ending(code)}"
    if saved := saved_at(run_dir):
        message += f"; {saved}"
    hint = "continue it with --resume auto"
    problem = Problem(LAUNCHER_LOST, message, file=str(run_dir / "logs" / log), hint=hint)
    return _killed(problem, oom) if oom and code == -signal.SIGKILL else RunFailed(problem)


def _ranks_lost(run_dir: Path, ended: Ended, watch: Watch, oom: bool | None) -> RunFailed:
    """The error of ranks that vanished. oom: whether the OOM killer ended a process of this machine."""
    code = _exit_code(run_dir, ended, watch)
    hosts = {rank: status.host for rank, status in watch.lost.items() if watch.elsewhere}
    sentence = describe_lost(watch.lost, _ending(code), last_step(run_dir), hosts)
    for part in ended.elsewhere.values():
        if part.lost & set(watch.lost):
            oom = part.oom  # the kernel of the machine on which the rank ran
    if code == -signal.SIGKILL and (fault := _drilled(run_dir)):
        oom, sentence = False, f"{sentence}: {fault} did it"
    ranks = sorted(watch.lost)
    problem = lost_problem(run_dir, sentence, ranks)
    with contextlib.suppress(OSError):  # a full disk: `diagnose` then has the logs alone
        record: Mapping[str, Any] = {"message": sentence, "ranks": ranks, "oom": oom}
        write_text(run_dir / "logs" / LOST, dump_json(record))
    failure = RunFailed(problem)
    if code == -signal.SIGKILL:
        failure = _killed(problem, oom)
    elif findings := [found for found in find_known(run_dir) if found.failure in _ENDS_A_PROCESS]:
        # such as a collective's timeout, at which NCCL aborts the process
        known = _known(problem, findings[0]).problems[0]
        message = f"{known.message.rstrip('.')}; {sentence}"
        failure = KnownFailure(replace(known, message=message), findings[0])
    rank_0 = watch.lost.get(0)
    if rank_0 is None or rank_0.phase != _PREPARES:
        return failure
    problem = failure.problems[0]  # nothing was trained, so no other batch size helps
    if problem.code == RANK_LOST:
        message = f"{problem.message}: it prepared the data"
        problem = replace(problem, code=PREPARE_FAILED, message=message, hint=_AGAIN)
    return RunFailed(problem)


def lost_problem(run_dir: Path, message: str, ranks: Sequence[int]) -> Problem:
    """The problem of a lost rank without a known cause."""
    hint = (
        "somebody or the scheduler ended that process; `--resume auto` continues from the last checkpoint, "
        "launch.max_restarts does so automatically"
    )
    calls, log = fatal_log(run_dir, ranks[0]), run_dir / "logs" / f"rank-{ranks[0]}.log"
    has_calls = calls.is_file() and calls.stat().st_size > 0
    return Problem(RANK_LOST, message, file=str(calls if has_calls else log), hint=hint)


def _exit_code(run_dir: Path, ended: Ended, watch: Watch) -> int | None:
    """The exit code of the lost ranks, negative for a signal; None where it is unknown."""
    pids = {status.pid for status in watch.lost.values()}
    output = _launcher_output(run_dir)
    for code, pid in _OF_A_PID.findall(output):
        if int(pid) in pids:
            return int(code)
    # DeepSpeed reports the rank that it saw first; above 0 that may have failed because another was lost.
    codes = map(int, _OF_ANY.findall(output))
    if found := [code for code in codes if code < 0 or len(watch.statuses) == 1]:
        return found[0]
    if ended.killed or len(watch.statuses) > 1:
        return None
    return ended.code  # of the one rank, which needs no launcher


def killed_pids(run_dir: Path) -> set[int]:
    """The processes that a signal ended, as their launcher reports in the last attempt."""
    return {int(pid) for code, pid in _OF_A_PID.findall(_launcher_output(run_dir)) if int(code) < 0}


def _launcher_output(run_dir: Path) -> str:
    """The output of the launchers of all nodes and of rank 0 in the last attempt."""
    parts, earlier = [], earlier_bytes(run_dir)
    for log in launcher_logs(run_dir):
        with contextlib.suppress(OSError), log.open("rb") as stream:
            stream.seek(earlier.get(log.name, 0))
            parts.append(stream.read().decode("utf-8", "replace"))
    return "\n".join(parts)


def _ending(code: int | None) -> str:
    """How a process ended, as a verb phrase."""
    if code is None:
        return "was lost"
    if code < 0:
        return f"was killed by {_signal_name(-code)}"
    return f"ended with exit code {code} without an error message"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _drilled(run_dir: Path) -> str:
    """The fault that a drill injected in this attempt; empty without one."""
    marker, begun = run_dir / "logs" / DRILLED, run_dir / "environment.json"
    with contextlib.suppress(OSError):
        if marker.stat().st_mtime >= begun.stat().st_mtime:
            return f"the drill's {marker.read_text('utf-8').partition(' ')[0]}"
    return ""


def _killed(problem: Problem, oom: bool | None) -> RunFailed:
    """The error of a killed process; a known failure where the kernel killed it for its memory."""
    problem = _of_a_kill(problem, oom)
    if not oom:
        return RunFailed(problem)
    failure = next(failure for failure in FAILURES if failure.id == _HOST_MEMORY)
    return _known(problem, Finding(failure, Error("", problem.message), (), None))


def _of_a_kill(problem: Problem, oom: bool | None) -> Problem:
    """The problem with what the kernel's counters show of the kill."""
    cause = {
        True: ": the kernel's OOM killer did it",
        False: "",
        None: ": whether the OOM killer did it is unknown, since no counter of the kernel is readable",
    }
    return replace(problem, message=problem.message + cause[oom])


# Without progress.


def hang_problem(run_dir: Path, ended: Ended) -> Problem:
    """The problem of a run without progress: which ranks are behind, and what every rank executes."""
    hang, logs = ended.hang, run_dir / "logs"
    assert hang is not None, "asked for a run that hung"
    if not hang.statuses:
        message = f"no rank had started after {hang.seconds:.0f} s (limit {hang.limit:.0f} s)"
        hint = "the launcher never started them; the last lines of the log may show what it waits for"
        return Problem(HANG, message, file=str(logs / LAUNCHER_LOG), hint=hint)
    step = max(status.step for status in hang.statuses.values())
    stopped = [rank for rank, stack in sorted(ended.stacks.items()) if stack.is_stopped]
    behind = stopped or hang.behind
    if not behind:  # all are in the same step: the ranks that do not wait for another one are the cause
        busy = [rank for rank, stack in sorted(ended.stacks.items()) if stack.frames and not stack.waits]
        behind = busy if len(busy) < len(hang.statuses) else []
    others = [rank for rank in sorted(hang.statuses) if rank not in behind]
    parts = [f"no progress for {hang.seconds:.0f} s after step {step} (limit {hang.limit:.0f} s)"]
    parts += [
        _position(hang.statuses[rank], ended.stacks[rank], is_behind=rank in behind)
        for rank in [*behind, *others][:_NAMED]
        if rank in ended.stacks
    ]
    if len(hang.statuses) > _NAMED:
        parts.append(f"{len(hang.statuses) - _NAMED} more ranks are in their logs")
    hint = "every rank's calls are in its log; launch.hang_factor sets the limit"
    file = str(logs / f"rank-{(behind or others)[0]}.log")
    return Problem(HANG, "; ".join(parts), file=file, hint=hint)


def _position(status: RankStatus, stack: CallStack, *, is_behind: bool) -> str:
    """What one rank of a run without progress executes."""
    if not stack.frames and stack.state in STATES:
        return f"rank {status.rank} (pid {status.pid}) {STATES[stack.state]}, after step {status.step}"
    if is_behind:
        return f"rank {status.rank} is behind, after step {status.step}, in {stack}"
    return f"rank {status.rank} is in {stack}"
