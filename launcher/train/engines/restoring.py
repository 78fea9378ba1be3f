"""What DeepSpeed leaves wrong when it reads a universal checkpoint, mended before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from launcher.train.engines.universal import MODEL_FILES, STATES

LATEST = "latest_universal"


def universal_folder(checkpoint: Path) -> Path | None:
    """The universal part of a converted checkpoint; None for one that was saved by a run."""
    latest = checkpoint / LATEST
    return checkpoint / latest.read_text("utf-8").strip() if latest.is_file() else None


class OwnStates(TrainerCallback):
    """Gives each parameter group its own values and steps back, and the model its buffers.

    Stage 3 of deepspeed 0.19.8 (runtime/zero/stage3.py load_hp_checkpoint_state_from_checkpoint_dir_stage3)
    lets all groups share one tensor as their step, which each group's update then counts up: from the second
    step on Adam corrects its bias for a later step than it has reached. And it hands the first group's values
    to all groups: biases and norms begin to decay. No stage reads the model's buffers.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        saved = torch.load(self._folder / STATES, map_location="cpu", weights_only=False)
        optimizer = innermost(given["optimizer"])
        restore_groups(optimizer, saved["param_groups"])
        model = torch.load(self._folder / MODEL_FILES[0], map_location="cpu", weights_only=False)
        buffers = dict(given["model"].named_buffers())
        for name, value in model["module"].items():
            buffers[name].copy_(value)


def innermost(optimizer: Any) -> Any:
    """torch's optimizer within accelerate's and ZeRO's."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def restore_groups(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    """The groups' own values, and a step of its own for each parameter."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})
    for state in optimizer.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()
