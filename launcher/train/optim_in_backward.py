"""The optimizer steps in the backward pass: a gradient is gone before the next one is complete.

The optimizer is the Trainer's own, with all its parameters: a call updates those that have a gradient, which
is one at a time. So learning rates, states, checkpoints and resuming are as without, and the Trainer's own
call after the backward pass finds nothing to update.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from transformers import TrainerCallback

from launcher.train.engines.engine import innermost
from launcher.train.memory_meter import bytes_by_device


class StepInBackward(TrainerCallback):
    """Registers the update with every weight when training begins.

    accelerator: the Trainer's, which it asks for the norm after the backward pass. found: gets the bytes of
    the largest gradient, by device index.
    """

    def __init__(self, accelerator: Any, found: MutableMapping[int, int]) -> None:
        accelerator.clip_grad_norm_ = lambda *_: self._norm()
        self._found = found
        self._squares: list[torch.Tensor] = []
        """Of the norms of this step's gradients, on their devices."""

    def _norm(self) -> torch.Tensor:
        """Of all gradients of the step that has ended, as one vector: a scalar."""
        squares, self._squares = self._squares, []
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        optimizer = innermost(given["optimizer"])

        def update(weight: torch.Tensor) -> None:
            assert weight.grad is not None, "the hook runs when it is complete"
            for device, size in bytes_by_device([weight.grad]).items():
                self._found[device] = max(self._found.get(device, 0), size)
            self._squares.append(torch.linalg.vector_norm(weight.grad, dtype=torch.float32) ** 2)
            optimizer.step()
            weight.grad = None

        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.register_post_accumulate_grad_hook(update)
