"""What every trainer of trl does otherwise here: rows are prepared before, the plan decides data types."""

from __future__ import annotations

from typing import Any

import torch

from launcher.train.trainers import PlannedTrainer
from launcher.train.upstream.trl_seams import RowsArePrepared


class PreparedTrainer(RowsArePrepared, PlannedTrainer):
    """A trainer of trl, which follows in the list of bases, for rows that are samples already.

    Trained weights keep the data type that they came with.
    """

    def __init__(self, model: Any, **more: Any) -> None:
        # trl turns trainable weights over a quantised model into bfloat16.
        quantised = getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)
        before = _trainable_copies(model) if quantised else {}
        super().__init__(model=model, **more)
        for name, parameter in model.named_parameters():
            if name in before:
                parameter.data = before[name].to(parameter.device)


def _trainable_copies(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
