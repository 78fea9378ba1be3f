"""A planned rehearsal (`doctor --rehearse`) as data, and the names of the files of its ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

PLANNED = "rehearsal.json"
"""This data, in the rehearsal's directory."""
RESULT = "result.json"
"""The measurements so far, written there by rank 0."""
SHARE = "rehearsal-rank-{}.bin"
"""File in checkpoints/ that a rank writes, reads and removes."""
PREFIX = "rehearsal-"
"""Prefix of a rehearsal's directory, next to the recipe's runs."""
LEAST_SHARE = 2**16
"""Bytes that a rank writes if it saves nothing in the run, so that the others can look for its file."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What the ranks do, and time limits; bytes and seconds."""

    seconds: float
    """Duration of the all-reduces of all message sizes."""
    sizes: tuple[int, ...]
    """Message sizes of the all-reduces, ascending."""
    gradient_bytes: int
    """Gradient bytes that the run reduces per optimizer step."""
    first_bytes: int
    """Bytes that rank 0 writes of a checkpoint of the run."""
    each_bytes: int
    """Bytes that each other rank writes of it."""
    cap_bytes: int
    """Upper limit of what a rank writes in the rehearsal."""
    meet_s: float
    """Between the arrival of the first and the last rank."""
    join_s: float
    """Imports, and the process group."""
    links_s: float
    devices_s: float
    save_s: float
    silent_s: float = 15.0
    """A rank without a heartbeat (one per second) for this long is hanging or lost."""

    def limit_s(self, ranks: int) -> float:
        """Upper limit of the total duration."""
        alone = self.join_s + self.devices_s + self.save_s
        if ranks == 1:
            return alone
        return alone + self.meet_s + self.seconds + self.reduce_more_s + self.links_s

    @property
    def reduce_more_s(self) -> float:
        """Additional time for the all-reduce that runs when the time is over."""
        return 30.0 + self.seconds

    def share(self, rank: int) -> int:
        """Bytes that a rank writes of a checkpoint of the run."""
        return self.first_bytes if rank == 0 else self.each_bytes

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "sizes": list(self.sizes)}


def rehearsal_of(values: dict[str, Any]) -> Rehearsal:
    """The inverse of `to_json`."""
    return Rehearsal(**{**values, "sizes": tuple(values["sizes"])})
