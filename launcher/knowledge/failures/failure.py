"""What a known failure is: data. The same entry serves the plan, `lint`, `doctor` and `diagnose`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["fix", "refusal", "lint", "doctor", "worker", "diagnose", "none"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the product deals with a failure, before it happens or after."""

    kind: Kind
    ref: str = ""
    """By kind: the id of a fix, a Problem's code (refusal), a lint code, the id of a doctor's check,
    `module:function` of the code that makes it impossible (worker), the reason why nothing is needed (none).
    """


@dataclass(frozen=True, slots=True)
class Failure:
    """One known failure of the training stack.

    `patterns` are regular expressions (`re.search`) over one error's message or one line of a log, each
    specific enough to be right alone. `changes` are recipe settings that mend it; None takes a key out.
    """

    id: str
    title: str
    cause: str
    """One or two sentences."""
    fix: str
    source: str
    places: tuple[Place, ...]
    versions: str = "*"
    """Where it is true, as `holds` reads it."""
    patterns: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    """As `patterns`, for lines that a run prints which goes on: they are noticed, and are no failure."""
    changes: Mapping[str, Any] = field(default_factory=dict)
