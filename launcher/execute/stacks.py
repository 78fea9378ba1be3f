"""Where the ranks of a run stand: each writes its calls to its log when SIGUSR2 asks for them."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from launcher.execute.processes import send
from launcher.facts.status import RankStatus, is_alive, process_state

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_OF_A_THREAD = "_bootstrap"
"""The outermost call of every thread but the main one."""
_OUTERMOST = ("<module>", "_run_module_as_main")
"""Of the main thread: all of it is written."""
_WAITING = re.compile(
    r"/torch/distributed/|/deepspeed/(?:comm|runtime)/|/torch/autograd/graph\.py|/torch/nn/parallel/"
)
"""Where a rank stands that waits for another: in a collective, under DDP in the backward pass."""
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3|^<frozen")
_POLL_S = 0.1
_STOPPED = ("T", "t")
STATES = {
    "T": "is stopped by a signal (state T in /proc; SIGCONT continues it)",
    "t": "is stopped by a debugger (state t in /proc)",
    "D": "hangs in the kernel (state D in /proc): a disk, the network or a driver does not answer",
}
"""State of a process that cannot write its calls -> what it means."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One call."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({'/'.join(Path(self.file).parts[-2:])}:{self.line})"


@dataclass(frozen=True, slots=True)
class Stack:
    """The calls of a rank's main thread, the innermost first."""

    frames: tuple[Frame, ...]
    state: str = ""
    """Of its process in /proc/PID/stat, where it wrote no calls on this machine: T is stopped."""

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return bool(self.frames) and bool(_WAITING.search(self.frames[0].file))

    @property
    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP, SIGTSTP) or a debugger has stopped it."""
        return self.state in _STOPPED

    def __str__(self) -> str:
        """The innermost call, and the innermost that is no library's."""
        if not self.frames:
            return "somewhere (it wrote no calls)"
        own = next((frame for frame in self.frames if not _LIBRARY.search(frame.file)), None)
        first = self.frames[0]
        return str(first) if own in (None, first) else f"{first}, called from {own}"


def read_stacks(
    run_dir: Path,
    statuses: Mapping[int, RankStatus],
    wait_s: float,
    is_own: Callable[[int], bool] = lambda rank: True,
) -> dict[int, Stack]:
    """Ask the ranks for their calls; rank -> what it wrote within `wait_s` seconds, empty where nothing.

    is_own: whether a rank runs on this machine; the others were asked by their own.
    """
    logs = {rank: run_dir / "logs" / f"rank-{rank}.log" for rank in statuses}
    sizes = {rank: log.stat().st_size if log.is_file() else 0 for rank, log in logs.items()}
    send([s.pid for rank, s in statuses.items() if is_own(rank) and is_alive(s)], signal.SIGUSR2)
    deadline = time.monotonic() + wait_s
    found: dict[int, Stack] = {}
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        found = {rank: parse_stack(_behind(logs[rank], sizes[rank])) for rank in statuses}
        if all(stack.frames and stack.frames[-1].function in _OUTERMOST for stack in found.values()):
            break
    return {
        rank: stack if stack.frames or not is_own(rank) else Stack((), process_state(statuses[rank].pid))
        for rank, stack in found.items()
    }


def _behind(log: Path, size: int) -> str:
    try:
        with log.open("rb") as stream:
            stream.seek(size)
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""


def parse_stack(text: str) -> Stack:
    """The main thread's calls out of a dump of all threads."""
    starts = [found.start() for found in _THREAD.finditer(text)]
    threads = [text[begin:end] for begin, end in pairwise([*starts, len(text)])]
    stacks = [
        tuple(Frame(file, int(line), function) for file, line, function in _FRAME.findall(thread))
        for thread in threads
    ]
    main = [frames for frames in stacks if frames and frames[-1].function != _OF_A_THREAD]
    return Stack(main[-1] if main else ())
