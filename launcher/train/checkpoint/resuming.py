"""Whether a checkpoint can be gone on from, before the Trainer reads it."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from transformers.trainer_pt_utils import safe_globals

from launcher.errors import Problem, RecipeError
from launcher.train.checkpoint.pickles import check_pickles
from launcher.train.job import rank, world_size


def ready_checkpoint(checkpoint: Path) -> None:
    """Refuse a checkpoint of weights alone or with code in it; put unreadable random states aside."""
    check_states(checkpoint)
    check_pickles(checkpoint)
    put_aside_random_states(checkpoint)


def check_states(checkpoint: Path) -> None:
    """RecipeError where the optimizer's states are missing.

    The Trainer alone would go on without a word, with a fresh optimizer and a schedule that begins again
    (transformers/trainer.py _load_optimizer_and_scheduler); DeepSpeed stops.
    """
    # The Trainer's own, FSDP2's shards of them, DeepSpeed's.
    if (checkpoint / "optimizer.pt").is_file() or (checkpoint / "optimizer_0").is_dir():
        return
    if any(checkpoint.glob("global_step*/offloaded_tensors")):
        raise RecipeError(_of_nvme(checkpoint))
    if any(checkpoint.glob("global_step*")):
        return
    raise RecipeError(
        Problem(
            "checkpoint-without-states",
            "the checkpoint holds weights alone: a run cannot go on from it, only begin again",
            file=str(checkpoint),
            path="trainer.save_only_model",
            hint="drop trainer.save_only_model next time; or start a new run from these weights: name the "
            "folder in adapter.path, or in model.name_or_path where all parameters were trained",
        )
    )


def _of_nvme(checkpoint: Path) -> Problem:
    """DeepSpeed 0.19.8 copies the files back and registers only the master weights of them.

    Adam's moments and step, the loss scale and what was too small for a file begin anew, without a word
    (runtime/engine.py load_checkpoint, `zero_nvme_offload_optimizer`).
    """
    return Problem(
        "nvme-resume",
        "its optimizer states were on NVMe: DeepSpeed does not read them again, and the run would go on with "
        "fresh ones",
        str(checkpoint),
        hint="start a new run from the checkpoint's weights: model.name_or_path takes its folder",
    )


def put_aside_random_states(checkpoint: Path) -> None:
    """Rename this rank's rng_state file where torch will not unpickle it; the Trainer goes on without one.

    It holds objects outside torch's list of safe types where another major version of numpy, or an old
    release of transformers, wrote it. No weight is in it.
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
        print(f"{file} cannot be read here and was renamed; dropout and shuffling go on from fresh states")
