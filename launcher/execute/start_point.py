"""Where a run starts: a new run directory, or a checkpoint that `run --resume` names and verifies."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.execute.endings import push_failure
from launcher.execute.following import Look, blind
from launcher.execute.resume import (
    Chosen,
    choose_checkpoint,
    converted,
    is_run,
    remove_converted,
    verify_checkpoint,
    verify_origin,
    write_origin,
)
from launcher.execute.run_dir import (
    LOCK,
    MARKER,
    claimed,
    default_run_dir,
    locked,
    newest_run_dir,
    scratch_run_dir,
    set_aside_after,
    unwritable,
    write_run_dir,
)
from launcher.execute.start import prepare_data, show_start
from launcher.files.checkpoint import (
    FINISHED_BEFORE,
    SUPERSEDED,
    Manifest,
    complete_checkpoints,
    read_manifest,
    read_origin,
    same_samples,
)
from launcher.files.safe_files import parse_json, read_record
from launcher.plan.stored import StoredPlan
from launcher.planner.resuming import Resumption, compare_data, compare_plans, compare_versions
from launcher.render.bundle import Bundle

PLAN = "plan.json"


@dataclass(frozen=True, slots=True)
class Beginning:
    """The run directory, and the checkpoint from which the run continues."""

    run_dir: Path
    """Absolute; need not exist."""
    chosen: Chosen | None = None
    """The checkpoint; None without --resume, and until it is chosen."""
    is_proposed: bool = False
    """Whether the run directory has a default name and does not exist yet."""
    takes_newest: bool = False
    """Whether it is `--resume auto`."""
    proposed: Path | None = None
    """Without --output-dir: what a new run directory would be called."""
    named: Path | None = None
    """What --resume PATH names, absolute: a checkpoint or a run directory."""
    records: Path | None = None
    """Where the run's records are, if not in its directory: a run from an object store, on another disk."""

    @property
    def checkpoint(self) -> Path | None:
        return None if self.chosen is None else self.chosen.checkpoint

    @property
    def step(self) -> float:
        """The step to continue from; infinite without --resume."""
        return inf if self.chosen is None else self.chosen.step

    @property
    def is_newest(self) -> bool:
        """Whether the run has no later checkpoint."""
        newest = max(complete_checkpoints(self.run_dir / "checkpoints"), default=0)
        return self.step >= newest

    @property
    def lines(self) -> list[str]:
        """Lines for the user."""
        return [] if self.chosen is None else self.chosen.lines()


def run_place(recipe: Path, resume: str | None, output_dir: str | None) -> Beginning:
    """The run directory of a start, whose checkpoint `beginning` chooses.

    --output-dir; else that of the recipe's last run (--resume auto), or of the checkpoint (--resume PATH).
    """
    proposed = default_run_dir(str(recipe), Path.cwd())
    given = None if not output_dir else Path(output_dir).absolute()
    if resume is None:
        return Beginning(given or proposed.absolute(), is_proposed=given is None)
    if resume == "auto":
        found = given or newest_run_dir(str(recipe), Path.cwd())
        return Beginning(
            (found or proposed).absolute(), is_proposed=found is None, takes_newest=True,
            proposed=None if given else proposed,
        )  # fmt: skip
    named = Path(resume).absolute()
    return Beginning(given or _run_of(named), named=named)


@contextlib.contextmanager
def beginning(place: Beginning, say: Callable[[str], None]) -> Iterator[Beginning]:
    """Hold the run directory that is resumed, then choose and verify the checkpoint.

    In this order, since ranks of a killed start save a checkpoint, or finish the run, while they leave.
    `auto` uses the newest complete checkpoint, else the one with which the run began, else step 0, so that a
    job script needs only one command. Raises RecipeError if PATH is no intact checkpoint, and as `locked`.
    """
    if place.named is None and not place.takes_newest:
        yield place
        return
    with contextlib.ExitStack() as held:
        if any((place.run_dir / name).is_file() for name in (LOCK, PLAN)):
            try:
                held.enter_context(locked(place.run_dir, say))
            except OSError as error:
                raise unwritable(place.run_dir, error) from error
        chosen = _newest(place.run_dir) if place.named is None else _named(place)
        yield replace(place, chosen=chosen)


def _run_of(named: Path) -> Path:
    return named if is_run(named) else named.parent.parent


def _newest(run_dir: Path) -> Chosen:
    """The newest complete checkpoint of a run directory, else that with which its run began, else step 0."""
    chosen = choose_checkpoint(run_dir)
    if chosen.checkpoint is None and (origin := read_origin(run_dir)) is not None:
        chosen = replace(verify_origin(run_dir, origin), skipped=chosen.skipped)
    return chosen


