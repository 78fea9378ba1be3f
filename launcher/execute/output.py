"""The output of the processes of a run (complete in a log, on the screen until a process failed) and the
errors that they report.

A log survives a full disk: what cannot be written is skipped, with a note, and the run continues.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from launcher.errors import Problem
from launcher.files.rank_status import REPORT
from launcher.files.safe_files import parse_json
from launcher.knowledge.failures.noise import is_noise

_CHUNK = 1 << 16
_ERROR = "error: "
_TRACEBACK = "Traceback (most recent call last):"
# What the launchers print when a process of theirs ended: deepspeed/launcher/launch.py sigkill_handler,
# torch/distributed/elastic/multiprocessing/api.py and agent/server/api.py.
_LAUNCHER_ENDS = re.compile(
    r"\[launch\.py:\d+:sigkill_handler\]|"
    r"torch/distributed/elastic/\S+\.py:\d+\] "
    r"(?:Sending process \d+ closing signal|failed \(exitcode|Received \S+ death signal|Unable to shutdown)"
)
# As `warnings` writes one: the place, and below it the line of code that caused it.
_PYTHON_WARNING = re.compile(r"^\S.*?:\d+: \w*Warning: ")
_LOGGED_WARNING = re.compile(r"\[WARNING\]|\[INFO\].*(?i:\boverflow\b|skipping step)|^\[?W\d{4} |:\[W\d{4} ")
_NUMBER = re.compile(r"\d+")
_KNOWN_WARNINGS = 1000
"""Warnings that are remembered; beyond that some are shown twice."""


@dataclass(frozen=True, slots=True)
class Report:
    """An error as a process reported it, in logs/error-*.json or, where it could not write, in its output."""

    rank: int | str
    """A rank, or the name of a stage: prepare."""
    type: str
    message: str
    time: float
    exit_code: int
    problems: Sequence[Problem]

    @property
    def error(self) -> str:
        return f"{self.type}: {self.message}"


def _parse_report(text: str) -> Report | None:
    """The report in a JSON object; None for other text."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        found = parse_json(text)
        problems = [Problem(**values) for values in found.get("problems") or ()]
        kind, message = str(found.get("type")), str(found.get("message", ""))
        at, code = float(found.get("time", 0)), int(found.get("exit_code", 0))
        return Report(found.get("rank", 0), kind, message, at, code, problems)
    return None


def read_reports(logs: Path) -> list[Report]:
    """The reports of the processes that wrote a file."""
    found = []
    for path in logs.glob("error-*.json"):
        with contextlib.suppress(OSError, ValueError):
            found.append(_parse_report(path.read_text("utf-8")))
    return [report for report in found if report is not None]


def errors_in(logs: Path) -> set[str]:
    """The lines of the reported errors, which the command prints at the end."""
    return {line for report in read_reports(logs) for line in report.message.splitlines()}


class _Filter:
    """Decides what of the output is shown: no noise, and each warning once."""

    def __init__(self) -> None:
        self._warned: set[str] = set()
        self._code_follows = False

    def shows(self, line: str) -> bool:
        """Whether a line is shown; to be called for every line, in their order."""
        is_code, self._code_follows = self._code_follows and line.startswith("  "), False
        if is_code:
            return False
        self._code_follows = _PYTHON_WARNING.match(line) is not None
        if is_noise(line):
            return False
        if not (self._code_follows or _LOGGED_WARNING.search(line)):
            return True
        kind = _NUMBER.sub("", line)  # without the time, the place, the rank
        if kind in self._warned:
            return False
        if len(self._warned) < _KNOWN_WARNINGS:
            self._warned.add(kind)
        return True


