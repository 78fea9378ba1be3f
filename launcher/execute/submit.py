"""Gives job scripts to Slurm, and keeps in the run directory which jobs these are."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import MachineError, Problem, RecipeError
from launcher.execute.run_dir import unwritable
from launcher.facts.atomic_writes import write_text
from launcher.facts.queue import ask, submit
from launcher.facts.user_files import parse_json
from launcher.render.bundle import dump_json

RECORD, SWEEP = "submit.json", "sweep.json"
"""In a run directory; in the directory of a sweep."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a submission."""

    run_dir: Path
    job: str
    """Its job's number; of a sweep with the task: 12_3."""
    log: Path
    """What the job printed."""
    values: Mapping[str, Any]
    """What a sweep has set for it."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """What was given to Slurm at once."""

    folder: Path
    recipe: str
    prepare: str | None
    """Number of the job that prepares the data."""
    job: str
    """Number of the job, or of the array."""
    runs: tuple[Run, ...]

    @property
    def is_sweep(self) -> bool:
        return len(self.runs) > 1 or bool(self.runs[0].values)

    @property
    def is_part(self) -> bool:
        """Whether it is one run of a sweep, whose prepare job is that of the other runs, too."""
        return "_" in self.job

    @property
    def place(self) -> Path:
        """The directory whose record this is: of the run, or of the sweep."""
        return self.runs[0].run_dir if self.is_part else self.folder

    @property
    def own_jobs(self) -> list[str]:
        """What ends with it: of one run of a sweep its task alone."""
        return [self.job, *([self.prepare] if self.prepare and not self.is_part else [])]

    @property
    def jobs(self) -> list[str]:
        """Every job, the one that prepares first."""
        return [*([self.prepare] if self.prepare else []), *(run.job for run in self.runs)]

    @property
    def prepare_log(self) -> Path:
        return self.folder / "logs" / f"slurm-prepare-{self.prepare}.out"

    def to_json(self) -> dict[str, Any]:
        return {
            "to": "slurm",
            "recipe": self.recipe,
            "jobs": {"prepare": self.prepare, "run": self.job},
            "runs": [
                {"run_dir": str(run.run_dir), "job": run.job, "log": str(run.log), "values": dict(run.values)}
                for run in self.runs
            ],
        }


def submit_scripts(
    folder: Path,
    scripts: tuple[Path | None, Path],
    recipe: str,
    run_dirs: Sequence[Path],
    values: Sequence[Mapping[str, Any]],
) -> Submitted:
    """Submit the prepare script, where there is one, and the job behind it; the record is written.

    values: of a sweep, for each run directory; empty for one run. RecipeError where Slurm takes one of the
    scripts not, and then none stays in the queue; MachineError where it does not answer.
    """
    first, second = scripts
    prepare = None if first is None else _submit(first, None)
    try:
        job = _submit(second, prepare)
    except (RecipeError, MachineError):
        if prepare is not None:
            ask("scancel", prepare)
        raise
    runs = []
    for index, run_dir in enumerate(run_dirs):
        number = f"{job}_{index}" if values else job
        runs.append(
            Run(run_dir, number, folder / "logs" / f"slurm-{number}.out", values[index] if values else {})
        )
    done = Submitted(folder, recipe, prepare, job, tuple(runs))
    stamp = {"submitted": time.time()}
    try:
        write_text(folder / (SWEEP if values else RECORD), dump_json({**done.to_json(), **stamp}))
        for run in runs if values else ():
            own = Submitted(folder, recipe, prepare, run.job, (run,))
            write_text(run.run_dir / RECORD, dump_json({**own.to_json(), **stamp}))
    except OSError as error:
        ask("scancel", job, *([prepare] if prepare else []))
        raise unwritable(folder, error) from error
    return done


def _submit(script: Path, behind: str | None) -> str:
    answer = submit(script, dependency=behind)
    number = answer.out.strip().partition(";")[0]
    if answer.code == 0 and number.isdigit():
        return number
    if answer.code == 124:  # the controller may have taken it, and been too slow to say so
        message = f"{answer.said}: the job of {script.name} may have been submitted"
        hint = "`squeue --me` shows whether it was; `scancel` takes it out of the queue"
        raise MachineError(Problem("slurm-no-answer", message, file=str(script), hint=hint))
    kind = MachineError if answer.code == 127 else RecipeError
    message = f"Slurm does not take the job: {answer.said}"
    raise kind(Problem("slurm-refused", message, file=str(script), hint="nothing was submitted"))


def read_submitted(folder: Path) -> Submitted:
    """The record of a run directory or of a sweep. RecipeError where nothing was submitted from there."""
    for name in (SWEEP, RECORD):
        try:
            found = parse_json((folder / name).read_text("utf-8"))
            runs = tuple(
                Run(Path(run["run_dir"]), run["job"], Path(run["log"]), run["values"])
                for run in found["runs"]
            )
            first = runs[0].log.parent.parent
            return Submitted(first, found["recipe"], found["jobs"]["prepare"], found["jobs"]["run"], runs)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            message = f"cannot be read: {error}"
            raise RecipeError(Problem("not-submitted", message, file=str(folder / name))) from error
    hint = "name the run directory that `effilaunch submit RECIPE` has written, or the one of a sweep"
    raise RecipeError(Problem("not-submitted", f"no job was submitted from {folder}", hint=hint))


def cancel(submitted: Submitted) -> None:
    """End its own jobs for good. MachineError where Slurm does not do it."""
    answer = ask("scancel", *submitted.own_jobs)
    if answer.code != 0:
        problem = Problem("slurm-no-answer", f"the job cannot be cancelled: {answer.said}")
        raise MachineError(problem)
