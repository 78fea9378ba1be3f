"""What the loop that follows a start hears from the other machines of a run, and tells them."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Said:
    """What a machine tells the others of its part of a try; each word is said once and stays true."""

    stop: signal.Signals | None = None
    """Somebody asked it to stop."""
    trouble: str = ""
    """Why the ranks elsewhere wait in vain."""
    lost: tuple[int, ...] = ()
    """Its ranks that vanished without a word."""
    killed: str = ""
    """Why it killed its ranks."""


@dataclass(slots=True)
class Part:
    """A member's part of a try, as far as it has told."""

    trouble: str = ""
    first: bool = False
    """Whether all was well everywhere else when its trouble was told."""
    lost: frozenset[int] = frozenset()
    killed: str = ""
    code: int | None = None
    """Of its launcher; None while it runs."""
    oom: bool | None = None
    """Whether the kernel killed processes there for their memory; None where nobody can tell."""
    log: str = ""


class Peers(Protocol):
    """The other machines, asked every half second while a start is followed."""

    @property
    def stop(self) -> signal.Signals | None:
        """What another one was asked to stop with."""

    @property
    def trouble(self) -> str:
        """Why the ranks here wait in vain; empty where all is well elsewhere."""

    @property
    def vanished(self) -> str:
        """Which machine is lost, and how; empty while all are there."""

    @property
    def end(self) -> str:
        """Why everything that runs here is to be killed now; empty while it is not."""

    @property
    def lost(self) -> frozenset[int]:
        """Ranks elsewhere that vanished without a word."""

    @property
    def running(self) -> bool:
        """Whether ranks elsewhere have to be waited for."""

    def tell(self, said: Said) -> None:
        """Tell the others what happened here; what they know already is not sent again."""

    def ask_stacks(self) -> None:
        """Let the ranks elsewhere write where they stand, into their logs."""
