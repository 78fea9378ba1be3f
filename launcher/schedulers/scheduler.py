"""The protocol of schedulers, which `run` and `submit` use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from launcher.errors import Problem
from launcher.facts.hardware import Hardware
from launcher.plan.plan import Plan
from launcher.recipe.schema import LaunchSection
from launcher.schedulers.rendezvous import Gathering, Request
from launcher.schedulers.submitted import Submitted

START = "==== start "
"""Beginning of the line that a job writes first into its log, at every start."""
ASKED_TO_STOP = (130, 138, 143)
"""Exit codes of a step that a signal ended: the run's own, and those of a Python that
SIGUSR1 or SIGTERM killed before the run had installed its handlers."""


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


@dataclass(frozen=True, slots=True)
class Submission:
    """What all jobs of one `submit` have in common."""

    name: str
    python: str
    folder: str
    """The jobs' working directory: that of the command."""
    hardware: Hardware
    """What each job asks for."""
    launch: LaunchSection
    tiny: bool = False


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of a submission."""

    run_dir: Path
    plan: Plan
    values: Mapping[str, Any]
    """Recipe keys that a sweep sets; empty for a single run."""


class Job(Protocol):
    """A job as its scheduler shows it."""

    @property
    def state(self) -> str:
        """The scheduler's own name of the state."""

    @property
    def code(self) -> int | None:
        """Exit code of its script; None while it has not ended."""

    @property
    def text(self) -> str:
        """What the job does, for a sentence that begins with its number."""

    @property
    def has_ended(self) -> bool: ...

    @property
    def may_return(self) -> bool:
        """Whether an ended job may be in the queue again a moment later."""

    @property
    def has_succeeded(self) -> bool: ...

    @property
    def was_cancelled(self) -> bool: ...

    @property
    def failure(self) -> str:
        """Why the scheduler ended it; empty if the exit code shows it."""

    @property
    def obstacle(self) -> str:
        """Why a waiting job does not start until somebody changes the cluster."""

    @property
    def never_starts(self) -> str:
        """Why a waiting job will never start as it is."""

    @property
    def lost_its_dependency(self) -> bool:
        """Whether that is because the job that it waits for failed."""


class Queue(Scheduler):
    """A scheduler to which `submit` gives jobs."""

    name: ClassVar[str]
    job_file: ClassVar[str]
    """Name of the file of the job that trains."""

    @abstractmethod
    def require(self) -> None:
        """MachineError (4) where jobs cannot be submitted from this machine."""

    @abstractmethod
    def cpus_per_node(self, launch: LaunchSection, hardware: Hardware) -> int | None:
        """CPUs that a job gets on each node, for planning; None where that is not known."""

    @abstractmethod
    def render(self, job: Submission, folder: Path, runs: Sequence[PlannedRun]) -> dict[str, str]:
        """Name -> text of the files that are submitted, in their order. Pure."""

    @abstractmethod
    def render_run(self, job: Submission, run: PlannedRun) -> str:
        """The job file of one run of a sweep, to start it again alone. Pure."""

    @abstractmethod
    def check(self, job: Submission, runs: Sequence[PlannedRun]) -> list[Problem]:
        """Problems of the jobs that are found without the scheduler. Pure."""

    @abstractmethod
    def warnings(self, job: Submission) -> list[str]: ...

    @abstractmethod
    def ask(
        self, job: Submission, files: Mapping[str, str], *, dry_run: bool
    ) -> tuple[list[Problem], list[str], str]:
        """The problems that the scheduler finds, its answers, and why it was not asked (only in a dry run).

        MachineError (4) if it does not answer and this is no dry run.
        """

    @abstractmethod
    def submit(
        self, folder: Path, recipe: str, files: Collection[str], runs: Sequence[PlannedRun]
    ) -> Submitted:
        """Submit the files in `folder`, and write the record. After an error no job is queued."""

    @abstractmethod
    def jobs(self, ids: Sequence[str]) -> Mapping[str, Job]:
        """The jobs that the scheduler knows. MachineError (4) where it does not answer."""

    @abstractmethod
    def cancel(self, ids: Sequence[str]) -> None:
        """End these jobs for good. MachineError (4) where that fails."""

    @abstractmethod
    def restart_hint(self, run_dir: Path) -> str:
        """How a run is started again from its run directory."""
