"""Choose and verify the checkpoint that a run resumes from, and convert it for other ranks or ZeRO stages.

Converted checkpoints are in RUN_DIR/converted/, which neither `complete_checkpoints` nor the retention of a
run reads, and are removed when the run has saved a checkpoint of its own. The original stays.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launcher.errors import MachineError, Problem, RecipeError, RunFailed
from launcher.execute.endings import interruption
from launcher.execute.following import Look, Start, blind, follow
from launcher.execute.run_dir import DISK_FULL, unwritable
from launcher.files.checkpoint import (
    MANIFEST,
    ORIGIN,
    complete_checkpoints,
    defect,
    incomplete_checkpoints,
    read_manifest,
    read_origin,
)
from launcher.files.rank_status import CONVERT_STAGE, read_statuses
from launcher.files.safe_files import write_text
from launcher.machine.storage import read_folder
from launcher.plan.inputs import Pace
from launcher.render.bundle import dump_json


@dataclass(frozen=True, slots=True)
class Chosen:
    """The checkpoint that a run resumes from."""

    checkpoint: Path | None
    """Absolute; None: it starts from the beginning."""
    step: int = 0
    """Steps done."""
    verified_bytes: int = 0
    """Bytes compared with the hashes of the manifest."""
    skipped: Mapping[Path, str] = field(default_factory=dict)
    """Newer folders that cannot be used -> what is wrong with each."""
    stored: str = ""
    """Where it is in the run's object store, if it is not on this disk yet."""

    def lines(self) -> list[str]:
        """Lines for the user."""
        skipped = [f"{folder.name} is skipped: {wrong}" for folder, wrong in self.skipped.items()]
        if self.checkpoint is None:
            return [*skipped, "no checkpoint to resume from: the run starts from the beginning"]
        if self.stored:
            return [*skipped, f"resumes from {self.stored} (step {self.step}), which is not on this disk"]
        size = f"{self.verified_bytes / 2**20:,.1f} MiB" if self.verified_bytes else "nothing"
        return [*skipped, f"resumes from {self.checkpoint} (step {self.step}; {size} verified by hash)"]


def choose_checkpoint(run_dir: Path) -> Chosen:
    """The newest checkpoint of a run whose files match its manifest; damaged ones are skipped.

    For every start that resumes a run: `--resume auto`, restarts, `on_oom: adapt`. Reads all bytes of the
    checkpoint that it chooses.
    """
    damaged: dict[Path, str] = {}
    complete = complete_checkpoints(run_dir / "checkpoints")
    incomplete = dict(sorted(incomplete_checkpoints(run_dir / "checkpoints").items()))
    for step in sorted(complete, reverse=True):
        folder = complete[step].absolute()
        wrong = defect(folder, hashes=True)
        if wrong is None:
            manifest = read_manifest(folder)
            newer = {path: why for path, why in incomplete.items() if _step(path) > step}
            return Chosen(folder, step, 0 if manifest is None else manifest.bytes, {**newer, **damaged})
        damaged[folder] = wrong
    return Chosen(None, skipped={**incomplete, **damaged})


def is_run(path: Path) -> bool:
    """Whether this is a run directory, not a checkpoint in one."""
    return (path / "plan.json").is_file() and (path / "checkpoints").is_dir()


def verify_checkpoint(path: Path) -> Chosen:
    """The checkpoint that a user named: its folder, or a run directory, for its newest complete one.

    RecipeError when there is none, or when it is damaged.
    """
    path = path.absolute()
    if is_run(path):
        chosen = choose_checkpoint(path)
        if chosen.checkpoint is not None:
            return chosen
        wrong = [f"{folder.name}: {why}" for folder, why in chosen.skipped.items()]
        message = "; ".join(["the run directory contains no complete checkpoint", *wrong])
        origin = read_origin(path)
        start = "the beginning" if origin is None else f"{origin}, with which it began"
        hint = f"--resume auto --output-dir {path} starts this run from {start}"
        raise RecipeError(Problem("nothing-to-resume", message, file=str(path), hint=hint))
    if not (path / MANIFEST).is_file():
        raise RecipeError(_not_a_checkpoint(path))
    damage = defect(path, hashes=True)
    manifest = read_manifest(path)
    if damage is not None or manifest is None:
        message = f"the checkpoint is damaged: {damage or 'its manifest cannot be read'}"
        hint = "name another one, or --resume auto for the newest complete one"
        raise RecipeError(Problem("checkpoint-damaged", message, file=str(path), hint=hint))
    return Chosen(path, manifest.step, manifest.bytes)


def verify_origin(run_dir: Path, origin: Path) -> Chosen:
    """The checkpoint of another run that this one began with. RecipeError where it is gone or damaged."""
    try:
        return verify_checkpoint(origin)
    except RecipeError as error:
        problem = error.problems[0]
        wrong = f"is not usable: {problem.message}" if origin.exists() else "does not exist"
        message = f"{ORIGIN} names {origin}, with which this run began; it {wrong}"
        hint, file = "restore it, or name a new --output-dir", str(run_dir / ORIGIN)
        raise RecipeError(Problem(problem.code, message, file=file, hint=hint)) from error


