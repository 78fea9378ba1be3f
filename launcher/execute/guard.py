"""A small process that outlives the supervisor: where that is killed, it ends what the run left.

The supervisor holds the other end of its standard input: a byte says that nothing is left to do, and the end
of the file without one that the supervisor died. The workers notice that themselves and save a checkpoint
(launcher/train/stopping.py); the guard gives them time for it, then kills by the run's token. It imports
nothing but the standard library, so that it starts in no time and weighs little.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.execute.processes import kill_all, processes_of
from launcher.execute.shared_buffers import remove_shared_buffers
from launcher.facts.status import is_alive, read_statuses

WORKERS_LEAVE_S = 65.0
"""Workers whose supervisor is gone leave after 60 s and two steps at the latest."""
OTHERS_LEAVE_S = 10.0
"""Without a living rank there is nothing to save: launchers and what ranks started have so long."""
_POLL_S = 0.5

_ROOT = Path(__file__).resolve().parents[2]
_START = "import sys; sys.path.insert(0, sys.argv[1]); from launcher.execute.guard import main; main()"
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
        start_new_session=True,  # what ends this process's group shall not end its guard
        pass_fds=() if lock is None else (lock,),
    )
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):  # somebody killed the guard
            guard.communicate(_DONE)


def main(argv: Sequence[str] | None = None) -> None:
    """`ROOT TOKEN RUN_DIR WAIT_S MASTER_PORT`: wait for the supervisor, and clear up where it did not."""
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
        time.sleep(_POLL_S)
