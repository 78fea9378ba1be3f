"""Test runs in a log: which errors pytest and unittest report, and whether all tests passed.

A test run that passed says nothing of a training in the same file: only the errors that it reported itself
are none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from launcher.diagnose.findings import Error, Kind
from launcher.diagnose.reading import Line

_STARTS = re.compile(r"^=+ test session starts =+$")
_CAPTURED = re.compile(r"^-{3,} Captured \w+ \w+ -{3,}$")
"""What a test printed, which pytest repeats in its report."""
_SUMMARY = re.compile(
    r"^(?:=+ )?(?P<counts>(?:\d+ (?:passed|failed|errors?|skipped|deselected|xfailed|xpassed|warnings?|rerun)"
    r"(?:, | ))+)in [\d.]+s\b"
)
_FAILURE = re.compile(r"\b(?:failed|errors?)\b")
_RAN = re.compile(r"^Ran \d+ tests? in [\d.]+s$")
_VERDICT = re.compile(r"^(?:(?P<passed>OK)|FAILED)(?: \([\w ,=]+\))?$")
_VERDICT_WITHIN = 3
"""Lines from unittest's `Ran 3 tests in 0.1s` to its verdict."""
_REPORTED = re.compile(r"^(?:E {2,}|(?:FAILED|ERROR) \S+::)")
"""An error in pytest's own form."""

WORDS = (
    b"test session", b"Captured", b" passed", b" failed", b" error", b" skipped", b" xfailed", b" xpassed",
    b" deselected", b"Ran ", b"OK", b"FAILED",
)  # fmt: skip
"""One of these is in every line that is of interest here."""


@dataclass(slots=True)
class _File:
    in_session: bool = False
    in_captured: bool = False
    ran: int | None = None
    """Number of the last line `Ran 3 tests in 0.1s`."""
    ends: list[tuple[int, bool]] = field(default_factory=list)
    """Order of the last line of each test run, and whether all its tests passed."""


class TestRuns:
    """Follows the test runs of any number of logs."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}

    def feed(self, line: Line, text: str) -> None:
        """The next line outside of tracebacks. text: without a box around it."""
        state = self._files.get(line.file)
        if state is None:
            state = self._files[line.file] = _File()
        if _STARTS.match(text):
            state.in_session, state.in_captured = True, False
        elif state.in_session and _CAPTURED.match(text):
            state.in_captured = True
        elif (summary := _SUMMARY.match(text)) is not None:
            self._end(state, line, passed=_FAILURE.search(summary["counts"]) is None)
        elif _RAN.match(text):
            state.ran = line.number
        elif state.ran is not None and line.number - state.ran <= _VERDICT_WITHIN:
            verdict = _VERDICT.match(text)
            if verdict is not None:
                self._end(state, line, passed=verdict["passed"] is not None)

    def _end(self, state: _File, line: Line, *, passed: bool) -> None:
        state.ends.append((line.order, passed))
        state.in_session, state.in_captured, state.ran = False, False, None

    def reports(self, line: Line, text: str, kind: Kind) -> bool:
        """Whether an error is a test run's report, and not a program's own error.

        A traceback is one only where pytest repeats what a test printed.
        """
        state = self._files.get(line.file)
        if state is None:
            state = _File()
        return state.in_captured or (
            kind == "line" and (state.in_session or _REPORTED.match(text) is not None)
        )

    def dismisses(self, error: Error) -> bool:
        """Whether every test run that reported the error passed: the failure was expected."""
        if not error.in_tests or error.file not in self._files:
            return False
        for order, passed in self._files[error.file].ends:
            if order >= error.order:
                if not passed:
                    return False
                if order >= error.last:
                    return True
        return False
