"""The result of `diagnose`: errors, their known failures, and the recipe lines to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from launcher.knowledge.failures.catalogue import Failure

Kind = Literal["traceback", "exception", "line"]
Announced = Literal["", "error", "continues"]
_INNERMOST = 6
"""Calls whose line of code is matched too."""


@dataclass(frozen=True, slots=True)
class TracebackFrame:
    """One call of a traceback."""

    file: str
    line: int
    function: str
    source: str = ""
    """The line of code below it."""


@dataclass(slots=True)
class Error:
    """One error of a log; equal errors of several ranks are one."""

    type: str
    """The exception's class as printed, with its module; empty where the log has none."""
    message: str
    """The text after the class, all lines, perhaps with a line that another program printed after them."""
    frames: tuple[TracebackFrame, ...] = ()
    """The calls as printed: the innermost last."""
    kind: Kind = "traceback"
    """A complete traceback, only the last line of one, or a line that is an error by its form."""
    causes: tuple[Error, ...] = ()
    """The exceptions that it was raised from or while handling, the first one first."""
    direct: bool = False
    """Whether it was raised from the last of its causes (`raise … from …`)."""
    ranks: set[int] = field(default_factory=set)
    first_rank: int | None = None
    task: int | None = None
    """The number before its lines (`0: `), a rank only where no line names one."""
    time: float | None = None
    """Seconds since the epoch (error-*.json) or since the epoch of a clock without zone (log lines)."""
    file: str = ""
    line: int = 0
    start: int = 0
    """The position of its first line among all lines read."""
    order: int = 0
    """The position of the line with its class."""
    announced: Announced = ""
    """By a line of level ERROR, or by one after which the process continues: a thread's, for example."""
    last: int = 0
    """The position of its last repetition."""
    steps_before: int = 0
    """Training steps logged when it was last seen."""
    in_tests: bool = False
    """Whether pytest or unittest reported it, each time."""

    def text(self) -> str:
        """The text that patterns are applied to: class and message, then the calls, innermost first.

        Only the innermost calls have their line of code: further out it is the user's own.
        """
        lines = [self.headline]
        for depth, frame in enumerate(reversed(self.frames)):
            lines.append(f"  File {frame.file}, line {frame.line}, in {frame.function}")
            if frame.source and depth < _INNERMOST:
                lines.append(f"    {frame.source}")
        return "\n".join(lines)

    @property
    def headline(self) -> str:
        return ": ".join(part for part in (self.type, self.message) if part)

    def first_line(self) -> Error:
        """The same error without the further lines of its message."""
        return replace(self, message=self.message.partition("\n")[0])

    def real(self) -> Error:
        """The exception to show of an unknown failure: the first one of a chain of `raise … from …`."""
        return self.causes[0] if self.causes and self.direct else self

    def other_end(self, shown: Error) -> Error | None:
        """The other end of a chain of which one exception is shown; None where nothing was raised from it."""
        if shown is not self:
            return self
        return self.causes[0] if self.causes and self.direct else None

    def to_json(self) -> dict[str, Any]:
        return {"type": self.type, "message": self.message, "frames": [asdict(f) for f in self.frames]}


@dataclass(frozen=True, slots=True)
class Edit:
    """A change at one place of a recipe."""

    file: str
    line: int
    """The key's line; 0: it is not there yet."""
    path: str
    old: Any
    new: Any


@dataclass(frozen=True, slots=True)
class Finding:
    """A known failure in a log."""

    failure: Failure
    error: Error
    ranks: tuple[int, ...]
    first_rank: int | None
    recipe: tuple[Edit, ...] = ()
    meant: str | None = None
    """The field that a misspelt one resembles."""
    other_end: Error | None = None
    """The other end of `raise … from …`: the exception that it was raised again as, or raised from."""
    advice: str = ""
    """The fix, where it is not the entry's own: with versions, or for a log without a recipe."""
    missing: tuple[int, ...] = ()
    """Ranks that the others waited for: those of the logs that do not have the error."""

    @property
    def fix(self) -> str:
        return self.advice or self.failure.fix

    def to_json(self) -> dict[str, Any]:
        failure = self.failure
        return {
            "id": failure.id,
            "title": failure.title,
            "cause": failure.cause,
            "mend": self.fix,
            "error": self.error.to_json(),
            **_place(self),
            "changes": dict(failure.changes),
            "recipe": [asdict(edit) for edit in self.recipe],
            "did_you_mean": self.meant,
            "other_end": self.other_end and self.other_end.to_json(),
            "missing_ranks": list(self.missing),
        }


@dataclass(frozen=True, slots=True)
class Unknown:
    """An error that the registry does not know."""

    error: Error
    ranks: tuple[int, ...]
    first_rank: int | None
    other_end: Error | None = None

    def to_json(self) -> dict[str, Any]:
        other = self.other_end and self.other_end.to_json()
        return {**self.error.to_json(), **_place(self), "other_end": other}


def _place(found: Finding | Unknown) -> dict[str, Any]:
    error, ranks = found.error, list(found.ranks)
    return {"ranks": ranks, "first_rank": found.first_rank, "file": error.file, "line": error.line}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result for all logs: the cause first."""

    findings: Sequence[Finding]
    unknown: Sequence[Unknown]
    ranks: int
    """Number of ranks in the logs; at least 1."""
    noticed: Sequence[Finding] = ()
    """If nothing failed: known failures that stop no run, whose signs the logs have."""
    unfinished: str | None = None
    """If nothing failed: a run directory without a result."""
    succeeded: bool = False
    """Whether the logs have a sign of success."""
    last_lines: Sequence[str] = ()
    """If neither an error nor a success is known: the last lines of the logs."""

    def to_json(self) -> Mapping[str, Any]:
        return {
            "findings": [finding.to_json() for finding in self.findings],
            "unknown": [unknown.to_json() for unknown in self.unknown],
            "ranks": self.ranks,
            "noticed": [finding.to_json() for finding in self.noticed],
            "unfinished": self.unfinished,
            "succeeded": self.succeeded,
            "last_lines": list(self.last_lines),
        }