def _named(place: Beginning) -> Chosen:
    assert place.named is not None, "only --resume PATH names one"
    chosen, own = verify_checkpoint(place.named), _run_of(place.named)
    assert chosen.checkpoint is not None, "verify_checkpoint raises where there is none"
    if place.run_dir == own and chosen.checkpoint.name.startswith(SUPERSEDED):
        message = "it belongs to a continuation that was replaced by another one in the same run directory"
        hint = "name a new --output-dir to continue from it"
        raise RecipeError(Problem("not-a-checkpoint", message, file=str(chosen.checkpoint), hint=hint))
    if place.run_dir != own and (place.run_dir / PLAN).is_file():
        _refuse_another_run(place.run_dir, chosen.checkpoint)
    return chosen


def with_own_folder(begins: Beginning) -> Beginning:
    """Create the default run directory, under a name that no other start gets."""
    if not begins.is_proposed:
        return begins
    return replace(begins, run_dir=claimed(begins.run_dir), is_proposed=False)


def _refuse_another_run(folder: Path, checkpoint: Path) -> None:
    """Raise RecipeError unless the run in `folder` began with this checkpoint and has saved no other."""
    if read_origin(folder) != checkpoint:
        message = f"{folder} contains another run than that of {checkpoint}"
        hint = "name a new --output-dir, or none to continue in the checkpoint's own"
    elif complete_checkpoints(folder / "checkpoints"):
        message = f"the run in {folder} began with {checkpoint} and has saved checkpoints of its own since"
        hint = "--resume auto continues it; or name a new --output-dir"
    else:
        return
    raise RecipeError(Problem("run-dir-not-empty", message, hint=hint))


def check_resumption(begins: Beginning, bundle: Bundle, say: Callable[[str], None]) -> Resumption:
    """Compare with the plan of the checkpoint. Raises RecipeError with all changes that are not allowed."""
    if begins.checkpoint is None:
        is_finished = all((begins.run_dir / name).is_file() for name in (MARKER, "result.json"))
        if begins.lines and not is_finished:  # a finished run does not start again, see finished_result
            say("\n".join([*begins.lines, ""]))
        return Resumption(())
    manifest = _manifest(begins.checkpoint)
    before = plan_of_checkpoint(begins.checkpoint)
    found = compare_plans(before, stored_plan(bundle), manifest.world_size)
    if found.refused:
        raise RecipeError([difference.problem() for difference in found.refused])
    versions = compare_versions(manifest.versions, bundle.plan.versions)
    accepted = Resumption((*found.differences, *versions), found.conversion)
    say("\n".join([*begins.lines, *accepted.words, ""]))
    return accepted


def stored_plan(bundle: Bundle) -> StoredPlan:
    """The plan of a bundle as it will be read from a checkpoint."""
    return StoredPlan(json.loads(bundle.files[PLAN]), bundle.plan.kept.values())


def plan_of_checkpoint(checkpoint: Path) -> StoredPlan:
    """The plan of the run that wrote the checkpoint."""
    try:
        plan = StoredPlan(parse_json((checkpoint / PLAN).read_text("utf-8")))
        _ = plan.ranks, plan.settings
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        message = "the checkpoint has no plan that could be compared with the recipe"
        hint = "start a new run from its weights: model.name_or_path or adapter.path names the folder"
        problem = Problem("not-a-checkpoint", message, file=str(checkpoint / PLAN), hint=hint)
        raise RecipeError(problem) from error
    return plan


def _manifest(checkpoint: Path) -> Manifest:
    manifest = read_manifest(checkpoint)
    assert manifest is not None, "the checkpoint was verified"
    return manifest


@dataclass(frozen=True, slots=True)
class Length:
    """How long a plan trains."""

    max_steps: int | None
    num_train_epochs: float | None

    def exceeds(self, before: Length, steps: int) -> bool:
        """Whether this is longer than a run that was planned as `before` and finished after `steps` steps."""
        planned, now = (
            length.max_steps if length.max_steps is not None and length.max_steps > 0 else None
            for length in (before, self)
        )
        if now is not None:
            return now > max(steps, planned or 0)
        return planned is not None or (self.num_train_epochs or 0) > (before.num_train_epochs or 0)

    def settings(self) -> dict[str, float]:
        """Setting -> value of those that the plan has."""
        return {f"trainer.{name}": value for name, value in asdict(self).items() if value is not None}


def finished_result(begins: Beginning, bundle: Bundle, say: Callable[[str], None]) -> dict[str, Any] | None:
    """result.json, if the resumed run has finished and the recipe asks for no more steps; else None.

    Raises RecipeError if it asks for more, but not with --set, or there is no checkpoint to continue from.
    """
    run_dir = begins.run_dir
    markers = (run_dir / MARKER, run_dir / FINISHED_BEFORE)
    if begins.chosen is None or not any(marker.is_file() for marker in markers):
        return None
    try:
        result: dict[str, Any] = parse_json((run_dir / "result.json").read_text("utf-8"))
        planned = _planned_length(run_dir, result)
    except (OSError, ValueError):
        return None
    steps, trainer = int(result["steps"]), bundle.plan.trainer
    now = Length(trainer.max_steps, trainer.num_train_epochs)
    if not now.exceeds(planned, steps):
        again = (
            "" if begins.is_newest else "; to train again from an older checkpoint name a new --output-dir"
        )
        say(f"the run in {run_dir} has finished after step {steps}: nothing is left to train{again}\n")
        if (unpushed := push_failure(run_dir)) is not None:
            say(f"WARNING: {unpushed}\n")
        return result
    if not any(bundle.plan.provenance[name].by == "--set" for name in now.settings()):
        # The run may have been started with another --set than the recipe has.
        raise RecipeError(_longer_by_accident(run_dir, steps, planned, now))
    if begins.checkpoint is None:
        message = f"the run in {run_dir} has finished and kept no checkpoint: it cannot be made longer"
        hint = "start a new run in another --output-dir"
        raise RecipeError(Problem("nothing-to-resume", message, path="trainer.save_strategy", hint=hint))
    return None


