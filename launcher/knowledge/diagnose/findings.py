"""What `diagnose` finds: errors, the known failures they are, and the lines of the recipe to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from launcher.knowledge.failures.catalogue import Failure

Kind = Literal["traceback", "exception", "line"]
_INNERMOST = 6
"""Calls whose line of code is matched too."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of a traceback."""

    file: str
    line: int
    function: str
    source: str = ""
    """The line of code that is printed below it."""


@dataclass(slots=True)
class Error:
    """One error of a log; equal errors of several ranks are one."""

    type: str
    """The exception's class as printed, with its module; empty where the log has none."""
    message: str
    """The text after the class, all lines."""
    frames: tuple[Frame, ...] = ()
    """The calls as printed: the innermost last."""
    kind: Kind = "traceback"
    """A whole traceback, an exception's last line alone, or a line that is an error by its form."""
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
    order: int = 0
    """Its place among all lines read."""
    last: int = 0
    """The same of its last repetition."""
    steps_before: int = 0
    """Training steps logged when it was last seen."""
    in_tests: bool = False
    """Whether pytest or unittest reported it, each time."""

    def text(self) -> str:
        """What patterns are applied to: class and message, then the calls, innermost first.

        The innermost calls have their line of code below them; further out it is the user's own.
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

    def real(self) -> Error:
        """The exception to show where nothing is known: the one that a chain was raised from."""
        if self.causes and self.direct:
            return self.causes[0]
        return self

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
    """A known failure that a run met."""

    failure: Failure
    error: Error
    ranks: tuple[int, ...]
    first_rank: int | None
    recipe: tuple[Edit, ...] = ()
    meant: str | None = None
    """The field that a misspelt one resembles."""

    def to_json(self) -> dict[str, Any]:
        failure = self.failure
        return {
            "id": failure.id,
            "title": failure.title,
            "cause": failure.cause,
            "mend": failure.fix,
            "error": self.error.to_json(),
            "ranks": list(self.ranks),
            "first_rank": self.first_rank,
            "file": self.error.file,
            "line": self.error.line,
            "changes": dict(failure.changes),
            "recipe": [asdict(edit) for edit in self.recipe],
            "did_you_mean": self.meant,
        }


@dataclass(frozen=True, slots=True)
class Unknown:
    """An error that the registry does not know."""

    error: Error
    ranks: tuple[int, ...]
    first_rank: int | None

    def to_json(self) -> dict[str, Any]:
        return {
            **self.error.to_json(),
            "ranks": list(self.ranks),
            "first_rank": self.first_rank,
            "file": self.error.file,
            "line": self.error.line,
        }


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that the logs tell: the cause first."""

    findings: Sequence[Finding]
    unknown: Sequence[Unknown]
    ranks: int
    """Ranks that the logs name; at least 1."""
    noticed: Sequence[Finding] = ()
    """Where nothing failed: what the logs warn of and people are surprised by later."""
    unfinished: str | None = None
    """Where nothing failed: the run directory that has no result either."""

    def to_json(self) -> Mapping[str, Any]:
        return {
            "findings": [finding.to_json() for finding in self.findings],
            "unknown": [unknown.to_json() for unknown in self.unknown],
            "ranks": self.ranks,
            "noticed": [finding.to_json() for finding in self.noticed],
            "unfinished": self.unfinished,
        }
