"""What a command returns, and the one place that prints it: text for people, one JSON object for programs."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

from launcher.errors import EffilaunchError, MachineError, Problem
from launcher.report.colour import is_coloured, plain

SCHEMA_VERSION = 1

# Escape, unless it begins a colour; the other C0 and C1 characters; marks that turn the order of letters.
_CONTROL = re.compile(
    r"\x1b(?!\[[0-9;]*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a command: the same facts as data and as text."""

    data: dict[str, Any]
    text: str
    problems: Sequence[Problem] = field(default=())
    exit_code: int = 0


def envelope(command: str, data: dict[str, Any], problems: Sequence[Problem] = ()) -> dict[str, Any]:
    """The JSON object of design: schema_version, command, the data, and errors when there are any."""
    wrapped: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "command": command, **data}
    if problems:
        wrapped["errors"] = [{key: value for key, value in problem.to_json().items()} for problem in problems]
    return wrapped


def harmless(text: str) -> str:
    """The text with escapes for control characters, of which only line ends, tabs and colours stay.

    A recipe, a row and a log are somebody else's words: they must not move the cursor, hide what stands above
    them, rename the window or write to the clipboard.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


_quiet = False


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Within this nothing is said: an outcome is its result's path, or its JSON. Errors are told."""
    global _quiet
    before, _quiet = _quiet, True
    try:
        yield
    finally:
        _quiet = before


def is_quiet() -> bool:
    """Whether nothing is said."""
    return _quiet


def _result_path(data: Mapping[str, Any]) -> str:
    """Where what a command made lies; empty where it made nothing."""
    place = data.get("run_dir") or data.get("folder") or data.get("data", {}).get("folder", "")
    output = data.get("result", {}).get("output", "")
    several = "\n".join(str(run["run_dir"]) for run in data.get("runs", ()))  # a sweep
    return f"{place}/{output}" if place and output else str(place or several)


def emit(command: str, outcome: Outcome, *, as_json: bool) -> int:
    """Print an outcome and return its exit code.

    Output that nobody takes changes no exit code; where it cannot be written although somebody waits for it
    (a full disk), a command whose only result it was ends with MachineError's.
    """
    text = harmless(_result_path(outcome.data) if _quiet else outcome.text.rstrip("\n"))
    if as_json:
        text = json.dumps(envelope(command, outcome.data, outcome.problems), indent=2)
    lost = _put(text, sys.stdout) if text else None
    if not as_json:
        _print_problems(outcome.problems)
    if lost is not None and lost.errno not in _NOBODY:
        _put(f"the output could not be written: {lost.strerror}", sys.stderr)
    _end_output()
    if lost is None or lost.errno in _NOBODY:
        return outcome.exit_code
    return outcome.exit_code or (0 if "run_dir" in outcome.data else MachineError.exit_code)


def emit_error(command: str, error: EffilaunchError, *, as_json: bool) -> int:
    """Print a user's error and return its exit code, whether or not somebody takes what is printed."""
    problems = _without_secrets(error.problems)
    if as_json:
        _put(json.dumps(envelope(command, {}, problems), indent=2), sys.stdout)
    else:
        _print_problems(problems)
    _end_output()
    return error.exit_code


def _without_secrets(problems: Sequence[Problem]) -> list[Problem]:
    from launcher.facts.redaction import hider, secret_values  # no command without an error needs it

    hide = hider(secret_values(os.environ))
    return [
        replace(
            problem,
            message=hide(problem.message),
            file=problem.file and hide(problem.file),
            hint=problem.hint and hide(problem.hint),
        )
        for problem in problems
    ]


def _print_problems(problems: Sequence[Problem]) -> None:
    # What is left of an error of several lines cannot pass for an error of its own.
    lines = ["error: " + harmless(str(problem)).replace("\n", "\n  ") for problem in problems]
    if len(problems) > 1:
        lines.append(f"{len(problems)} problems")
    if lines:
        _put("\n".join(lines), sys.stderr)


def echo(line: str) -> None:
    """One line of a running job, at once. Where nobody takes it any more, the job goes on without."""
    if not _quiet:
        _put(harmless(line), sys.stdout)


def note(line: str) -> None:
    """A word to the user that is not part of the result. Never fails, as `echo`."""
    if not _quiet:
        _put(harmless(line), sys.stderr)


_NOBODY = (errno.EPIPE, errno.EIO)
"""Answers of a pipe whose reader ended (`| tee`, `| head`), and of a terminal that was closed."""


def _put(text: str, stream: TextIO | None) -> OSError | None:
    """Print a line at once, in colours where they are wanted; what kept it from being written.

    Where nobody takes it, neither does anybody take the next one. A disk that is full may have room by then.
    """
    if stream is None:  # closed when this process began
        return None
    try:
        print(text if is_coloured(stream) else plain(text), file=stream, flush=True)
    except OSError as error:
        if error.errno in _NOBODY:
            _lead_nowhere(stream)
        return error
    return None


def _end_output() -> None:
    """What still waits to be written is given up where it cannot be: the interpreter would end with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            _lead_nowhere(stream)


def _lead_nowhere(stream: TextIO) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream without a descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