class Output:
    """Copy a pipe to a log and to `echo`, line by line, without blocking.

    After the line in which a launcher reports the end of a process, `echo` gets nothing more: tables of the
    launcher and the other ranks' tracebacks would bury the one that shows the cause. A traceback waits for
    `release`, since it may only mean that another rank is gone: `silence` drops it. What libraries print in
    every run is not shown, nor an error that the command prints at the end. The log has everything.
    told: returns the lines of such errors. hide: removes secrets from a line; DeepSpeed's launcher prints
    every variable with NCCL in its name.
    """

    def __init__(
        self,
        stream: IO[bytes],
        log: LogFile,
        echo: Callable[[str], None],
        hide: Callable[[str], str] = str,
        told: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._descriptor = stream.fileno()
        self._log, self._echo, self._hide, self._told = log, echo, hide, told
        self._errors: Collection[str] = ()
        """Lines of a reported error that the output is in the middle of."""
        self._rest = b""
        self._held: list[str] = []
        self._held_at = 0.0
        self._quiet = False
        self.reports: list[Report] = []
        """Errors that processes could not write to a file."""
        self._filter = _Filter()
        self.ended = False
        """Whether nobody writes to the pipe any more."""
        os.set_blocking(self._descriptor, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._descriptor, selectors.EVENT_READ)

    def copy(self, wait_s: float) -> bool:
        """Copy what there is, after `wait_s` seconds at most; whether there was anything."""
        if self.ended or not self._selector.select(wait_s):
            return False
        chunk = os.read(self._descriptor, _CHUNK)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._line(line)
        # A progress bar redraws for hours before its line ends: only its last state is kept.
        self._rest = self._rest[self._rest.rfind(b"\r", 0, len(self._rest) - 1) + 1 :]
        if not chunk:
            self.ended = True
            if self._rest:
                self._line(self._rest)
        return True

    def release(self, after_s: float) -> None:
        """Show a traceback that has waited for this time."""
        if self._held and time.monotonic() - self._held_at >= after_s:
            held, self._held = self._held, []
            for line in held:
                self._echo(line)

    def silence(self, why: str) -> None:
        """Show nothing more, and nothing that still waits."""
        noted = self._quiet and not self._held
        self._held, self._quiet = [], True
        if not noted:
            self._echo(self._see_log(why))

    def _see_log(self, why: str) -> str:
        return f"{why}; the output of its launcher and of the other ranks is in {self._log.path}"

    def close(self) -> None:
        """Stop watching the pipe."""
        self._selector.close()

    def _line(self, raw: bytes) -> None:
        line = self._hide(raw.decode("utf-8", errors="replace").rstrip("\r\n").rpartition("\r")[2])
        if line.startswith(REPORT):
            report = _parse_report(line.removeprefix(REPORT))
            self.reports += [] if report is None else [report]
            return
        self._log.line(line)
        if self._quiet:
            return
        if _LAUNCHER_ENDS.search(line):
            self._quiet = True
            line = self._see_log("a process ended")
        if self._held or line.startswith(_TRACEBACK):
            self._held_at = self._held_at if self._held else time.monotonic()
            self._held.append(line)
        elif not self._is_printed_at_the_end(line) and self._filter.shows(line):
            self._echo(line)

    def _is_printed_at_the_end(self, line: str) -> bool:
        if line.startswith(_ERROR):
            self._errors = self._told()
        if line.removeprefix(_ERROR) in self._errors:
            return True
        self._errors = ()
        return False


class LogFile:
    """Append lines to a file. A line that cannot be written is lost; the next one is tried again.

    say: called once, when the first line is lost. Where the log continues, it gives the number of lost lines.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path = path
        self._say = say
        self._descriptor: int | None = None
        self._lost = 0
        self._told = False
        self._torn = False
        """Whether the last line was cut off by the end of the disk."""

    def __enter__(self) -> Self:
        self._try(b"")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def line(self, text: str) -> None:
        """Append one line, at once: nothing waits in this process, which may be killed."""
        gap = f"==== {self._lost} lines are missing: the disk was full ====\n" if self._lost else ""
        if self._try(f"{gap}{text}\n".encode(errors="replace")):
            self._lost = 0
        else:
            self._lost += 1

    def _try(self, data: bytes) -> bool:
        """Whether all of it was written."""
        try:
            if self._descriptor is None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._descriptor = os.open(self.path, flags, 0o666)
            data = b"\n" + data if self._torn and data else data
            while data:
                written = os.write(self._descriptor, data)
                self._torn = data[written - 1 : written] != b"\n"
                data = data[written:]
        except OSError as error:
            if not self._told:
                self._told = True
                self._say(f"{self.path} cannot be written ({error.strerror}): the run continues without it")
            return False
        return True


def unwritable_by(folder: Path) -> str | None:
    """The system's reason why no file can be written in a folder; None where one can."""
    probe = folder / ".probe"
    try:
        probe.write_bytes(bytes(_PROBE_BYTES))
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return None


_PROBE_BYTES = 4096
"""Size of the smallest file on most file systems."""
