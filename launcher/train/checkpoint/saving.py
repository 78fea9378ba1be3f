"""Checkpoints that are complete or absent, with a free-space check before each save.

The Trainer writes into checkpoints/.saving/checkpoint-N. When all ranks are done, every file is hashed and
synced, the manifest is written last, and the folder gets its name. Only then are older ones removed.
`launcher/files/checkpoint.py` says what a reader may rely on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from launcher.errors import Problem, RunFailed
from launcher.files.checkpoint import (
    FINISHED_BEFORE,
    MANIFEST,
    SAVING,
    SCHEMA_VERSION,
    SPARE,
    FileFacts,
    bytes_beside_tensors,
    complete_checkpoints,
    defect,
    read_manifest,
    surplus,
)
from launcher.files.safe_files import parse_json, write_json
from launcher.machine.software import installed_versions
from launcher.train import faults
from launcher.train.checkpoint.disk import (
    OwnRunDir,
    SaveFailed,
    clean,
    free_bytes,
    hash_and_sync,
    is_full,
    is_unwritable,
    mib,
    publish,
    remove_folder,
    save_problem,
    sync_file,
    sync_folder,
    sync_tree,
)
from launcher.train.collectives import of_all, of_rank_0
from launcher.train.job import rank, world_size
from launcher.train.memory_meter import bytes_by_device, optimizer_tensors
from launcher.train.upstream.deepspeed_seams import finish_decoupled_save

GROWTH = 0.01
"""A checkpoint may be this much larger than the one before: the log in trainer_state.json grows."""
SEEN_S = 60.0
"""How long rank 0 waits for the files of other nodes, which a network filesystem may show late."""


class SaveSkipped(Exception):
    """Not enough free space for this checkpoint; the run continues without it."""


@dataclass
class Saved:
    """The saves of this run; `checkpoints` of result.json."""

    saved: int = 0
    skipped: list[dict[str, Any]] = field(default_factory=list)
    seconds: float | None = None
    bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Saver:
    """Saves the checkpoints of one run; every rank calls the same methods."""

    def __init__(self, folder: Path, limit: int | None) -> None:
        """folder: RUN_DIR/checkpoints. limit: how many are kept, at least the newest and the best one."""
        self.folder = folder
        self._own = OwnRunDir(folder.parent)
        self.limit = limit
        self.record = Saved()
        self.started = time.monotonic()
        """When the run's time began to count."""
        self.earlier_s: float | None = 0.0
        """Seconds of the earlier starts; None if the checkpoint does not have it."""

    @property
    def elapsed(self) -> float | None:
        """Seconds of the run over all its starts; None if unknown."""
        return None if self.earlier_s is None else self.earlier_s + time.monotonic() - self.started

    @property
    def aside(self) -> Path:
        return self.folder / SAVING

    def final(self, step: int) -> Path:
        return self.folder / f"checkpoint-{step}"

    def save(self, trainer: Any, write: Callable[[Path], None]) -> Path:
        """Save one checkpoint; its path. write: the Trainer's own save, into a folder.

        Raises SaveSkipped without enough free space, SaveFailed if the disk fails meanwhile.
        """
        step, begun = trainer.state.global_step, time.monotonic()
        needed = self._needed(trainer)
        with self._complete_or_absent(f"checkpoint-{step}", self.aside, needed):
            self._check_space(step, needed, best_step(trainer))
            with faults.saving(step):
                write(self.aside)
                if trainer.is_deepspeed_enabled:
                    finish_decoupled_save(trainer.deepspeed)
            faults.inside_save(step)
            self._settle_best(trainer, step)
            total = seal(self.aside / f"checkpoint-{step}", self.folder.parent, step, begun, self.elapsed)
            if rank() == 0:
                publish(self.aside / f"checkpoint-{step}", self.final(step))
        of_all(None)  # nobody continues before the checkpoint is where the state says
        self._retire(step, best_step(trainer))
        self.record.saved += 1
        self.record.seconds, self.record.bytes = round(time.monotonic() - begun, 3), total
        return self.final(step)

    def save_result(self, trainer: Any, final: Path, write: Callable[[Path], None]) -> None:
        """Save the trained weights, complete or not at all; `write` fills a folder. Every rank must call it.

        Raises SaveFailed without enough free space.
        """
        aside = final.parent / SAVING / final.name
        needed = first_save_bytes(trainer, weights_alone=True)
        with self._complete_or_absent(final.name, aside.parent, needed):
            if not of_rank_0(_make_result_folder(aside, needed) if rank() == 0 else None):
                raise OSError(errno.ENOSPC, "not enough free space for the result")
            write(aside)
            of_all(None)  # all have written
            if rank() == 0:
                sync_tree(aside)
                # Its result.json describes the earlier result, which is replaced now.
                (final.parent / FINISHED_BEFORE).unlink(missing_ok=True)
                publish(aside, final)
                remove_folder(aside.parent)
        of_all(None)

    def _needed(self, trainer: Any) -> int:
        """Bytes of the next checkpoint; every rank must call it."""
        last = self.record.bytes
        if last is None:
            last = of_rank_0(_newest_bytes(self.folder) if rank() == 0 else None)
        if last is None:
            return first_save_bytes(trainer, weights_alone=False) + SPARE
        return int(last * (1 + GROWTH)) + SPARE

    def _check_space(self, step: int, needed: int, best: int | None) -> None:
        """SaveSkipped, on all ranks, if `needed` bytes are not free and cannot be freed."""
        free = of_rank_0(self._make_space(step, needed, best) if rank() == 0 else None)
        if free >= needed:
            return
        last = max(complete_checkpoints(self.folder), default=None) if rank() == 0 else None
        reason = f"it takes {mib(needed)}, {mib(free)} are free in {self.folder}"
        self.record.skipped.append({"step": step, "reason": reason})
        if rank() == 0:
            kept = (
                "there is no checkpoint yet"
                if last is None
                else f"the last complete one is checkpoint-{last}"
            )
            print(
                f"WARNING: checkpoint-{step} is not saved: {reason}. The run continues and saves again "
                f"when the next save is due; {kept}. Free disk space, or lower trainer.save_total_limit.",
                flush=True,
            )
        raise SaveSkipped(reason)

    def _make_space(self, step: int, needed: int, best: int | None) -> int:
        """Free bytes (rank 0), if necessary after removing what this save would make superfluous."""
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.aside, ignore_errors=True)
        clean(self.folder)
        removable = self._superfluous(step, best)
        if free_bytes(self.folder) + sum(map(_bytes, removable)) >= needed:
            for old in removable:
                if free_bytes(self.folder) < needed:
                    print(f"removing {old} to free space for checkpoint-{step}")
                    remove_folder(old)
        free = free_bytes(self.folder)
        if free >= needed:  # the Trainer looks for the folder before every engine has written something
            (self.aside / f"checkpoint-{step}").mkdir(parents=True)
        return free

    def _superfluous(self, step: int, best: int | None) -> list[Path]:
        """What will be removed after this save, except for checkpoints that may be resumed until then."""
        there = complete_checkpoints(self.folder)
        needed = {best, max(there, default=step), max((n for n in there if n <= step), default=step)}
        return [there[n] for n in surplus([*there, step], step, self.limit, best) if n not in needed]

    @contextlib.contextmanager
    def _complete_or_absent(self, name: str, aside: Path, needed: int) -> Iterator[None]:
        """If anything fails within, `aside` is removed; a disk that fails ends the run."""
        if rank() == 0:
            with self.explained(name, aside.parent, needed):
                self._own.check()  # before anything is made or removed there
        with self.explained(name, aside.parent, needed, aside):
            yield

    @contextlib.contextmanager
    def explained(
        self, name: str, folder: Path, needed: int = SPARE, aside: Path | None = None
    ) -> Iterator[None]:
        """SaveFailed if something within cannot be written; `aside` is removed if anything fails."""
        try:
            yield
        except (SaveSkipped, SaveFailed):
            raise
        except (Exception, CheckpointException) as raised:
            at, error = time.time(), _first_failure(raised)
            if aside is not None:
                shutil.rmtree(aside, ignore_errors=True)
            if not (is_full(error) or is_unwritable(error)):
                if error is raised:
                    raise
                raise error from raised
            last = max(complete_checkpoints(self.folder), default=None)
            raise SaveFailed(save_problem(name, folder, needed, last, error), at) from error

    def _settle_best(self, trainer: Any, step: int) -> None:
        """Set the final path of the best checkpoint in the state.

        The Trainer looked for it next to the one that it writes, where there is no earlier one.
        """
        state = trainer.state
        found = of_rank_0(self._best_place(state, step) if rank() == 0 else None)
        if found != state.best_model_checkpoint:
            state.best_model_checkpoint = found
            if trainer.args.should_save:
                state.save_to_json(str(self.aside / f"checkpoint-{step}" / "trainer_state.json"))

    def _best_place(self, state: Any, step: int) -> str | None:
        """The final path of the best checkpoint; of an earlier best one if its save was skipped."""
        best: int | None = state.best_global_step
        if best and (best == step or defect(self.final(best), hashes=False) is None):
            return str(self.final(best))
        earlier: str | None = state.best_model_checkpoint
        return earlier

    def _retire(self, step: int, best: int | None) -> None:
        """Remove the checkpoints beyond the limit (rank 0), now that the newest is complete."""
        if rank() != 0:
            return
        there = complete_checkpoints(self.folder)
        for folder in (self.aside, *(there[n] for n in surplus(list(there), step, self.limit, best))):
            try:
                remove_folder(folder)
            except OSError as error:  # it stays; the new one is complete
                print(f"{folder} cannot be removed: {error}")
        clean(self.folder)


