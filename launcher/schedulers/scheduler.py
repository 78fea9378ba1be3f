"""The protocol of what starts the nodes of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod

from launcher.schedulers.rendezvous import Gathering, Request


class Scheduler(ABC):
    """How the nodes of a run are started and find each other."""

    @abstractmethod
    def starts(self, request: Request) -> bool:
        """Whether the nodes of this run are started by this scheduler."""

    @abstractmethod
    def gathering(self, request: Request) -> Gathering | None:
        """The place of this process among the nodes; None for a run on one node.

        RecipeError (2) for an impossible request.
        """
