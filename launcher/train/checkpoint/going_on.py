"""What a resumed run takes from its checkpoint beside weights and states, where upstream leaves a gap.

transformers 5.23 (trainer.py _init_training_state, _load_callback_state) goes on with the counters of a fresh
early stopping, with the intervals of the old recipe, and without the best checkpoint once the run directory
has been moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback, TrainerState
from transformers.trainer_callback import ExportableState

from launcher.facts.checkpoint import MANIFEST, SUPERSEDED, defect
from launcher.facts.safe_files import parse_json
from launcher.train.agreeing import evaluation_owed
from launcher.train.engines.universal import universal_folder
from launcher.train.job import rank, read_job
from launcher.train.together import of_rank_0


class EarlyStopping(EarlyStoppingCallback):
    """Upstream's, that does not train further where it had ended the run already."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        super().on_train_begin(args, state, control, **given)
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True


def restore_callbacks(callbacks: Sequence[Any], state: TrainerState) -> None:
    """Give the callbacks that keep a state what the checkpoint says of them, and let `state` know them all.

    In their places: the order of the callbacks matters. Their arguments are the recipe's of now. Without an
    entry for each of them the next save would fail.
    """
    stateful = [callback for callback in callbacks if isinstance(callback, ExportableState)]
    for name, found in state.stateful_callbacks.items():
        alike = [callback for callback in stateful if type(callback).__name__ == name]
        saved = found if isinstance(found, list) else [found]
        # Of several alike, upstream appends to the list at each save: the last ones are of this checkpoint.
        for callback, values in zip(alike, saved[-len(alike) :] if alike else [], strict=False):
            for attribute, value in values.get("attributes", {}).items():
                setattr(callback, attribute, value)
    state.stateful_callbacks = TrainerState(stateful_callbacks=stateful).stateful_callbacks


def go_on(trainer: Any, checkpoint: Path, max_steps: int) -> None:
    """The intervals of the recipe of now, and the best checkpoint where it lies now; every rank must call it.

    trainer: with its state read from the checkpoint.
    """
    state = trainer.state
    trainer.owes_evaluation = _owes_evaluation(trainer.args, state, checkpoint)
    state.compute_steps(trainer.args, max_steps)
    place_best(trainer, checkpoint)
    lost = state.best_model_checkpoint is None and state.best_global_step
    if lost and trainer.args.load_best_model_at_end and rank() == 0:
        print(
            f"WARNING: checkpoint-{state.best_global_step}, the best one so far, is not there any more: "
            "unless a later one is better, the run ends with its last weights",
            flush=True,
        )


def _owes_evaluation(args: Any, state: Any, checkpoint: Path) -> bool:
    """By the recipe that the checkpoint was saved with: another interval left nothing out."""
    if args.eval_strategy == "no":
        return False
    strategy, delay = args.eval_strategy, args.eval_delay
    if (checkpoint / "plan.json").is_file():
        saved = read_job(checkpoint).trainer
        strategy, delay = saved.eval_strategy, saved.eval_delay
    return evaluation_owed(strategy, delay or 0, state)


def place_best(trainer: Any, checkpoint: Path) -> None:
    """Let the state name the best checkpoint by the place where it lies now; every rank must call it."""
    found = find_best(trainer.state, checkpoint, trainer.saver.folder) if rank() == 0 else None
    trainer.state.best_model_checkpoint = of_rank_0(found)


def find_best(state: Any, checkpoint: Path, own: Path) -> str | None:
    """Where the best checkpoint lies now: of this run, beside the one that is resumed, or where it was.

    own: RUN_DIR/checkpoints. None where it is not there, or not whole.
    """
    found = next(
        (path for path in _places(state, checkpoint, own) if defect(path, hashes=False) is None), None
    )
    return None if found is None else str(found)


def _places(state: Any, checkpoint: Path, own: Path) -> Iterator[Path]:
    recorded = parse_json((checkpoint / "trainer_state.json").read_text("utf-8"))["best_model_checkpoint"]
    names = [f"checkpoint-{state.best_global_step}"] if state.best_global_step else []
    folders = [own] if universal_folder(checkpoint) else [own, checkpoint.parent]  # a converted one will go
    if recorded is not None:  # an earlier one where the save of the best was left out
        place = Path(recorded)
        names = [place.name] if place.name.startswith(SUPERSEDED) else [*names, place.name]
        folders.append(place.parent)
    for name in names:
        if checkpoint.name.startswith(SUPERSEDED):
            yield from _before(checkpoint, name.split("-")[1], folders)
        else:
            yield from (folder / name for folder in folders)


def _before(checkpoint: Path, step: str, folders: Sequence[Path]) -> list[Path]:
    """Those of a step that are older than a checkpoint that was put aside, the newest first.

    What was written later belongs to the continuation that took its place.
    """
    patterns = (f"checkpoint-{step}", f"{SUPERSEDED}{step}", f"{SUPERSEDED}{step}-*")
    found = {place for folder in folders for pattern in patterns for place in folder.glob(pattern)}
    ages = {place: _written(place) for place in found if (place / MANIFEST).is_file()}
    last = _written(checkpoint)
    return sorted((place for place, age in ages.items() if age <= last), key=lambda it: -ages[it])


def _written(checkpoint: Path) -> int:
    return (checkpoint / MANIFEST).stat().st_mtime_ns
