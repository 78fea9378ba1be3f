"""The record of submitted jobs: submit.json of a run directory, sweep.json of a sweep."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.execute.run_dir import unwritable
from launcher.files.safe_files import parse_json, write_text
from launcher.render.bundle import dump_json

RECORD, SWEEP = "submit.json", "sweep.json"
"""In a run directory; in the directory of a sweep."""


@dataclass(frozen=True, slots=True)
class SubmittedRun:
    """One run of a submission."""

    run_dir: Path
    job: str
    """Id of its job."""
    log: Path
    """The job's output."""
    values: Mapping[str, Any]
    """Recipe keys that a sweep sets for it."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """The jobs of one `submit`, or one of the runs of a sweep."""

    folder: Path
    recipe: str
    prepare: str | None
    """Id of the job that prepares the data."""
    job: str
    """Id of the job, or of the array."""
    runs: tuple[SubmittedRun, ...]
    to: str
    """Name of the scheduler."""

    @property
    def is_sweep(self) -> bool:
        return len(self.runs) > 1 or bool(self.runs[0].values)

    @property
    def is_part(self) -> bool:
        """Whether this is one run of a sweep; its prepare job is then that of the other runs, too."""
        return self.runs[0].run_dir != self.folder and len(self.runs) == 1 and self.job == self.runs[0].job

    @property
    def place(self) -> Path:
        """The directory of this record: the run's, or the sweep's."""
        return self.runs[0].run_dir if self.is_part else self.folder

    @property
    def own_jobs(self) -> list[str]:
        """The jobs that --cancel ends: for one run of a sweep not the prepare job."""
        return [run.job for run in self.runs] if self.is_part else self.jobs

    @property
    def jobs(self) -> list[str]:
        """Every job, the prepare job first."""
        return [*([self.prepare] if self.prepare else []), *(run.job for run in self.runs)]

    @property
    def prepare_log(self) -> Path:
        return self.log(f"prepare-{self.prepare}", self.folder)

    def log(self, job: str, run_dir: Path) -> Path:
        """The output of a job that was submitted with the files of this directory."""
        return run_dir / "logs" / f"{self.to}-{job.replace('/', '-')}.out"

    def requeued(self, jobs: Mapping[str, str]) -> Submitted:
        """The same after some runs were started again. jobs: id before -> id now."""
        runs = tuple(
            replace(run, job=jobs[run.job], log=self.log(jobs[run.job], run.run_dir))
            if run.job in jobs
            else run
            for run in self.runs
        )
        return replace(self, runs=runs, prepare=None, job=jobs.get(self.job, self.job))

    def to_json(self) -> dict[str, Any]:
        return {
            "to": self.to,
            "recipe": self.recipe,
            "folder": str(self.folder),
            "jobs": {"prepare": self.prepare, "run": self.job},
            "runs": [
                {"run_dir": str(run.run_dir), "job": run.job, "log": str(run.log), "values": dict(run.values)}
                for run in self.runs
            ],
        }

    def write(self) -> None:
        """Write the record; of a sweep also one for each run. RecipeError or MachineError as `unwritable`."""
        stamp = {"submitted": time.time()}
        try:
            write_text(
                self.folder / (SWEEP if self.is_sweep else RECORD), dump_json({**self.to_json(), **stamp})
            )
            for run in self.runs if self.is_sweep else ():
                own = Submitted(self.folder, self.recipe, self.prepare, run.job, (run,), self.to)
                write_text(run.run_dir / RECORD, dump_json({**own.to_json(), **stamp}))
        except OSError as error:
            raise unwritable(self.folder, error) from error


def read_submitted(folder: Path) -> Submitted:
    """Read the record of a run directory or a sweep. RecipeError where nothing was submitted from there."""
    for name in (SWEEP, RECORD):
        try:
            found = parse_json((folder / name).read_text("utf-8"))
            runs = tuple(
                SubmittedRun(Path(run["run_dir"]), run["job"], Path(run["log"]), run["values"])
                for run in found["runs"]
            )
            ids, first = found["jobs"], found.get("folder") or runs[0].log.parent.parent
            return Submitted(Path(first), found["recipe"], ids["prepare"], ids["run"], runs, found["to"])
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            message = f"cannot be read: {error}"
            raise RecipeError(Problem("not-submitted", message, file=str(folder / name))) from error
    hint = "name the run directory of `effilaunch submit RECIPE`, or the directory of a sweep"
    raise RecipeError(Problem("not-submitted", f"no job was submitted from {folder}", hint=hint))
