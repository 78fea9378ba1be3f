"""What a command returns, and the one place that prints it: text for people, one JSON object for programs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.errors import EffilaunchError, Problem

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


def emit(command: str, outcome: Outcome, *, as_json: bool) -> int:
    """Print an outcome and return its exit code."""
    if as_json:
        print(json.dumps(envelope(command, outcome.data, outcome.problems), indent=2))
    else:
        if outcome.text:
            print(harmless(outcome.text.rstrip("\n")))
        _print_problems(outcome.problems)
    return outcome.exit_code


def emit_error(command: str, error: EffilaunchError, *, as_json: bool) -> int:
    """Print a user's error and return its exit code."""
    if as_json:
        print(json.dumps(envelope(command, {}, error.problems), indent=2))
    else:
        _print_problems(error.problems)
    return error.exit_code


def _print_problems(problems: Sequence[Problem]) -> None:
    for problem in problems:
        # What is left of an error of several lines cannot pass for an error of its own.
        print("error: " + harmless(str(problem)).replace("\n", "\n  "), file=sys.stderr)
    if len(problems) > 1:
        print(f"{len(problems)} problems", file=sys.stderr)


def echo(line: str) -> None:
    """One line of a running job, at once."""
    print(harmless(line), flush=True)


def note(line: str) -> None:
    """A word to the user that is not part of the result."""
    print(harmless(line), file=sys.stderr, flush=True)