def _first_failure(error: BaseException) -> BaseException:
    """That of a rank where torch has wrapped it; its CheckpointException is no Exception (torch 2.13)."""
    wrapped: dict[int, tuple[BaseException, Any]] = getattr(error, "failures", {})
    return next((failure for failure, _ in wrapped.values()), error)


def _make_result_folder(aside: Path, needed: int) -> bool:
    """Make an empty folder for the result, if its bytes are free."""
    shutil.rmtree(aside.parent, ignore_errors=True)
    if free_bytes(aside.parent.parent) < needed:
        return False
    aside.mkdir(parents=True)
    return True


def _bytes(checkpoint: Path) -> int:
    manifest = read_manifest(checkpoint)
    return 0 if manifest is None else manifest.bytes


def _newest_bytes(folder: Path) -> int | None:
    """Bytes of this run's newest checkpoint; None without one."""
    there = complete_checkpoints(folder)
    return _bytes(there[max(there)]) if there else None


def best_step(trainer: Any) -> int | None:
    """The step of the best checkpoint that is on the disk, or will be after this save."""
    best = trainer.state.best_model_checkpoint
    if best is None:
        return None
    number = Path(best).name.rpartition("-")[2]
    return int(number) if number.isdigit() else None


def first_save_bytes(trainer: Any, *, weights_alone: bool) -> int:
    """Bytes of the first checkpoint, or of its weights alone, by the tensors that the engine will write.

    As `_save_optimizer_and_scheduler` and `save_model` of transformers/trainer.py write them. Every rank must
    call it.
    """
    adapter = hasattr(trainer.model, "peft_config")
    weights: int = sum(  # tied ones once, sharded ones in full: ZeRO-3 keeps the number, a DTensor knows it
        int(getattr(parameter, "ds_numel", None) or parameter.numel()) * parameter.element_size()
        for parameter in trainer.model.parameters()
        if parameter.requires_grad or not adapter
    )
    if weights_alone:
        return weights
    if trainer.args.save_only_model:
        return weights + _beside(trainer)
    copies = 1  # DeepSpeed below stage 3 and full FSDP states repeat the weights
    if trainer.is_fsdp_enabled:
        copies = 2 if "FULL" in str(trainer.accelerator.state.fsdp_plugin.state_dict_type) else 1
    elif trainer.is_deepspeed_enabled and trainer.deepspeed.zero_optimization_stage() < 3:
        copies = 2
    own = of_all(sum(bytes_by_device(optimizer_tensors(trainer.model, trainer.optimizer)).values()))
    sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    return copies * weights + (sum(own) if sharded else int(own[0])) + _beside(trainer)


