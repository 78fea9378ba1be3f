"""Resume from a checkpoint: check it, and restore what upstream does not.

transformers 5.23 (trainer.py _init_training_state, _load_callback_state) resumes with the counters of a new
early stopping, with the intervals of the old recipe, and without the best checkpoint once the run directory
has been moved. DeepSpeed (0.19.8) refuses states of other ranks, and looks for every checkpoint of a run that
was resumed from a converted one in its universal form (`load_universal`), in which no run saves one.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import safe_globals

from launcher.errors import Problem, RecipeError, RunFailed
from launcher.files.checkpoint import MANIFEST, SUPERSEDED, defect, read_manifest
from launcher.files.safe_files import parse_json
from launcher.train.checkpoint.pickles import check_pickles
from launcher.train.collectives import of_rank_0
from launcher.train.engines.universal import universal_folder
from launcher.train.job import rank, read_job, world_size
from launcher.train.model.weights import stored, translated


def ready_checkpoint(checkpoint: Path) -> None:
    """Refuse a checkpoint of weights alone or with code in it; rename unreadable random states."""
    check_states(checkpoint)
    check_pickles(checkpoint)
    put_aside_random_states(checkpoint)


def check_states(checkpoint: Path) -> None:
    """RecipeError if the optimizer's states are missing.

    The Trainer alone would continue silently, with a new optimizer and a schedule that begins again
    (transformers/trainer.py _load_optimizer_and_scheduler); DeepSpeed stops.
    """
    # The Trainer's own, FSDP2's shards of them, DeepSpeed's.
    if (checkpoint / "optimizer.pt").is_file() or (checkpoint / "optimizer_0").is_dir():
        return
    if any(checkpoint.glob("global_step*/offloaded_tensors")):
        # DeepSpeed 0.19.8 copies the files back and registers only the master weights of them: Adam's moments
        # and step, the loss scale and what was too small for a file begin anew, silently
        # (runtime/engine.py load_checkpoint, `zero_nvme_offload_optimizer`).
        raise RecipeError(
            Problem(
                "nvme-resume",
                "its optimizer states were on NVMe: DeepSpeed cannot reload them, and the run would continue "
                "with new ones",
                str(checkpoint),
                hint="start a new run from the checkpoint's weights: model.name_or_path takes its folder",
            )
        )
    if any(checkpoint.glob("global_step*")):
        return
    raise RecipeError(
        Problem(
            "checkpoint-without-states",
            "the checkpoint has no optimizer states: it cannot be resumed",
            file=str(checkpoint),
            path="trainer.save_only_model",
            hint="omit trainer.save_only_model next time; or start a new run from these weights: set "
            "adapter.path to the folder, or model.name_or_path if all parameters were trained",
        )
    )


def put_aside_random_states(checkpoint: Path) -> None:
    """Rename this rank's rng_state file if torch will not unpickle it; the Trainer continues without one.

    It holds objects outside torch's list of safe types if another major version of numpy, or an old release
    of transformers, wrote it. There is no weight in it.
    """
    name = f"rng_state_{rank()}.pth" if world_size() > 1 else "rng_state.pth"
    file = checkpoint / name
    if not file.is_file():
        return
    try:
        with safe_globals():
            torch.load(file, weights_only=True)
    except pickle.UnpicklingError:
        file.rename(file.with_suffix(".unreadable"))
        print(f"{file} cannot be read here and was renamed; dropout and shuffling continue from new states")


class EarlyStopping(EarlyStoppingCallback):
    """Upstream's, which does not train further if it had ended the run already."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        super().on_train_begin(args, state, control, **given)
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True


def restore_callbacks(callbacks: Sequence[Any], state: TrainerState) -> None:
    """Restore the callbacks that have a state from the checkpoint, and register all of them in `state`.

    In their places: the order of the callbacks matters. Their arguments are those of the current recipe.
    Without an entry for each of them the next save would fail.
    """
    stateful = [callback for callback in callbacks if isinstance(callback, ExportableState)]
    for name, found in state.stateful_callbacks.items():
        alike = [callback for callback in stateful if type(callback).__name__ == name]
        saved = found if isinstance(found, list) else [found]
        # Of several of one class, upstream appends to the list at each save: the last are this checkpoint's.
        for callback, values in zip(alike, saved[-len(alike) :] if alike else [], strict=False):
            for attribute, value in values.get("attributes", {}).items():
                setattr(callback, attribute, value)
    state.stateful_callbacks = TrainerState(stateful_callbacks=stateful).stateful_callbacks


def restore_state(trainer: Any, checkpoint: Path, max_steps: int) -> None:
    """Set the intervals of the current recipe and the current path of the best checkpoint.

    trainer: with its state read from the checkpoint. Every rank must call it.
    """
    state = trainer.state
    trainer.owes_evaluation = _owes_evaluation(trainer.args, state, checkpoint)
    state.compute_steps(trainer.args, max_steps)
    place_best(trainer, checkpoint)
    lost = state.best_model_checkpoint is None and state.best_global_step
    if lost and trainer.args.load_best_model_at_end and rank() == 0:
        print(
            f"WARNING: checkpoint-{state.best_global_step}, the best one so far, does not exist any more: "
            "unless a later one is better, the run ends with its last weights",
            flush=True,
        )


def _owes_evaluation(args: Any, state: Any, checkpoint: Path) -> bool:
    """By the recipe that the checkpoint was saved with: another interval skipped nothing."""
    if args.eval_strategy == "no":
        return False
    strategy, delay = args.eval_strategy, args.eval_delay
    if (checkpoint / "plan.json").is_file():
        saved = read_job(checkpoint).trainer
        strategy, delay = saved.eval_strategy, saved.eval_delay
    return evaluation_owed(strategy, delay or 0, state)


