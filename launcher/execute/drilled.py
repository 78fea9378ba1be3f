"""A run of a drill as a child process: how it ended, and which processes it left.

All its descendants carry a token of the drill in their environment, so that processes that outlive the run
are found without relying on the run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from launcher.execute.signals import stopping_signals
from launcher.facts.safe_files import parse_json

WORD = "EFFILAUNCH_DRILLED"
"""Environment variable that marks the processes of a drilled run."""
REAP_S = 2.0
"""A process that was killed with the run may be visible for a moment longer."""
STOP_S = 180.0
"""Time for the run of an interrupted drill to save and end, before it is killed."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A run that has ended."""

    code: int | None
    """Exit code; None: it was killed after its time."""
    answer: Mapping[str, Any]
    """What it printed as JSON, {} when it printed none."""
    seconds: float
    """From its start until none of its processes was left."""
    ended_at: float
    """Then; seconds since 1970."""
    left: int
    """Processes that outlived it and were killed here."""

    @property
    def cause(self) -> str:
        """The message of its first error."""
        errors = self.answer.get("errors") or [{}]
        return str(errors[0].get("message", ""))


def watch_run(argv: Sequence[str], env: Mapping[str, str], log: Path, limit_s: float | None) -> Watched:
    """Start a command that prints one JSON object, and wait until it and all of its descendants are gone.

    log: takes its stderr; its stdout goes beside it (`.json`). limit_s: then it is killed. After a
    KeyboardInterrupt the command gets SIGTERM and time to save; a second one kills everything at once.
    """
    word = uuid.uuid4().hex
    said = log.with_suffix(".json")
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as err, said.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            list(argv), env={**env, WORD: word}, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = _wait(process, limit_s)
        finally:
            left = kill_marked(word, REAP_S)
            process.wait()
    return Watched(code, _read(said), time.monotonic() - began, time.time(), left)


def _wait(process: subprocess.Popen[bytes], limit_s: float | None) -> int | None:
    """The exit code, None when the time was over. On KeyboardInterrupt the process is asked to end."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(STOP_S)
        raise


def kill_marked(word: str, wait_s: float) -> int:
    """Kill every process that carries the word and is still there after `wait_s`; how many there were."""
    deadline = time.monotonic() + wait_s
    while (found := marked(word)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return len(found)


def marked(word: str) -> list[int]:
    """Processes of this user whose environment carries the word; ended ones that nobody waited for do not."""
    wanted = f"{WORD}={word}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # another user's, or gone since
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Signals that would end this process raise KeyboardInterrupt within, so that children are ended."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in stopping_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
