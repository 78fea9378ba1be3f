"""The tree of errors that users see. Each class has its exit status.

    EffilaunchError
    ├── RecipeError      2   the recipe, its data paths or the command line is wrong
    ├── DoesNotFit       3   no plan fits the hardware
    ├── MachineError     4   this machine lacks something (a package, a binary, a device)
    ├── RunFailed        5   the run started and failed
    └── Interrupted    130   a signal ended it

Any other exception is a bug of effilaunch (70): the command line writes a log and prints its path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

WOULD_FIT = "it would fit "
"""Begins the hint of what does not fit; changes follow, with semicolons between them."""
_LONGEST = 2000
"""Characters that are shown of a text."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and how to fix it."""

    code: str
    """Stable kebab-case name, e.g. `unknown-key`."""
    message: str
    """What is wrong and what was expected, in one sentence."""
    file: str | None = None
    line: int | None = None
    path: str | None = None
    """Dotted path inside the recipe, e.g. `trainer.learning_rate`."""
    hint: str | None = None
    """What to do about it."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        place = printable(self.file or "")
        if self.file and self.line is not None:
            place += f":{self.line}"
        parts = [part for part in (place, printable(self.path or ""), self.message) if part]
        text = ": ".join(parts)
        return f"{text} ({self.hint})" if self.hint else text


def printable(text: str) -> str:
    """The text on one line, with escapes for unprintable characters; long texts are shortened."""
    if len(text) > _LONGEST:
        text = text[:_LONGEST] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class EffilaunchError(Exception):
    """Base of the errors with problems that the user can act on."""

    exit_code: ClassVar[int] = 70

    def __init__(self, problems: Problem | Sequence[Problem] | str) -> None:
        if isinstance(problems, str):  # torch rebuilds the error of a dataloader worker from its text
            problems = Problem("error-in-worker", problems.strip().splitlines()[-1])
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the problems, which the pickle of an exception would lose between processes."""
        return type(self), (self.problems,)


class RecipeError(EffilaunchError):
    """The recipe, a file that it names, or the command line is wrong."""

    exit_code = 2


class DoesNotFit(EffilaunchError):
    """No plan fits.

    nearest_miss: the plan that came closest. would_fit: single changes (Alternative) with which a plan fits.
    """

    exit_code = 3

    def __init__(
        self,
        problems: Problem | Sequence[Problem],
        nearest_miss: Any = None,
        would_fit: Sequence[Any] = (),
    ) -> None:
        super().__init__(problems)
        self.nearest_miss = nearest_miss
        self.would_fit = would_fit


class MachineError(EffilaunchError):
    """This machine lacks a package, a program or a device that the command needs."""

    exit_code = 4


class RunFailed(EffilaunchError):
    """The run started and did not finish."""

    exit_code = 5


class Interrupted(EffilaunchError):
    """The user or the scheduler ended the run."""

    exit_code = 130
