"""A check: a pure function of a machine and optionally a plan, which returns a verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from launcher.machine.machine_facts import Machine
    from launcher.plan.plan import Plan

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a check."""

    status: Status
    found: str
    """The fact, in a few words."""
    message: str = ""
    """What it means, in one sentence; "" if obvious."""
    hint: str = ""
    """What to do."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a machine."""

    id: str
    title: str
    verdict: Callable[[Machine, Plan | None], Verdict]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The verdict of a check."""

    id: str
    title: str
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "title": self.title, **asdict(self.verdict)}


def ok(found: str, message: str = "") -> Verdict:
    return Verdict("ok", found, message)


def warn(found: str, message: str, hint: str = "") -> Verdict:
    return Verdict("warn", found, message, hint)


def fail(found: str, message: str, hint: str = "") -> Verdict:
    return Verdict("fail", found, message, hint)


def skip(found: str, message: str = "") -> Verdict:
    return Verdict("skip", found, message)


def needed(condition: bool, found: str, message: str, hint: str = "") -> Verdict:
    """A failure if the run needs it, otherwise a warning."""
    return fail(found, message, hint) if condition else warn(found, message, hint)


def size(count: float) -> str:
    """Format a number of bytes."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparison: `12.8` -> (12, 8)."""
    found = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)
