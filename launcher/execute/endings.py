"""What the supervisor itself saw of a run's end: a lost rank, a hang, a launcher that died, a stop."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.errors import Interrupted, Problem
from launcher.execute.adapted import last_step
from launcher.execute.following import Ended
from launcher.execute.signals import STOPPING
from launcher.execute.stacks import STATES, Stack
from launcher.execute.supervise import Watch, describe_lost
from launcher.facts.checkpoint import complete_checkpoints
from launcher.facts.status import LEFT_EARLY, RankStatus
from launcher.facts.user_files import parse_json
from launcher.knowledge.diagnose.run_dir import earlier_bytes, launcher_logs

LOST, LAUNCHER_LOST, HANG = "rank-lost", "launcher-lost", "hang"
"""Codes of the problems."""
STOPPED = "stopped.json"
"""Written by rank 0 when a signal ended the run with a checkpoint."""

# torchrun's table of processes and deepspeed's last line; the numbers below 0 are signals.
_OF_A_PID = re.compile(r"exitcode\s*: (-?\d+) \(pid: (\d+)\)")
_OF_ANY = re.compile(r"exits with return code = (-?\d+)")


def read_stopped(run_dir: Path) -> dict[str, Any] | None:
    """What rank 0 wrote when it stopped; None where nothing stopped this run."""
    try:
        found = parse_json((run_dir / STOPPED).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def was_stopped(run_dir: Path, ended: Ended) -> bool:
    """Whether somebody else than this process stopped the ranks, which saved and left.

    So does a scheduler that signals them and their launcher but not `effilaunch run`: what it ends must not
    be started again. Where the launcher was lost by other means, this process has told the ranks itself.
    Before the first step they have nothing to save, and leave no word but their exit code.
    """
    stopped = read_stopped(run_dir)
    if stopped is None and _left_early(run_dir, ended):
        return not ended.asked or -ended.code in STOPPING
    if stopped is None or stopped.get("signal") is None:
        return stopped is not None and ended.code == 0
    return not ended.asked or -ended.code in STOPPING


def _left_early(run_dir: Path, ended: Ended) -> bool:
    """Whether a signal ended ranks before the first step, and no rank failed otherwise.

    A launcher sends one, too, to those that are left when it sees another fail.
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

    failed: what ranks said that failed while they stopped; again: what the user may do next.
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
        return f"{how}; its newest whole checkpoint is {whole[max(whole)].name}"
    return f"{how} before its first checkpoint"


def saved_at(run_dir: Path) -> str:
    """Of a run that was ended without a signal from outside: what it stopped with, in words."""
    stopped = read_stopped(run_dir)
    if stopped is None or not stopped.get("checkpoint"):
        return ""
    return f"its ranks stopped after step {stopped.get('step')}, with {stopped['checkpoint']}"


def lost_ranks(run_dir: Path, ended: Ended, watch: Watch) -> tuple[str, int | None]:
    """What became of the ranks that vanished, one sentence; and their exit code, None where nobody tells.

    Below 0 the code is a signal's.
    """
    code = _exit_code(run_dir, ended, watch)
    hosts = {rank: status.host for rank, status in watch.lost.items() if watch.others}
    return describe_lost(watch.lost, ending(code), last_step(run_dir), hosts), code


def ending(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None:
        return "was lost"
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code} and no word"


def _exit_code(run_dir: Path, ended: Ended, watch: Watch) -> int | None:
    pids = {status.pid for status in watch.lost.values()}
    text = launcher_said(run_dir)
    for code, pid in _OF_A_PID.findall(text):
        if int(pid) in pids:
            return int(code)
    if own := [ended.rank_codes[rank] for rank in watch.lost if rank in ended.rank_codes]:
        return own[0]
    # Deepspeed's is of the rank that it saw first: above 0 of one that failed because another was lost.
    said = [int(code) for code in _OF_ANY.findall(text)]
    if found := [code for code in said if code < 0 or len(watch.statuses) == 1]:
        return found[0]
    if ended.killed or len(watch.statuses) > 1:
        return None
    return ended.code  # of the one rank, which needs no launcher


def launcher_said(run_dir: Path) -> str:
    """What the launchers of all machines and rank 0 wrote in the last try."""
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
    """A rank that is gone, where nothing tells why."""
    return Problem(
        LOST,
        message,
        file=str(run_dir / "logs" / f"rank-{ranks[0]}.log"),
        hint="somebody or the scheduler ended that process; `--resume auto` goes on from the last "
        "checkpoint, launch.max_restarts does so by itself",
    )


def launcher_problem(run_dir: Path, code: int, host: str = "", log: str = "launcher.log") -> Problem:
    """A launcher that was killed while its ranks lived. host, log: where it is not this machine's."""
    message = f"the launcher {f'on {host} ' if host else ''}{ending(code)}"
    if saved := saved_at(run_dir):
        message += f"; {saved}"
    hint = "continue it with --resume auto"
    return Problem(LAUNCHER_LOST, message, file=str(run_dir / "logs" / log), hint=hint)


def hang_problem(run_dir: Path, ended: Ended) -> Problem:
    """A run without progress: who is behind, and where every rank stands."""
    hang = ended.hang
    assert hang is not None, "asked for a run that hung"
    if not hang.statuses:
        return Problem(
            HANG,
            f"no rank had begun after {hang.seconds:.0f} s (limit {hang.limit:.0f} s)",
            file=str(run_dir / "logs" / "launcher.log"),
            hint="its launcher never started them; the log's last lines may say what it waits for",
        )
    step = max(status.step for status in hang.statuses.values())
    stopped = [rank for rank, stack in sorted(ended.stacks.items()) if stack.is_stopped]
    behind = stopped or hang.behind
    if not behind:  # all wait in the same step: those are at fault that do not wait for another rank
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
        hint="every rank's calls are in its log; launch.hang_factor sets the patience",
    )


def _standing(status: RankStatus, stack: Stack, *, is_behind: bool) -> str:
    """Where one rank of a run without progress stands."""
    if not stack.frames and stack.state in STATES:
        return f"rank {status.rank} (pid {status.pid}) {STATES[stack.state]}, after step {status.step}"
    if is_behind:
        return f"rank {status.rank} is behind, after step {status.step} in {stack}"
    return f"rank {status.rank} stands in {stack}"


_NAMED = 4
"""Ranks that a message names; the others are in the logs."""
