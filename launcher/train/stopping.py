"""Signals in a worker: noted at once, agreed on at the end of a step, answered by one checkpoint.

A scheduler's warning may reach one rank alone, or all of them between different steps. Each rank therefore
only notes a signal, and at the end of a step all ask each other (`launcher/train/agreeing.py`).
Light to import: the handlers are in place before torch is loaded.
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

from launcher.facts.rank_status import LEFT_EARLY, process_started
from launcher.train.status import status

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SUPERVISOR = "EFFILAUNCH_SUPERVISOR"
SUPERVISOR_GONE = 255
"""In the place of a signal's number: the supervising process has ended without a word."""

POLL_S = 2.0
ORPHAN_S = 60.0
"""So long an orphaned worker may take for its checkpoint, and two steps: it comes behind the one that runs.
Afterwards nobody holds its device for nothing."""


class Stop:
    """What this process was asked: at most one stop, the first."""

    def __init__(self) -> None:
        self.number = 0
        """The signal, SUPERVISOR_GONE, or 0 while nobody asked."""
        self.asked_at = 0.0
        """time.monotonic() then."""
        self.at_once = True
        """Whether it ends the process at once: until a step has begun, there is nothing to save."""
        self.unwinds = False
        """Whether the main thread is about to raise instead, see `unwinding`."""

    def ask(self, number: int, *, since_s: float = 0.0) -> None:
        """Note a request, made `since_s` ago; safe in a signal handler. What follows it changes nothing."""
        if self.number == 0:
            self.asked_at = time.monotonic() - since_s
            self.number = number

    @property
    def seconds(self) -> float:
        """Since the request; 0 without one."""
        return time.monotonic() - self.asked_at if self.number else 0.0


stop = Stop()
"""This process's."""


def cause(number: int) -> str:
    """What asked, in words."""
    return "the supervising process is gone" if number == SUPERVISOR_GONE else signal.Signals(number).name


def watch(environ: Mapping[str, str]) -> None:
    """Take the signals over, and watch the supervisor that the environment names. Main thread only.

    Python's handlers wait until the main thread comes back from C: it may sit in a collective for minutes
    while the model is loaded. The wake-up pipe is written by the signal itself, and a thread reads it.
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
    """Within this a stop raises in the main thread, then ends the process: nothing half written stays."""
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
    """In a forked child: the stop is its parent's. A signal for the whole group must not kill it before."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in (signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _obey_parent_alone(_: Stop) -> None:
    """In a child of multiprocessing, such as a dataloader's worker: SIGTERM ends it if its parent sends it.

    As `Process.terminate` does. One for the whole group comes from elsewhere, and while the parent still
    needs rows, a worker that died would fail the run. Blocked, and not handled: torch's worker puts a handler
    of its own in place, which obeys everybody (torch/csrc/DataLoader.cpp handler_SIGTERM).
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_await_parent, name="stop", daemon=True).start()


def _await_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)  # as torch's handler does: another code would be an error of the dataloader


def read_supervisor(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """(pid, start ticks) of the supervisor; None where there is none, or it runs on another machine."""
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
    """For a process whose SIGTERM unwinds: the supervisor's end is one, and ORPHAN_S later the end of all."""
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
    """End this process from any thread, with a last word in its log and its status."""
    with contextlib.suppress(Exception):
        print(why, file=sys.stderr, flush=True)
    status().end(LEFT_EARLY)
    os._exit(LEFT_EARLY)