def evaluation_owed(strategy: str, delay: float, state: Any) -> bool:
    """Whether the step of a checkpoint should have been evaluated, and was not. Pure.

    strategy, delay, and `state` with its eval_steps: of the recipe that the checkpoint was saved with.
    """
    step, epoch = state.global_step, state.epoch or 0.0
    if strategy == "steps":
        due = step % state.eval_steps == 0 and delay <= step
    else:
        due = strategy == "epoch" and float(epoch).is_integer() and delay <= epoch
    if not due or step == 0:
        return False
    return not any(row["step"] == step and "eval_loss" in row for row in state.log_history)


def place_best(trainer: Any, checkpoint: Path) -> None:
    """Set the current path of the best checkpoint in the state; every rank must call it."""
    found = find_best(trainer.state, checkpoint, trainer.saver.folder) if rank() == 0 else None
    trainer.state.best_model_checkpoint = of_rank_0(found)


def find_best(state: Any, checkpoint: Path, own: Path) -> str | None:
    """The best checkpoint: of this run, next to the resumed one, or where it was; None if none is complete.

    own: RUN_DIR/checkpoints.
    """
    places = _places(state, checkpoint, own)
    return next((str(path) for path in places if defect(path, hashes=False) is None), None)


def _places(state: Any, checkpoint: Path, own: Path) -> Iterator[Path]:
    recorded = parse_json((checkpoint / "trainer_state.json").read_text("utf-8"))["best_model_checkpoint"]
    names = [f"checkpoint-{state.best_global_step}"] if state.best_global_step else []
    folders = (
        [own] if universal_folder(checkpoint) else [own, checkpoint.parent]
    )  # a converted one is removed
    if recorded is not None:  # an earlier one, if the save of the best was skipped
        place = Path(recorded)
        names = [place.name] if place.name.startswith(SUPERSEDED) else [*names, place.name]
        folders.append(place.parent)
    for name in names:
        if checkpoint.name.startswith(SUPERSEDED):
            yield from _before(checkpoint, name.split("-")[1], folders)
        else:
            yield from (folder / name for folder in folders)


def _before(checkpoint: Path, step: str, folders: Sequence[Path]) -> list[Path]:
    """Those of a step that are older than a superseded checkpoint, the newest first.

    What was written later belongs to the continuation that replaced it.
    """
    patterns = (f"checkpoint-{step}", f"{SUPERSEDED}{step}", f"{SUPERSEDED}{step}-*")
    found = {place for folder in folders for pattern in patterns for place in folder.glob(pattern)}
    ages = {place: _written(place) for place in found if (place / MANIFEST).is_file()}
    last = _written(checkpoint)
    return sorted((place for place, age in ages.items() if age <= last), key=lambda it: -ages[it])


def _written(checkpoint: Path) -> int:
    return (checkpoint / MANIFEST).stat().st_mtime_ns


def has_other_layout(checkpoint: Path, zero_stage: int) -> bool:
    """Whether other ranks or another ZeRO stage wrote a checkpoint; every rank must call it."""
    return bool(of_rank_0(_has_other_layout(checkpoint, zero_stage) if rank() == 0 else None))


def _has_other_layout(checkpoint: Path, zero_stage: int) -> bool:
    manifest = read_manifest(checkpoint)
    if manifest is not None and manifest.world_size != world_size():
        return True
    if not (checkpoint / "plan.json").is_file():
        return False
    return read_job(checkpoint).sharding.zero_stage != zero_stage


def load_weights(model: Any, checkpoint: Path) -> None:
    """Load a checkpoint's weights and buffers, or its adapter's, into a model under DeepSpeed.

    From the files that from_pretrained reads, which are the same for every layout; the optimizer keeps its
    states. RunFailed if a weight is missing. Every rank must call it.
    """
    from deepspeed.runtime.zero import GatheredParameters

    adapted = hasattr(model, "peft_config")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    read: set[int] = set()
    with torch.no_grad():
        for name, value in _adapter(model, checkpoint) if adapted else _full(model, checkpoint):
            if name in buffers:
                buffers[name].copy_(value)
            if name not in parameters:
                continue
            parameter = parameters[name]
            read.add(id(parameter))
            with GatheredParameters([parameter], modifier_rank=0):
                if rank() == 0 or not hasattr(parameter, "ds_id"):
                    parameter.data.copy_(value)
    for name, parameter in parameters.items():
        if id(parameter) not in read and (parameter.requires_grad or not adapted):
            raise RunFailed(_absent(checkpoint, name))  # an adapter's base is not in the checkpoint


def _full(model: Any, checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for piece in translated(model, stored(checkpoint)):
        yield from piece.items()


def _adapter(model: Any, checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """peft omits the adapter's own name, and the copies that it makes of modules, from the names."""
    from safetensors.torch import load_file

    tensors = load_file(checkpoint / "adapter_model.safetensors")
    for name in [*dict(model.named_parameters()), *dict(model.named_buffers())]:
        key = name.replace("modules_to_save.default.", "").replace(".default", "")
        if key in tensors:
            yield name, tensors[key]


def _absent(checkpoint: Path, key: str) -> Problem:
    return Problem(
        "best-without-weights",
        f"the best checkpoint has no weight {key} that can be read without DeepSpeed's states",
        file=str(checkpoint),
        path="trainer.load_best_model_at_end",
        hint="continue with trainer.load_best_model_at_end: false; ZeRO-3 writes full weights with "
        "stage3_gather_16bit_weights_on_model_save",
    )