def _longer_by_accident(run_dir: Path, steps: int, before: Length, now: Length) -> Problem:
    """The problem of a recipe that asks for more than a finished run trained, without --set."""
    old, new = (
        " and ".join(f"{name}: {value}" for name, value in length.settings().items())
        for length in (before, now)
    )
    name, value = next(iter(now.settings().items()), ("trainer", ""))
    message = f"the run in {run_dir} has finished after step {steps} ({old}); the recipe asks for {new}"
    hint = f"add --set {name}={value} to train it further; to keep its result, nothing has to be done"
    return Problem("finished-run", message, path=name, hint=hint)


def _planned_length(run_dir: Path, result: Mapping[str, Any]) -> Length:
    """The planned length of the finished run.

    RUN_DIR/plan.json is read last, because a later dry run or incomplete start may have replaced it; a result
    of command.sh lacks the values. Raises OSError or ValueError if nothing is readable.
    """
    if isinstance(planned := result.get("planned"), dict):
        return Length(planned.get("max_steps"), planned.get("num_train_epochs"))
    if complete := complete_checkpoints(run_dir / "checkpoints"):
        plan = plan_of_checkpoint(complete[max(complete)])
    else:
        plan = StoredPlan(parse_json((run_dir / PLAN).read_text("utf-8")))
    return Length(plan.trainer.max_steps, plan.trainer.num_train_epochs)


def check_data(begins: Beginning, bundle: Bundle, say: Callable[[str], None], look: Look = blind) -> None:
    """Raise RecipeError if the rows differ from those that the checkpoint was trained on.

    Prepares the data in a scratch directory, so that the run directory stays unchanged on an error; the run
    then finds the data in the cache. look: receives the progress.
    """
    if begins.checkpoint is None:
        return
    expected = _manifest(begins.checkpoint).data
    if expected is None:
        return
    with scratch_run_dir("resume") as aside:
        write_run_dir(bundle, aside, resume=False)
        prepare_data(bundle, aside, samples=0, echo=say, look=look)
        record = read_record(aside / "data.json")
    found, folder = record.get("key"), record.get("folder")
    if expected != found and folder and same_samples(Path(folder).parent / expected, Path(folder)):
        say(f"the prepared data has another key than that of {begins.checkpoint.name}, and the same samples")
        return
    differences = compare_data(expected, found, plan_of_checkpoint(begins.checkpoint))
    if differences:
        raise RecipeError([difference.problem() for difference in differences])


def set_newer_aside(begins: Beginning, say: Callable[[str], None]) -> None:
    """Move checkpoints aside that are later than the one from which this run continues."""
    if begins.chosen is not None:
        set_aside_after(begins.run_dir, begins.chosen.step, say)


def keep_beginning(begins: Beginning, bundle: Bundle) -> None:
    """Record in the run directory from which checkpoint the run continues; also for a dry run.

    A run in another folder than the checkpoint's, killed before its first save, must not restart at step 0
    when it is resumed or command.sh is run. Raises the error of `unwritable`.
    """
    checkpoint, run_dir = begins.checkpoint, begins.run_dir
    if checkpoint is None:
        return
    if checkpoint.parent != run_dir / "checkpoints":
        write_origin(run_dir, checkpoint)
    try:
        show_start(bundle, run_dir, str(checkpoint))
    except OSError as error:
        raise unwritable(run_dir, error) from error


@contextlib.contextmanager
def readable_checkpoint(
    begins: Beginning, resumption: Resumption, say: Callable[[str], None], look: Look = blind
) -> Iterator[str | None]:
    """The value of EFFILAUNCH_RESUME: the checkpoint, or its conversion; None to start at step 0.

    The conversion is deleted when the run has saved a later checkpoint. look: receives the progress.
    """
    checkpoint, run_dir = begins.checkpoint, begins.run_dir
    if checkpoint is None or not resumption.conversion:
        remove_converted(run_dir)
        yield None if checkpoint is None else str(checkpoint)
        return
    universal = converted(checkpoint, run_dir, resumption.conversion, say, look)
    remove_converted(run_dir, keep=universal)
    try:
        yield str(universal)
    finally:
        # The run may have rotated the checkpoint out: what is known of it was read before.
        if max(complete_checkpoints(run_dir / "checkpoints"), default=0) > begins.step:
            remove_converted(run_dir)