def _beside(trainer: Any) -> int:
    config = trainer.model_config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bytes_beside_tensors(getattr(text, "vocab_size", None) or 0)


def seal(folder: Path, run_dir: Path, step: int, begun: float, elapsed: float | None = None) -> int:
    """Hash and sync what all ranks have written, then write the manifest; bytes of the checkpoint.

    begun: time.monotonic() when the save began. elapsed: seconds of the run so far, None if unknown. Raises
    OSError if a file cannot be read or synced. Every rank must call it.
    """
    of_all(None)  # all have written
    plan = run_dir / "plan.json"
    if rank() == 0 and plan.is_file():
        shutil.copyfile(plan, folder / "plan.json")
    of_rank_0(None)
    shares = _share(of_all(_sizes(folder)))
    found: dict[str, FileFacts] = {}
    for part in of_all(hash_and_sync(folder, shares[rank()])):
        found.update(part)
    if rank() == 0:
        _await(folder, found)
        _write_manifest(folder, run_dir, step, found, time.monotonic() - begun, elapsed)
    return sum(facts.bytes for facts in found.values())


def _sizes(folder: Path) -> dict[str, int]:
    """Path below `folder`, with slashes -> bytes, of all files that this node sees."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _share(listings: Sequence[Mapping[str, int]]) -> list[list[str]]:
    """The files by the rank that hashes them, balanced by size among the ranks that see them."""
    sizes: dict[str, int] = {}
    for listing in listings:
        sizes.update(listing)
    shares: list[list[str]] = [[] for _ in listings]
    loads = [0] * len(listings)
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        who = min((n for n, seen in enumerate(listings) if name in seen), key=lambda n: (loads[n], n))
        shares[who].append(name)
        loads[who] += sizes[name]
    return shares


def _await(folder: Path, found: Mapping[str, FileFacts]) -> None:
    """RunFailed if rank 0 does not see the files of other ranks: the checkpoint would be incomplete."""
    until = time.monotonic() + SEEN_S
    while absent := sorted(found.keys() - _sizes(folder).keys()):
        if time.monotonic() > until:
            raise RunFailed(
                Problem(
                    "checkpoints-not-shared",
                    f"node rank 0 does not see what other nodes wrote of a checkpoint ({absent[0]}, "
                    f"{len(absent)} files)",
                    file=str(folder),
                    hint="set --output-dir to a run directory that all nodes share",
                )
            )
        time.sleep(0.5)


def _write_manifest(
    folder: Path,
    run_dir: Path,
    step: int,
    files: Mapping[str, FileFacts],
    seconds: float,
    elapsed: float | None,
) -> None:
    write_json(
        folder / MANIFEST,
        {
            "schema_version": SCHEMA_VERSION,
            "step": step,
            "world_size": world_size(),
            "files": {name: asdict(files[name]) for name in sorted(files)},
            "bytes": sum(facts.bytes for facts in files.values()),
            "seconds": round(seconds, 3),
            "elapsed": None if elapsed is None else round(elapsed, 3),
            "data": _data_key(run_dir),
            "versions": installed_versions(),
        },
    )
    sync_file(folder / MANIFEST)
    for place in {folder, *(folder / name for name in map(os.path.dirname, files) if name)}:
        sync_folder(place)


def _data_key(run_dir: Path) -> str | None:
    """The key of the prepared data; None if it is streamed, or no launcher prepared it."""
    try:
        found = parse_json((run_dir / "data.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found.get("key") if isinstance(found, dict) else None
