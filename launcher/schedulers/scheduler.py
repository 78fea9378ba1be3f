"""The protocol of what starts the nodes of a run."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import Problem
from launcher.machine.hardware import Hardware
from launcher.machine.job_member import JobMember
from launcher.recipe.loading import LoadedRecipe

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StartRequest:
    """What decides where the run of a command starts."""

    loaded: LoadedRecipe
    hardware: Callable[[], Hardware]
    """The hardware that the command plans for."""
    say: Say
    """Takes notes for the user."""
    node_rank: int | None = None
    master_addr: str | None = None
    """Both of the command line."""
    command: Sequence[str] = ()
    """The words of the command line, for hints."""
    alone: str = ""
    """The option that keeps the command on one node: --dry-run or --tiny."""

    @property
    def is_manual(self) -> bool:
        """Whether the command line gives this node's place."""
        return self.node_rank is not None or self.master_addr is not None

    @property
    def words(self) -> Sequence[str]:
        return self.command or ("run", str(self.loaded.path))


@dataclass(frozen=True, slots=True)
class Gathering:
    """The place of this process in a job on several nodes, each of which is started with the same command."""

    place: JobMember

    @contextlib.contextmanager
    def others(self, run_dir: Path, say: Say) -> Iterator[Callable[[], Sequence[Problem]]]:
        """On node rank 0, while its command lasts: start the other nodes, if nobody else does.

        Returns a function for the problems of those that could not be started or ended at once.
        """
        yield lambda: ()


class Scheduler(ABC):
    """How the nodes of a run are started and find each other."""

    @abstractmethod
    def starts(self, request: StartRequest) -> bool:
        """Whether the nodes of this run are started by this scheduler."""

    @abstractmethod
    def gathering(self, request: StartRequest) -> Gathering | None:
        """The place of this process among the nodes; None for a run on one node.

        RecipeError (2) for an impossible request.
        """
