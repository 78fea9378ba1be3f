"""Signals in a worker: each rank notes them, and all ranks stop at the end of one step.

A scheduler's warning may reach one rank alone, or all of them between different steps. Each rank therefore
only notes a signal, and the ranks agree at the end of one (`Stopping` in launcher/train/callbacks.py).
The handlers are installed before torch is imported, so this module must not import it.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import FrameType

from launcher.files.rank_status import LEFT_EARLY, process_started
from launcher.train.status import status

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SUPERVISOR = "EFFILAUNCH_SUPERVISOR"
SUPERVISOR_GONE = 255
"""Instead of a signal's number: the supervising process is gone."""

POLL_S = 2.0
ORPHAN_S = 60.0
"""Time for the checkpoint of an orphaned worker, besides two steps; then it leaves its device."""


class Stop:
    """The request to stop this process: the first one."""

    def __init__(self) -> None:
        self.number = 0
        """The signal, SUPERVISOR_GONE, or 0 without a request."""
        self.asked_at = 0.0
        """time.monotonic() of the request."""
        self.at_once = True
        """Whether it ends the process at once: before the first step there is nothing to save."""
        self.unwinds = False
        """Whether the main thread raises instead, see `unwinding`."""

    def ask(self, number: int, *, since_s: float = 0.0) -> None:
        """Note a request, made `since_s` ago; safe in a signal handler. Later ones are ignored."""
        if self.number == 0:
            self.asked_at = time.monotonic() - since_s
            self.number = number

    @property
    def seconds(self) -> float:
        """Time since the request; 0 without one."""
        return time.monotonic() - self.asked_at if self.number else 0.0


stop = Stop()
"""This process's."""


def cause(number: int) -> str:
    """The cause as text."""
    return "the supervising process is gone" if number == SUPERVISOR_GONE else signal.Signals(number).name


def watch(environ: Mapping[str, str]) -> None:
    """Install the handlers, and watch the supervisor of the environment. Main thread only.

    Python's handlers run when the main thread returns from C, which may take minutes in a collective while
    the model is loaded. The wake-up pipe is written by the signal itself, and a thread reads it.
    """
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, _note)
    os.register_at_fork(after_in_child=_forget)
    multiprocessing.util.register_after_fork(stop, _obey_parent_alone)
    supervisor = read_supervisor(environ)
    threading.Thread(target=_watch, args=(reader, supervisor), name="stop", daemon=True).start()


def _note(number: int, _frame: FrameType | None) -> None:
    stop.ask(number)


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """Within this a stop raises in the main thread, then ends the process: nothing incomplete stays."""
    stop.unwinds = True
    for number in SIGNALS:
        signal.signal(number, _raise)
    try:
        yield
    except BaseException:
        if not stop.number:
            raise
    finally:
        for number in SIGNALS:
            signal.signal(number, _note)
        stop.unwinds = False
    if stop.number:
        leave_now(_nothing_to_save())


def _raise(number: int, _frame: FrameType | None) -> None:
    stop.ask(number)
    sys.exit(LEFT_EARLY)


def _nothing_to_save() -> str:
    return f"{cause(stop.number)} before the first step: nothing to save"


def _forget() -> None:
    """In a forked child: its parent handles the stop; a signal for the process group must not kill it."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in (signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _obey_parent_alone(_: Stop) -> None:
    """In a child of multiprocessing, such as a dataloader's worker: only its parent's SIGTERM ends it.

    That is `Process.terminate`. A SIGTERM for the process group comes from elsewhere, and a dead worker would
    fail the run while the parent still needs rows. Blocked instead of handled: torch's worker installs its
    own handler, which accepts every sender (torch/csrc/DataLoader.cpp handler_SIGTERM).
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_await_parent, name="stop", daemon=True).start()


def _await_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)  # as torch's handler does: another code would be an error of the dataloader


def read_supervisor(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """(pid, start ticks) of the supervisor; None without one, or if it runs on another node."""
    host, _, rest = environ.get(SUPERVISOR, "").rpartition(":")[0].rpartition(":")
    pid, ticks = rest, environ.get(SUPERVISOR, "").rpartition(":")[2]
    if host != socket.gethostname() or not (pid.isdigit() and ticks.isdigit()):
        return None
    return int(pid), int(ticks)


def is_gone(supervisor: tuple[int, int]) -> bool:
    pid, ticks = supervisor
    return process_started(pid) != ticks


def _watch(reader: int, supervisor: tuple[int, int] | None) -> None:
    """The thread: signals at once, the supervisor every POLL_S seconds."""
    gone_at: float | None = None
    while True:
        if select.select([reader], [], [], POLL_S)[0]:
            for number in os.read(reader, 4096):
                if number in SIGNALS:
                    stop.ask(number)
        if supervisor is not None and gone_at is None and is_gone(supervisor):
            gone_at = time.monotonic()
            stop.ask(SUPERVISOR_GONE)
            if stop.unwinds:
                os.kill(os.getpid(), signal.SIGTERM)
        if stop.number and stop.at_once and not stop.unwinds:
            leave_now(_nothing_to_save())
        limit = ORPHAN_S + 2 * (status().median or 0.0)
        if gone_at is not None and time.monotonic() - gone_at > limit:
            leave_now(f"{cause(SUPERVISOR_GONE)} since {limit:.0f} s: leaving without a checkpoint")


def end_with_supervisor(environ: Mapping[str, str]) -> None:
    """For a process whose SIGTERM unwinds: SIGTERM when the supervisor is gone, and exit ORPHAN_S later."""
    supervisor = read_supervisor(environ)
    if supervisor is not None:
        threading.Thread(target=_end_with, args=(supervisor,), name="stop", daemon=True).start()


def _end_with(supervisor: tuple[int, int]) -> None:
    while not is_gone(supervisor):
        time.sleep(POLL_S)
    print(f"{cause(SUPERVISOR_GONE)}: ending", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_S)
    os._exit(LEFT_EARLY)


def leave_now(why: str) -> None:
    """End this process from any thread, with a message in its log and its status."""
    with contextlib.suppress(Exception):
        print(why, file=sys.stderr, flush=True)
    status().end(LEFT_EARLY)
    os._exit(LEFT_EARLY)
