"""The protocol of schedulers that take the jobs of `submit`.

A scheduler is a module of this package that defines `QUEUE`, an object of a subclass of `Queue`, and its
name in `QUEUES`. It brings `render` and `check` (nothing is changed), `submit`, `jobs` and `log` (which
following.py asks until the jobs have ended), `cancel` and `requeue`. Everything else is the same for all:
the plan, the run directories, the record, sweeps, the result.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from launcher.errors import EffilaunchError, MachineError, Problem
from launcher.machine.hardware import Hardware
from launcher.plan.plan import Plan
from launcher.recipe.schema import LaunchSection

START = "==== start "
"""Beginning of the line that a job writes first into its log, at every start."""
RESULT = "==== result "
"""Beginning of a line of the log with result.json, from jobs whose run directory is not on this machine."""
EXIT = "==== exit "
"""Beginning of a line with the exit status, from the same jobs."""
ASKED_TO_STOP = (130, 138, 143)
"""Exit codes of a run that a signal ended: its own, and those of a Python that SIGUSR1 or SIGTERM killed
before the run had installed its handlers."""
Phase = Literal["waiting", "running", "done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of a submission."""

    run_dir: Path
    plan: Plan
    values: Mapping[str, Any]
    """Recipe keys that a sweep sets; empty for a single run."""
    snapshot: str = ""
    """Text of the recipe that the job runs: merged with its parents and overrides."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """Key of the recipe -> the absolute path that it names."""


@dataclass(frozen=True, slots=True)
class Submission:
    """What one `submit` asks for. All its jobs need the same devices."""

    name: str
    python: str
    cwd: str
    """The jobs' working directory: that of the command."""
    folder: Path
    """Directory of the run, or of the sweep."""
    hardware: Hardware
    """What each job asks for."""
    launch: LaunchSection
    runs: tuple[PlannedRun, ...]
    tiny: bool = False

    @property
    def is_sweep(self) -> bool:
        return bool(self.runs[0].values)

    @property
    def node_counts(self) -> tuple[int, int]:
        """The least and the most nodes of a job; alike unless the run is elastic."""
        launch, asked = self.launch, self.hardware.num_nodes
        if launch.min_nodes is None or self.tiny:
            return asked, asked
        return launch.min_nodes, launch.max_nodes or asked

    @property
    def stop_seconds(self) -> int:
        """Seconds that the run which takes longest needs to stop: a step and a save."""
        return max(run.plan.runtime.stop_limit_s for run in self.runs)

    def alone(self, run: PlannedRun) -> Submission:
        """The same for one run of a sweep, to start it again."""
        return replace(self, folder=run.run_dir, runs=(replace(run, values={}),))


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found before anything is submitted."""

    problems: Sequence[Problem] = ()
    warnings: Sequence[str] = ()
    answers: Sequence[str] = ()
    """What the scheduler says about the jobs."""
    unasked: str = ""
    """Why the scheduler was not asked; only in a dry run."""


@dataclass(frozen=True, slots=True)
class Ids:
    """The jobs of a submission."""

    job: str
    """Of the run, or of the whole sweep."""
    runs: Sequence[str]
    """One for each run."""
    prepare: str | None = None
    """The job that prepares the data first, if it is one of its own."""


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """The present state of a job."""

    id: str
    phase: Phase
    state: str
    """The scheduler's own name of the state."""
    text: str
    """What the job does, for a sentence that begins with its id."""
    code: int | None = None
    """Exit code of its script, once it has ended."""
    failure: str = ""
    """Why the scheduler ended it; empty if the exit code shows it."""
    obstacle: str = ""
    """Why a waiting job does not start until somebody changes the cluster; also shown for a sweep."""
    never_starts: str = ""
    """Why a waiting job will never start as it is."""
    lost_its_dependency: bool = False
    """Whether that is because the job that it waits for failed."""
    may_return: bool = False
    """Whether an ended job may be in the queue again a moment later."""

    @property
    def has_ended(self) -> bool:
        return self.phase in ("done", "failed", "cancelled")


class Queue(ABC):
    """A scheduler to which `submit` gives jobs."""

    name: ClassVar[str]
    shares_files: ClassVar[bool] = True
    """Whether the jobs see the files of this machine: the data, the recipe, the run directory."""

    @abstractmethod
    def require(self) -> None:
        """MachineError (4) where jobs cannot be submitted from this machine."""

    @abstractmethod
    def cpus_per_node(self, launch: LaunchSection, hardware: Hardware) -> int | None:
        """CPUs that a job gets on each node, for planning; None where that is not known."""

    @abstractmethod
    def render(self, job: Submission) -> dict[str, str]:
        """Name -> text of the files that are submitted, written into the submission's folder. Pure."""

    @abstractmethod
    def check(self, job: Submission, files: Mapping[str, str], *, dry_run: bool) -> Checked:
        """Problems of the jobs, also those that the scheduler finds.

        MachineError (4) if it does not answer; a dry run notes why instead.
        """

    @abstractmethod
    def submit(self, job: Submission, files: Mapping[str, str]) -> Ids:
        """Submit the files, which are in the folder. After an error no job is queued."""

    @abstractmethod
    def jobs(self, ids: Sequence[str]) -> Mapping[str, QueuedJob]:
        """The jobs that the scheduler knows. MachineError (4) where it does not answer."""

    def log(self, job: str, file: Path) -> str:
        """New output of a job, appended to `file`; nothing where the job itself writes the file."""
        return ""

    @abstractmethod
    def cancel(self, ids: Sequence[str]) -> None:
        """End these jobs for good. MachineError (4) where that fails."""

    @abstractmethod
    def requeue(self, run_dir: Path, job: str) -> str:
        """Start a run whose job has ended again; it resumes. The id of its job; `job`: the one before."""


def asked(
    ask: Callable[[], tuple[Sequence[Problem], Sequence[str]]], warnings: Sequence[str] = (), *, dry_run: bool
) -> Checked:
    """What a scheduler says of jobs. ask: its problems and answers; MachineError where it does not answer."""
    try:
        problems, answers = ask()
    except MachineError as error:
        if not dry_run:
            raise
        return Checked((), warnings, unasked=error.problems[0].message)
    return Checked(problems, warnings, answers)


def submit_each(queue: Queue, job: Submission, submissions: Iterable[Callable[[], str]]) -> Ids:
    """Submit a job for each run; after an error those that are queued already are cancelled."""
    made: list[str] = []
    try:
        for submit in submissions:
            made.append(submit())  # noqa: PERF401  (after an error those before it are cancelled)
    except EffilaunchError:
        with contextlib.suppress(EffilaunchError):
            queue.cancel(made)
        raise
    return Ids(made[0] if len(made) == 1 else job.name, made)
