"""A known failure as data: one entry serves the plan, `lint`, `doctor`, `diagnose` and the documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Failure:
    """One known failure of the training stack."""

    id: str
    title: str
    cause: str
    """One or two sentences."""
    fix: str
    """What the user does about it."""
    source: str
    """The upstream code that raises it, or public threads (`owner/name#1`)."""
    places: tuple[str, ...] = ()
    """Where it is handled, each `KIND REF`. REF is the id of a fix or of a doctor check, a problem code
    (refusal), a lint code, `module:function` of the code that avoids it (worker), or the reason why nothing
    is needed (none). `diagnose` is implied by patterns and signs."""
    versions: str = "*"
    """The affected versions, as `launcher.facts.requirements.holds` reads them."""
    patterns: tuple[str, ...] = ()
    """Regular expressions (`re.search`) over one error message or one log line, each sufficient alone."""
    signs: tuple[str, ...] = ()
    """Like `patterns`, for lines of a run that continues: `diagnose` reports them as noticed."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Recipe settings that fix it; None removes a key."""

    def handled(self) -> Iterator[tuple[str, str]]:
        """Kind and reference of each place."""
        for place in self.places:
            kind, _, reference = place.partition(" ")
            yield kind, reference
        if self.patterns or self.signs:
            yield "diagnose", ""
