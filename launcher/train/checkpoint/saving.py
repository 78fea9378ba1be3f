"""Checkpoints that are complete or absent, in a room that was looked at before.

The Trainer writes into checkpoints/.saving/checkpoint-N. When all ranks are done, every file is hashed and
put on the disk, the manifest is written behind everything else, and the folder gets its name. Only then do
older ones go. What a reader may count on stands in `launcher/facts/checkpoint.py`.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launcher.facts.checkpoint import (
    FINISHED_BEFORE,
    SAVING,
    complete_checkpoints,
    defect,
    read_manifest,
)
from launcher.train import faults
from launcher.train.checkpoint.disk_full import (
    SaveFailed,
    free_bytes,
    full_problem,
    is_full,
    is_unwritable,
    mib,
    unwritable_problem,
)
from launcher.train.checkpoint.moving import clean, publish, remove_folder, sync_tree
from launcher.train.checkpoint.own_run_dir import OwnRunDir
from launcher.train.checkpoint.save_size import first_save_bytes
from launcher.train.checkpoint.sealing import seal
from launcher.train.job import rank
from launcher.train.together import of_all, of_rank_0
from launcher.train.upstream.deepspeed_seams import finish_decoupled_save

GROWTH = 0.01
"""A checkpoint may be this much larger than the one before: the log in trainer_state.json grows."""
SPARE = 2**20
"""Bytes left free for the logs of the run."""


class SaveSkipped(Exception):
    """There is no room for this checkpoint; the run goes on without it."""


@dataclass
class Saved:
    """What became of this run's saves; `checkpoints` of result.json."""

    saved: int = 0
    skipped: list[dict[str, Any]] = field(default_factory=list)
    seconds: float | None = None
    bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Saver:
    """Saves the checkpoints of one run; the same methods are called on every rank."""

    def __init__(self, folder: Path, limit: int | None) -> None:
        """folder: RUN_DIR/checkpoints; limit: how many stay, at least the newest and the best one."""
        self.folder = folder
        self._own = OwnRunDir(folder.parent)
        self.limit = limit
        self.record = Saved()
        self.started = time.monotonic()
        """When the run's time began to count."""
        self.earlier_s: float | None = 0.0
        """Seconds that the starts before took; None where the checkpoint does not have it."""

    @property
    def elapsed(self) -> float | None:
        """Seconds that the run has taken by now, over all its starts; None where that is not known."""
        return None if self.earlier_s is None else self.earlier_s + time.monotonic() - self.started

    @property
    def aside(self) -> Path:
        return self.folder / SAVING

    def final(self, step: int) -> Path:
        return self.folder / f"checkpoint-{step}"

    def save(self, trainer: Any, write: Callable[[Path], None]) -> Path:
        """One checkpoint; `write`: the Trainer's own save, into a folder. Returns where it lies.

        Raises SaveSkipped where there is no room for it, SaveFailed where the disk gave out in the middle.
        """
        step, begun = trainer.state.global_step, time.monotonic()
        needed = self._needed(trainer)
        with self._whole_or_nothing(f"checkpoint-{step}", self.aside, needed):
            self._check_room(step, needed, best_step(trainer))
            with faults.saving(step):
                write(self.aside)
                if trainer.is_deepspeed_enabled:
                    finish_decoupled_save(trainer.deepspeed)
            faults.inside_save(step)
            self._settle_best(trainer, step)
            total = seal(self.aside / f"checkpoint-{step}", self.folder.parent, step, begun, self.elapsed)
            if rank() == 0:
                publish(self.aside / f"checkpoint-{step}", self.final(step))
        of_all(None)  # nobody goes on before the checkpoint is where the state says
        self._retire(step, best_step(trainer))
        self.record.saved += 1
        self.record.seconds, self.record.bytes = round(time.monotonic() - begun, 3), total
        return self.final(step)

    def save_result(self, trainer: Any, final: Path, write: Callable[[Path], None]) -> None:
        """The trained weights, whole or not at all; `write` fills a folder. Every rank must call it.

        Raises SaveFailed where there is no room for them.
        """
        aside = final.parent / SAVING / final.name
        needed = first_save_bytes(trainer, weights_alone=True)
        with self._whole_or_nothing(final.name, aside.parent, needed):
            if of_rank_0(_ready(aside, needed) if rank() == 0 else None) is not None:
                raise OSError(errno.ENOSPC, "there is no room for the result")
            write(aside)
            of_all(None)  # all have written
            if rank() == 0:
                sync_tree(aside)
                # Its result.json tells of the earlier result, which is replaced now.
                (final.parent / FINISHED_BEFORE).unlink(missing_ok=True)
                publish(aside, final)
                remove_folder(aside.parent)
        of_all(None)

    def _needed(self, trainer: Any) -> int:
        """Bytes that the next checkpoint takes; every rank must call it."""
        last = self.record.bytes
        if last is None:
            last = of_rank_0(_newest_bytes(self.folder) if rank() == 0 else None)
        if last is None:
            return first_save_bytes(trainer, weights_alone=False) + SPARE
        return int(last * (1 + GROWTH)) + SPARE

    def _check_room(self, step: int, needed: int, best: int | None) -> None:
        """SaveSkipped, on all ranks alike, where `needed` bytes are not free and cannot be made so."""
        free = of_rank_0(self._make_room(step, needed, best) if rank() == 0 else None)
        if free >= needed:
            return
        good = max(complete_checkpoints(self.folder), default=None) if rank() == 0 else None
        reason = f"it takes {mib(needed)}, {mib(free)} are free in {self.folder}"
        self.record.skipped.append({"step": step, "reason": reason})
        if rank() == 0:
            behind = (
                "no checkpoint is there yet" if good is None else f"the last good one is checkpoint-{good}"
            )
            print(
                f"WARNING: checkpoint-{step} is not saved: {reason}. The run goes on and tries again at the "
                f"next save; {behind}. Make room, or lower trainer.save_total_limit.",
                flush=True,
            )
        raise SaveSkipped(reason)

    def _make_room(self, step: int, needed: int, best: int | None) -> int:
        """Free bytes (rank 0), where need be after the removal of what this save would make superfluous."""
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.aside, ignore_errors=True)
        clean(self.folder)
        going = self._superfluous(step, best)
        if free_bytes(self.folder) + sum(map(_bytes, going)) >= needed:
            for old in going:
                if free_bytes(self.folder) < needed:
                    print(f"removing {old} to make room for checkpoint-{step}")
                    remove_folder(old)
        free = free_bytes(self.folder)
        if free >= needed:  # the Trainer looks for it before every engine has written something
            (self.aside / f"checkpoint-{step}").mkdir(parents=True)
        return free

    def _superfluous(self, step: int, best: int | None) -> list[Path]:
        """What goes when this save is done, but for those that the run would go on from until then."""
        there = complete_checkpoints(self.folder)
        needed = {best, max(there, default=step), max((n for n in there if n <= step), default=step)}
        return [there[n] for n in surplus([*there, step], step, self.limit, best) if n not in needed]

    @contextlib.contextmanager
    def _whole_or_nothing(self, name: str, aside: Path, needed: int) -> Iterator[None]:
        """Where anything goes wrong within, nothing of `aside` stays; a disk that gives out ends the run."""
        if rank() == 0:
            with self.told(name, aside.parent, needed):
                self._own.check()  # before anything is made or removed there
        with self.told(name, aside.parent, needed, aside):
            yield

    @contextlib.contextmanager
    def told(self, name: str, folder: Path, needed: int = SPARE, aside: Path | None = None) -> Iterator[None]:
        """SaveFailed where something within cannot be written; `aside` is removed when anything fails."""
        try:
            yield
        except (SaveSkipped, SaveFailed):
            raise
        except Exception as error:
            at = time.time()
            if aside is not None:
                shutil.rmtree(aside, ignore_errors=True)
            if not (is_full(error) or is_unwritable(error)):
                raise
            good = max(complete_checkpoints(self.folder), default=None)
            problem = (
                full_problem(name, folder, needed, good, error)
                if is_full(error)
                else unwritable_problem(name, folder, good, error)
            )
            raise SaveFailed(problem, at) from error

    def _settle_best(self, trainer: Any, step: int) -> None:
        """The state names the best checkpoint by the place where it will lie, not by the one it has now.

        The Trainer looked for it beside the one that it writes, where no earlier one is.
        """
        state = trainer.state
        found = of_rank_0(self._best_place(state, step) if rank() == 0 else None)
        if found != state.best_model_checkpoint:
            state.best_model_checkpoint = found
            if trainer.args.should_save:
                state.save_to_json(str(self.aside / f"checkpoint-{step}" / "trainer_state.json"))

    def _best_place(self, state: Any, step: int) -> str | None:
        """Where the best checkpoint will lie; an earlier best where this one's save was left out."""
        best: int | None = state.best_global_step
        if best and (best == step or defect(self.final(best), hashes=False) is None):
            return str(self.final(best))
        earlier: str | None = state.best_model_checkpoint
        return earlier

    def _retire(self, step: int, best: int | None) -> None:
        """Remove the checkpoints beyond the limit (rank 0), now that the newest is whole."""
        if rank() != 0:
            return
        there = complete_checkpoints(self.folder)
        for folder in (self.aside, *(there[n] for n in surplus(list(there), step, self.limit, best))):
            try:
                remove_folder(folder)
            except OSError as error:  # it stays; the new one is whole
                print(f"{folder} cannot be removed: {error}")
        clean(self.folder)


