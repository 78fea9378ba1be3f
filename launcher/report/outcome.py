"""The result of a command, and the only place that prints: text for people, one JSON object for programs."""

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

from launcher.errors import WOULD_FIT, EffilaunchError, MachineError, Problem, RecipeError
from launcher.report.terminal import is_coloured, page_of, plain

SCHEMA_VERSION = 1

# Escape, unless it begins a colour; the other C0 and C1 characters; bidirectional controls.
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
    """The JSON object of a command: schema_version, command, the data, and errors if there are any."""
    errors = {"errors": [problem.to_json() for problem in problems]} if problems else {}
    return {"schema_version": SCHEMA_VERSION, "command": command, **data, **errors}


def json_text(command: str, data: dict[str, Any], problems: Sequence[Problem] = ()) -> str:
    """What `--json` prints."""
    return json.dumps(envelope(command, data, problems), indent=2)


def harmless(text: str) -> str:
    """The text with escapes for control characters except line ends, tabs and colours.

    A recipe, a row or a log must not move the cursor, rename the window or write to the clipboard.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


_quiet = False


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Print no progress; an outcome is only the path of its result, or its JSON. Errors are printed."""
    global _quiet
    before, _quiet = _quiet, True
    try:
        yield
    finally:
        _quiet = before


def is_quiet() -> bool:
    """Whether no progress is printed."""
    return _quiet


def _result_path(data: Mapping[str, Any]) -> str:
    """The path of what a command made; empty if it made nothing."""
    place = data.get("run_dir") or data.get("folder") or data.get("data", {}).get("folder", "")
    output = data.get("result", {}).get("output", "")
    several = "\n".join(str(run["run_dir"]) for run in data.get("runs", ()))  # a sweep
    return f"{place}/{output}" if place and output else str(place or several)


def emit(command: str, outcome: Outcome, *, as_json: bool) -> int:
    """Print an outcome and return its exit code.

    A closed pipe or terminal does not change the exit code. If the output cannot be written for another
    reason (a full disk), a command whose only result it was exits with MachineError's.
    """
    text = harmless(_result_path(outcome.data) if _quiet else outcome.text.rstrip("\n"))
    if as_json:
        text = json_text(command, outcome.data, outcome.problems)
    lost = _put(text, sys.stdout) if text else None
    if not as_json:
        _print_problems(outcome.problems)
    if lost is not None:
        _put(f"the output could not be written: {lost.strerror}", sys.stderr)
    _flush()
    if lost is None or "run_dir" in outcome.data:
        return outcome.exit_code
    return outcome.exit_code or MachineError.exit_code


def emit_error(command: str, error: EffilaunchError, *, as_json: bool) -> int:
    """Print an error and return its exit code."""
    problems = shown_problems(error)
    if as_json:
        _put(json_text(command, {}, problems), sys.stdout)
    else:
        _print_problems(problems)
    _flush()
    return error.exit_code


def shown_problems(error: EffilaunchError) -> list[Problem]:
    """The problems of an error as users see them: files of other tools are named, secrets replaced."""
    problems = error.problems
    if isinstance(error, RecipeError) and any(problem.file for problem in problems):
        from launcher.importing.importers import naming_tools  # few errors need the tools' tables

        problems = naming_tools(problems)
    return without_secrets(problems)


def without_secrets(problems: Sequence[Problem]) -> list[Problem]:
    """The problems with the values of secret environment variables replaced."""
    from launcher.files.redaction import hider, secret_values  # no command without an error needs it

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
    # Further lines of an error are indented, so that they do not look like errors of their own.
    lines = ["error: " + harmless(_listed(problem)).replace("\n", "\n  ") for problem in problems]
    if len(problems) > 1:
        lines.append(f"{len(problems)} problems")
    if lines:
        _put("\n".join(lines), sys.stderr)


def _listed(problem: Problem) -> str:
    """The problem; with each change that would make it fit in a line of its own."""
    hint = problem.hint or ""
    if not hint.startswith(WOULD_FIT):
        return str(problem)
    changes = hint.removeprefix(WOULD_FIT).split("; ")
    return "\n".join([str(replace(problem, hint=None)), WOULD_FIT.strip(), *(f"  {one}" for one in changes)])


def echo(line: str) -> None:
    """Print one line of a running job at once. Never fails."""
    if not _quiet:
        _put(_fitted(harmless(line), sys.stdout), sys.stdout)


def note(line: str) -> None:
    """Print a message that is not part of the result to stderr. Never fails."""
    if not _quiet:
        _put(_fitted(harmless(line), sys.stderr), sys.stderr)


def _fitted(text: str, stream: TextIO | None) -> str:
    """The text with the lines wrapped that are too long for a terminal; coloured ones are already."""
    page = page_of(stream)
    lines = text.split("\n")
    return "\n".join(part for line in lines for part in ([line] if "\x1b" in line else page.fitted(line)))


_CLOSED = (errno.EPIPE, errno.EIO)
"""Errors of a pipe whose reader ended (`| tee`, `| head`), and of a terminal that was closed."""


def _put(text: str, stream: TextIO | None) -> OSError | None:
    """Print a line at once, in colours if the stream has them; returns the error if that failed.

    A closed pipe or terminal is no error: all further output is discarded.
    """
    if stream is None:  # closed when this process started
        return None
    try:
        print(text if is_coloured(stream) else plain(text), file=stream, flush=True)
    except OSError as error:
        if error.errno not in _CLOSED:
            return error
        _redirect_to_null(stream)
    return None


def _flush() -> None:
    """Flush, or discard what cannot be written: the interpreter would exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            _redirect_to_null(stream)


def _redirect_to_null(stream: TextIO) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream without a descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
