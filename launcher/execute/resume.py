"""Which checkpoint a run goes on from: the newest one that is whole, by its hashes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launcher.errors import Problem, RecipeError
from launcher.execute.run_dir import unwritable
from launcher.facts.atomic_writes import write_text
from launcher.facts.checkpoint import (
    MANIFEST,
    ORIGIN,
    complete_checkpoints,
    defect,
    incomplete_checkpoints,
    read_manifest,
    read_origin,
)
from launcher.facts.status import read_statuses
from launcher.plan.inputs import Pace
from launcher.render.bundle import dump_json

_NAME = "runs/NAME/TIME/checkpoints/checkpoint-100"


@dataclass(frozen=True, slots=True)
class Chosen:
    """Where a run goes on."""

    checkpoint: Path | None
    """Absolute; None: it starts from the beginning."""
    step: int = 0
    """The step that it has behind it."""
    verified_bytes: int = 0
    """What was read and compared with the manifest's hashes."""
    skipped: Mapping[Path, str] = field(default_factory=dict)
    """Newer folders that cannot be used -> what is wrong with each, one sentence."""

    def words(self) -> list[str]:
        """What to tell the user, a line each."""
        said = [f"{folder.name} is passed over: {wrong}" for folder, wrong in self.skipped.items()]
        if self.checkpoint is None:
            return [*said, "no checkpoint to resume from: the run starts from the beginning"]
        size = f"{self.verified_bytes / 2**20:,.1f} MiB" if self.verified_bytes else "nothing"
        return [*said, f"goes on from {self.checkpoint} (step {self.step}; {size} verified by hash)"]


def choose_checkpoint(run_dir: Path) -> Chosen:
    """The newest checkpoint of a run whose files are what its manifest says; damaged ones are passed over.

    For every start that continues a run: `--resume auto`, restarts, `on_oom: adapt`. Reads all bytes of the
    checkpoint that it chooses.
    """
    skipped: dict[Path, str] = {}
    complete = complete_checkpoints(run_dir / "checkpoints")
    for step in sorted(complete, reverse=True):
        folder = complete[step].absolute()
        wrong = defect(folder, hashes=True)
        if wrong is None:
            newer = {path: why for path, why in _incomplete(run_dir) if _step(path) > step}
            return Chosen(folder, step, _bytes(folder), {**newer, **skipped})
        skipped[folder] = wrong
    return Chosen(None, skipped={**dict(_incomplete(run_dir)), **skipped})


def verify_checkpoint(path: Path) -> Chosen:
    """The checkpoint that a user named: its folder, or a run directory, whose newest whole one is meant.

    RecipeError when there is none, or when it is damaged.
    """
    path = path.absolute()
    if (path / "plan.json").is_file() and (path / "checkpoints").is_dir():
        chosen = choose_checkpoint(path)
        if chosen.checkpoint is not None:
            return chosen
        wrong = [f"{folder.name}: {why}" for folder, why in chosen.skipped.items()]
        origin = read_origin(path)
        from_there = "the beginning" if origin is None else f"{origin}, with which it began"
        raise RecipeError(
            Problem(
                "nothing-to-resume",
                "; ".join(["the run directory holds no whole checkpoint", *wrong]),
                file=str(path),
                hint=f"--resume auto --output-dir {path} starts this run from {from_there}",
            )
        )
    if not (path / MANIFEST).is_file():
        raise RecipeError(_no_checkpoint(path))
    damage = defect(path, hashes=True)
    manifest = read_manifest(path)
    if damage is not None or manifest is None:
        raise RecipeError(
            Problem(
                "checkpoint-damaged",
                f"the checkpoint is damaged: {damage or 'its manifest cannot be read'}",
                file=str(path),
                hint="name another one, or --resume auto for the newest whole one",
            )
        )
    return Chosen(path, manifest.step, manifest.bytes)


def verify_origin(run_dir: Path, origin: Path) -> Chosen:
    """The checkpoint of another run that this one began with. RecipeError where it is gone or damaged."""
    try:
        return verify_checkpoint(origin)
    except RecipeError as error:
        problem = error.problems[0]
        wrong = f"is not usable: {problem.message}" if origin.exists() else "is not there"
        message = f"{ORIGIN} names {origin}, with which this run began; it {wrong}"
        hint = "bring it back, or name a new --output-dir"
        file = str(run_dir / ORIGIN)
        raise RecipeError(Problem(problem.code, message, file=file, hint=hint)) from error


def earlier_pace(run_dir: Path) -> Pace:
    """What the last start of a run said of its steps, and its checkpoints of their saves."""
    steps = [status.median for status in read_statuses(run_dir).values() if status.median is not None]
    whole = complete_checkpoints(run_dir / "checkpoints").values()
    saves = [found.seconds for path in whole if (found := read_manifest(path)) is not None]
    return Pace(max(steps, default=None), max(saves, default=None))


def write_origin(run_dir: Path, checkpoint: Path) -> None:
    """Remember the checkpoint of another run that this one goes on from. Raises as `unwritable`."""
    try:
        write_text(run_dir / ORIGIN, dump_json({"checkpoint": str(checkpoint)}))
    except OSError as error:
        raise unwritable(run_dir, error) from error


def _no_checkpoint(path: Path) -> Problem:
    if not path.exists():
        message = "no such folder"
    elif (path / "trainer_state.json").is_file():
        message = f"a checkpoint that was never finished: it has no {MANIFEST}"
    else:
        message = "neither a checkpoint nor a run directory"
    return Problem(
        "not-a-checkpoint", message, file=str(path), hint=f"name a folder such as {_NAME}, or auto"
    )


def _incomplete(run_dir: Path) -> Iterator[tuple[Path, str]]:
    """Folders of saves that never ended, or lost files, and what is wrong."""
    yield from sorted(incomplete_checkpoints(run_dir / "checkpoints").items())


def _step(path: Path) -> int:
    number = path.name.rpartition("-")[2]
    return int(number) if number.isdigit() else 0


def _bytes(folder: Path) -> int:
    manifest = read_manifest(folder)
    return 0 if manifest is None else manifest.bytes