def surplus(steps: Sequence[int], now: int, limit: int | None, best: int | None) -> list[int]:
    """Which checkpoints go when the one of step `now` is saved, the first to go first. Pure.

    `limit` stay, and always that of `now` and the best one. Those beyond `now` go first: the run went back
    behind them, and trains these steps anew.
    """
    if not limit or limit < 0:
        return []
    present = set(steps)
    kept = {now, best} & present
    order = sorted((n for n in present if n > now), reverse=True) + sorted(n for n in present if n <= now)
    too_many = len(present) - max(limit, len(kept))
    return [step for step in order if step not in kept][: max(0, too_many)]


def _ready(aside: Path, needed: int) -> int | None:
    """An empty folder for the result; the free bytes where they are fewer than it takes."""
    shutil.rmtree(aside.parent, ignore_errors=True)
    free = free_bytes(aside.parent.parent)
    if free < needed:
        return free
    aside.mkdir(parents=True)
    return None


def _bytes(checkpoint: Path) -> int:
    manifest = read_manifest(checkpoint)
    return 0 if manifest is None else manifest.bytes


def _newest_bytes(folder: Path) -> int | None:
    """Bytes of this run's newest checkpoint; None without one."""
    there = complete_checkpoints(folder)
    return _bytes(there[max(there)]) if there else None


def best_step(trainer: Any) -> int | None:
    """The step of the best checkpoint that lies on the disk, or will when this save is done."""
    best = trainer.state.best_model_checkpoint
    if best is None:
        return None
    number = Path(best).name.rpartition("-")[2]
    return int(number) if number.isdigit() else None
