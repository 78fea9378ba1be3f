"""A rehearsal of a run: what its ranks are told to do, and where rank 0 writes what they measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

COURSE = "rehearsal.json"
"""In the rehearsal's directory: what its ranks do."""
RESULT = "result.json"
"""In the same: what they measured, as far as they came."""
SHARE = "rehearsal-rank-{}.bin"
"""In checkpoints/: what a rank saves; removed when it was read."""
SHARES = SHARE.format("*")
PREFIX = "rehearsal-"
"""Begins the name of a rehearsal's directory, beside those of the recipe's runs."""


@dataclass(frozen=True, slots=True)
class Course:
    """What the ranks of a rehearsal do, and how long each part may take. Bytes and seconds."""

    seconds: float
    """All-reduce, all message sizes together."""
    sizes: tuple[int, ...]
    """Bytes of the messages that are all-reduced, the smallest first."""
    gradient_bytes: int
    """What an optimizer step of the run reduces over its ranks."""
    first_bytes: int
    """What rank 0 writes of a checkpoint of the run."""
    each_bytes: int
    """What every other rank writes of it."""
    cap_bytes: int
    """A rank writes no more than this here."""
    meet_s: float
    """Between the first rank that has come and the last one."""
    join_s: float
    """Imports, and the process group."""
    links_s: float
    devices_s: float
    save_s: float
    silent_s: float = 15.0
    """A rank that says nothing for so long is stopped or lost: each says every second that it is there."""

    def limit_s(self, ranks: int) -> float:
        """The most that all of it may take."""
        alone = self.join_s + self.devices_s + self.save_s
        if ranks == 1:
            return alone
        return alone + self.meet_s + self.seconds + self.reduce_more_s + self.links_s

    @property
    def reduce_more_s(self) -> float:
        """The all-reduces end with the one that runs when their time is over."""
        return 30.0 + self.seconds

    def share(self, rank: int) -> int:
        """What a rank writes of a checkpoint of the run."""
        return self.first_bytes if rank == 0 else self.each_bytes

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "sizes": list(self.sizes)}


def course_of(values: dict[str, Any]) -> Course:
    """The course that `to_json` wrote."""
    return Course(**{**values, "sizes": tuple(values["sizes"])})