def earlier_pace(run_dir: Path) -> Pace:
    """Seconds of a step in the last start of a run, and of a save in its checkpoints."""
    steps = [status.median for status in read_statuses(run_dir).values() if status.median is not None]
    complete = complete_checkpoints(run_dir / "checkpoints").values()
    saves = [found.seconds for path in complete if (found := read_manifest(path)) is not None]
    return Pace(max(steps, default=None), max(saves, default=None))


def write_origin(run_dir: Path, checkpoint: Path) -> None:
    """Record the checkpoint of another run that this one starts from. Raises as `unwritable`."""
    try:
        write_text(run_dir / ORIGIN, dump_json({"checkpoint": str(checkpoint)}))
    except OSError as error:
        raise unwritable(run_dir, error) from error


def _not_a_checkpoint(path: Path) -> Problem:
    if not path.exists():
        message = "no such folder"
    elif (path / "trainer_state.json").is_file():
        message = f"a checkpoint that was never finished: it has no {MANIFEST}"
    else:
        message = "neither a checkpoint nor a run directory"
    hint = "name a folder such as runs/NAME/TIME/checkpoints/checkpoint-100, or auto"
    return Problem("not-a-checkpoint", message, file=str(path), hint=hint)


def _step(path: Path) -> int:
    number = path.name.rpartition("-")[2]
    return int(number) if number.isdigit() else 0


CONVERTED = "converted"
LATEST = "latest_universal"
"""File of a universal checkpoint with the name of the folder that DeepSpeed reads."""
LOG = "convert.log"
_TIMES = 2
"""The shards are on the disk twice while they are merged."""
_STOP_S = 5.0


def converted(
    checkpoint: Path, run_dir: Path, why: str, say: Callable[[str], None], look: Look = blind
) -> Path:
    """Convert a verified checkpoint into a universal one, unless that exists already; its path.

    look: receives the progress.
    MachineError (4) where the disk lacks the space, RunFailed (5) where DeepSpeed cannot convert it,
    RecipeError (2) where reading it would run code, Interrupted (130) after a signal.
    """
    target = run_dir / CONVERTED / checkpoint.name
    if _is_of(target, checkpoint):
        say(f"the converted checkpoint {target} is there already")
        return target
    _check_space(checkpoint, run_dir)
    say(f"converting {checkpoint} for this run: {why}")
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    argv = [
        sys.executable,
        "-m",
        "launcher.train.engines.universal",
        str(checkpoint),
        str(target),
        str(run_dir),
    ]
    # Alone and on the CPU: no device is taken, no process group joined.
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        env.pop(name, None)
    log = run_dir / "logs" / LOG
    ended = follow(
        Start(argv, env, log, _discard, stop_s=_STOP_S, orphaned_s=0.0, stage=CONVERT_STAGE, look=look)
    )
    if ended.stopped_by is not None:
        raise interruption(run_dir, ended, again="run the command again; nothing of the run has changed")
    if ended.code != 0 or defect(target, hashes=False) is not None:
        raise _failed(ended.code, log)
    return target


def _discard(line: str) -> None:
    """Show nothing; the log has the line."""


def _failed(code: int, log: Path) -> RecipeError | RunFailed:
    try:
        lines = log.read_text("utf-8", errors="replace").strip().splitlines()
    except OSError:  # a full disk may lack the log, too
        lines = []
    last = lines[-1] if lines else f"exit code {code}"
    message = f"the checkpoint could not be converted for another number of ranks or ZeRO stage: {last}"
    hint = "resume with the ranks and the stage that wrote it, or start a new run"
    problem = Problem("conversion-failed", message, file=str(log), hint=hint)
    return RecipeError(problem) if code == RecipeError.exit_code else RunFailed(problem)


def _is_of(target: Path, checkpoint: Path) -> bool:
    """Whether a converted checkpoint is complete and was made from this one."""
    made, source = read_manifest(target), read_manifest(checkpoint)
    if made is None or source is None or not (target / LATEST).is_file():
        return False
    state = "trainer_state.json"
    same = made.step == source.step and made.files.get(state) == source.files.get(state)
    return same and defect(target, hashes=True) is None


def _check_space(checkpoint: Path, run_dir: Path) -> None:
    manifest = read_manifest(checkpoint)
    shares = {} if manifest is None else manifest.files
    needed = _TIMES * sum(facts.bytes for name, facts in shares.items() if name.startswith("global_step"))
    free = read_folder(run_dir).free
    if free < needed:
        message = (
            f"converting the checkpoint takes {needed / 2**30:.1f} GiB in {run_dir}, where "
            f"{free / 2**30:.1f} GiB are free"
        )
        hint = "free some space, or resume with the ranks and the stage that wrote it"
        raise MachineError(Problem(DISK_FULL, message, hint=hint))


def remove_converted(run_dir: Path, keep: Path | None = None) -> None:
    """Remove converted checkpoints except `keep`, which is about to be read."""
    for folder in (run_dir / CONVERTED).glob("*") if keep is not None else [run_dir / CONVERTED]:
        if folder != keep:
            shutil.rmtree(folder, ignore_errors=True)
