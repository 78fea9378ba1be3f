"""Find and end all processes of one start by a token in their environment, and guard them.

A process group is not enough: torchrun starts its workers in sessions of their own, and workers may do the
same. Read from /proc (Linux). The guard is a small process that outlives a killed supervisor and ends what
the run left: a byte on its standard input means that nothing is left to do, the end of the file that the
supervisor died. The workers notice that themselves and save (launcher/train/stopping.py); the guard gives
them time, then kills by the token. It starts without site-packages, so this module may import the standard
library alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from launcher.execute.leftovers import remove_shared_buffers
from launcher.files.rank_status import (
    ENDED_STATES,
    is_alive,
    process_started,
    process_stat,
    read_statuses,
)
from launcher.files.safe_files import with_descriptor

RUN = "EFFILAUNCH_RUN"
"""Environment variable of every process of a start: its token."""
SUPERVISOR = "EFFILAUNCH_SUPERVISOR"
"""Environment variable of the same: `HOST:PID:START` of the supervisor."""
KILL_S = 5.0
"""A killed process is gone at once, unless it hangs in the kernel."""

_PROC = Path("/proc")
_POLL_S = 0.05
_PARENT = 1
"""Field of /proc/PID/stat after the name: the state is 0."""


def marks() -> dict[str, str]:
    """The two variables for a new start by this process."""
    started = process_started(os.getpid()) or 0
    return {RUN: uuid.uuid4().hex, SUPERVISOR: f"{socket.gethostname()}:{os.getpid()}:{started}"}


def processes_of(token: str, variable: str = RUN) -> set[int]:
    """Every living process of a start but this one: those with its token, and their descendants."""
    mark = f"{variable}={token}".encode()
    parents: dict[int, int] = {}
    found = set()
    for pid in _pids():
        stat = process_stat(pid)
        if stat[0] in ENDED_STATES:
            continue
        parents[pid] = int(stat[_PARENT])
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            if mark in with_descriptor((_PROC / str(pid) / "environ").read_bytes).split(b"\0"):
                found.add(pid)
    return _with_children(found, parents) - {os.getpid()}


def command_of(pid: int) -> str:
    """The command line of a process, shortened; its number where that cannot be read."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        words = []
    return f"{pid}: {' '.join(words).strip()[:80] or 'unknown'}"


def environment_of(pid: int) -> dict[str, str]:
    """The variables with which a process was started; none where they cannot be read."""
    try:
        text = with_descriptor((_PROC / str(pid) / "environ").read_bytes).decode("utf-8", "replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def tree_of(pids: Collection[int]) -> set[int]:
    """These processes and their descendants, except orphans."""
    stats = {pid: process_stat(pid) for pid in _pids()}
    parents = {pid: int(stat[_PARENT]) for pid, stat in stats.items() if stat[0] not in ENDED_STATES}
    return _with_children(set(pids) & parents.keys(), parents)


def send(pids: Iterable[int], number: int) -> None:
    """Signal processes; ignore those that have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_all(token: str, wait_s: float = KILL_S) -> set[int]:
    """Kill every process of a start, including those started meanwhile; returns those that remain."""
    deadline = time.monotonic() + wait_s
    while left := processes_of(token):
        send(left, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    return left


def _pids() -> list[int]:
    entries = with_descriptor(lambda: list(_PROC.iterdir()))
    return [int(entry.name) for entry in entries if entry.name.isdigit()]


def _with_children(found: set[int], parents: dict[int, int]) -> set[int]:
    known = set(found)
    while more := {pid for pid, parent in parents.items() if parent in known} - known:
        known |= more
    return known


WORKERS_LEAVE_S = 65.0
"""Workers without a supervisor end after 60 s and two steps at the latest."""
OTHERS_LEAVE_S = 10.0
"""Time for launchers and children of ranks to end when no rank lives, so that nothing is to be saved."""
_GUARD_POLL_S = 0.5

_ROOT = Path(__file__).resolve().parents[2]
_START = "import sys; sys.path.insert(0, sys.argv[1]); from launcher.execute.processes import main; main()"
_DONE = b"."


@contextlib.contextmanager
def guarded(token: str, run_dir: Path, wait_s: float, master_port: int, lock: int | None) -> Iterator[None]:
    """While this is entered, the death of this process ends the run of `token` after `wait_s` seconds.

    Sooner where no rank of `run_dir` lives. lock: the descriptor of the run directory's lock, which the guard
    holds too, until all processes are gone.
    """
    given = (str(_ROOT), token, str(run_dir), str(wait_s), str(master_port))
    argv = [sys.executable, "-E", "-P", "-S", "-c", _START, *given]
    guard = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a signal to this process's group must not end its guard
        pass_fds=() if lock is None else (lock,),
    )
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):  # somebody killed the guard
            guard.communicate(_DONE)


def main(argv: Sequence[str] | None = None) -> None:
    """`ROOT TOKEN RUN_DIR WAIT_S MASTER_PORT`: wait for the supervisor, and end the run if it died."""
    _, token, run_dir, wait_s, master_port = argv or sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if os.read(0, 1) == _DONE:
        return
    _leave_time(token, Path(run_dir), float(wait_s))
    kill_all(token)
    remove_shared_buffers(int(master_port))


def _leave_time(token: str, run_dir: Path, wait_s: float) -> None:
    """Wait for the processes to leave by themselves."""
    began = last_rank = time.monotonic()
    two_steps = 0.0
    while processes_of(token):
        now = time.monotonic()
        living = [s for s in read_statuses(run_dir).values() if s.phase != "ended" and is_alive(s)]
        if living:
            last_rank = now
            two_steps = max(two_steps, *(2 * (status.median or 0.0) for status in living))
        if now - began > wait_s + two_steps or now - last_rank > OTHERS_LEAVE_S:
            return
        time.sleep(_GUARD_POLL_S)
