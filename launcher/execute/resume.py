"""Choose and verify the checkpoint that a run resumes from, and convert it for other ranks or ZeRO stages.

Converted checkpoints are in RUN_DIR/converted/, which neither `complete_checkpoints` nor the retention of a
run reads, and are removed when the run has saved a checkpoint of its own. The original stays.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launcher.errors import MachineError, Problem, RecipeError, RunFailed
from launcher.execute.endings import interruption
from launcher.execute.following import Look, Start, blind, follow
from launcher.execute.run_dir import unwritable
from launcher.facts.checkpoint import (
    MANIFEST,
    ORIGIN,
    complete_checkpoints,
    defect,
    incomplete_checkpoints,
    read_manifest,
    read_origin,
)
from launcher.facts.rank_status import CONVERT_STAGE, read_statuses
from launcher.facts.safe_files import write_text
from launcher.facts.storage import read_folder
from launcher.plan.inputs import Pace
from launcher.render.bundle import Bundle, dump_json

_NAME = "runs/NAME/TIME/checkpoints/checkpoint-100"


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

    def words(self) -> list[str]:
        """Lines for the user."""
        said = [f"{folder.name} is skipped: {wrong}" for folder, wrong in self.skipped.items()]
        if self.checkpoint is None:
            return [*said, "no checkpoint to resume from: the run starts from the beginning"]
        size = f"{self.verified_bytes / 2**20:,.1f} MiB" if self.verified_bytes else "nothing"
        return [*said, f"resumes from {self.checkpoint} (step {self.step}; {size} verified by hash)"]


def choose_checkpoint(run_dir: Path) -> Chosen:
    """The newest checkpoint of a run whose files match its manifest; damaged ones are skipped.

    For every start that resumes a run: `--resume auto`, restarts, `on_oom: adapt`. Reads all bytes of the
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
    """The checkpoint that a user named: its folder, or a run directory, for its newest complete one.

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
                "; ".join(["the run directory contains no complete checkpoint", *wrong]),
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
                hint="name another one, or --resume auto for the newest complete one",
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
    """Seconds of a step in the last start of a run, and of a save in its checkpoints."""
    steps = [status.median for status in read_statuses(run_dir).values() if status.median is not None]
    whole = complete_checkpoints(run_dir / "checkpoints").values()
    saves = [found.seconds for path in whole if (found := read_manifest(path)) is not None]
    return Pace(max(steps, default=None), max(saves, default=None))


def write_origin(run_dir: Path, checkpoint: Path) -> None:
    """Record the checkpoint of another run that this one starts from. Raises as `unwritable`."""
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
    """Incomplete checkpoints and what is wrong with each."""
    yield from sorted(incomplete_checkpoints(run_dir / "checkpoints").items())


def _step(path: Path) -> int:
    number = path.name.rpartition("-")[2]
    return int(number) if number.isdigit() else 0


def _bytes(folder: Path) -> int:
    manifest = read_manifest(folder)
    return 0 if manifest is None else manifest.bytes


CONVERTED = "converted"
LATEST = "latest_universal"
"""File of a universal checkpoint: names the folder that DeepSpeed reads."""
LOG = "convert.log"
_TIMES = 2
"""The shards are on the disk twice while they are merged."""
_STOP_S = 5.0


def converted(
    checkpoint: Path, run_dir: Path, why: str, say: Callable[[str], None], look: Look = blind
) -> Path:
    """Convert a verified checkpoint into a universal one, unless that exists already; its path.

    look: receives the progress.
    MachineError (4) where the disk lacks the room, RunFailed (5) where DeepSpeed cannot convert it,
    RecipeError (2) where reading it would run code, Interrupted (130) after a signal.
    """
    target = run_dir / CONVERTED / checkpoint.name
    if _is_of(target, checkpoint):
        say(f"the converted checkpoint {target} is there already")
        return target
    _check_room(checkpoint, run_dir)
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
    start = Start(
        argv, env, log, _nobody, stop_s=_STOP_S, orphaned_s=0.0, stage=CONVERT_STAGE, look=look
    )  # fmt: skip
    ended = follow(start)
    if ended.stopped_by is not None:
        raise interruption(run_dir, ended, again="run the command again; nothing of the run has changed")
    if ended.code != 0 or defect(target, hashes=False) is not None:
        raise _failed(ended.code, log)
    return target


def _nobody(line: str) -> None:
    """Discard a line; the log has it."""


def _failed(code: int, log: Path) -> RecipeError | RunFailed:
    try:
        lines = log.read_text("utf-8", errors="replace").strip().splitlines()
    except OSError:  # a full disk did not take the log either
        lines = []
    last = lines[-1] if lines else f"exit code {code}"
    problem = Problem(
        "conversion-failed",
        f"the checkpoint could not be converted for another number of ranks or ZeRO stage: {last}",
        file=str(log),
        hint="resume with the ranks and the stage that wrote it, or start a new run",
    )
    return RecipeError(problem) if code == RecipeError.exit_code else RunFailed(problem)


def _is_of(target: Path, checkpoint: Path) -> bool:
    """Whether a converted checkpoint is complete and was made from this one."""
    made, source = read_manifest(target), read_manifest(checkpoint)
    if made is None or source is None or not (target / LATEST).is_file():
        return False
    state = "trainer_state.json"
    same = made.step == source.step and made.files.get(state) == source.files.get(state)
    return same and defect(target, hashes=True) is None


def _check_room(checkpoint: Path, run_dir: Path) -> None:
    manifest = read_manifest(checkpoint)
    shares = {} if manifest is None else manifest.files
    needed = _TIMES * sum(facts.bytes for name, facts in shares.items() if name.startswith("global_step"))
    free = read_folder(run_dir).free
    if free >= needed:
        return
    raise MachineError(
        Problem(
            "disk-full",
            f"converting the checkpoint takes {needed / 2**30:.1f} GiB in {run_dir}, where "
            f"{free / 2**30:.1f} GiB are free",
            hint="free some space, or resume with the ranks and the stage that wrote it",
        )
    )


def remove_converted(run_dir: Path, keep: Path | None = None) -> None:
    """Remove converted checkpoints except `keep`, which is about to be read."""
    for folder in (run_dir / CONVERTED).glob("*"):
        if folder != keep:
            shutil.rmtree(folder, ignore_errors=True)
    if keep is None:
        shutil.rmtree(run_dir / CONVERTED, ignore_errors=True)


def show_start(bundle: Bundle, run_dir: Path, resume: str | None) -> None:
    """Write ds_config.json and command.sh of this start, with the checkpoint that it resumes from.

    `load_universal` is set only for a converted checkpoint: no other can be read with it. command.sh names
    that checkpoint; started manually when it is gone, it fails instead of training from the start.
    """
    is_converted = resume is not None and (Path(resume) / LATEST).is_file()
    if bundle.ds_config is not None:
        config = dict(bundle.ds_config)
        if is_converted:
            config["checkpoint"] = {**config.get("checkpoint", {}), "load_universal": True}
        write_text(run_dir / "ds_config.json", dump_json(config))
    script = bundle.files["command.sh"]
    if resume is not None:
        lines = _OF_CONVERTED + f"export EFFILAUNCH_RESUME={_shell(resume, run_dir)}\n"
        script = _RUN_DIR.sub(
            lambda line: line[0] + (lines if is_converted else _OF_RESUMED), script, count=1
        )
    write_text(run_dir / "command.sh", script)
    (run_dir / "command.sh").chmod(0o755)


def _shell(checkpoint: str, run_dir: Path) -> str:
    """A checkpoint's path as command.sh writes it: the run directory may be moved."""
    path = Path(checkpoint)
    inside = path.is_relative_to(run_dir)
    return f'"$run_dir"/{shlex.quote(str(path.relative_to(run_dir)))}' if inside else shlex.quote(checkpoint)


_RUN_DIR = re.compile(r"^run_dir=.*\n", re.MULTILINE)
_OF_RESUMED = """\
# This start resumed from a checkpoint. Started manually, it resumes from the newest complete one of this run,
# else from the one of another run that it began with (origin.json).
export EFFILAUNCH_RESUME="${EFFILAUNCH_RESUME-auto}"
"""
_OF_CONVERTED = """\
# This start resumed from a converted checkpoint, which is removed once the run has saved one of its own.
# ds_config.json (checkpoint.load_universal) reads no other: from then on use `effilaunch run --resume auto`,
# which writes both files again.
"""
