"""Adapters that get no gradient in the first steps: their module is not called, or nothing reads it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import TrainerCallback

from launcher.models.lora import describe_idle_adapters
from launcher.train.collectives import of_all
from launcher.train.job import rank
from launcher.train.upstream.torch_seams import local_part

WATCHED = 20
"""Steps. Experts get no gradient until a token is routed to them, which may take several steps."""
_ZEROS = (".lora_B.", ".lora_embedding_A.")
"""The matrix that peft initialises with zeros; until it changes, the gradient of the other one is zero."""
_SHOWN = 5


class IdleAdapters(TrainerCallback):
    """Counts adapters whose zero-initialised matrix got no gradient, or only zeros, on every rank.

    Parameter hooks see gradients that ZeRO does not leave in `grad`. FSDP2's shards call no hooks, but have
    `grad` before the optimizer's step.
    """

    def __init__(self, has_signal: Callable[[], bool] = lambda: True) -> None:
        """has_signal: whether the loss had a gradient at all in these steps, the same on every rank."""
        self._has_signal = has_signal
        self.found: dict[str, Any] | None = None
        """For result.json; None where all adapters have gradients, or the model has none."""
        self._waiting: dict[str, Any] = {}
        """Name of a parameter without a gradient so far -> handle of its hook."""
        self._seen: dict[str, torch.Tensor] = {}
        """Of this step: whether it had one (bool, 0-d), on its device until the step has ended."""
        self._began = self._adapters = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._began = state.global_step
        self._waiting = {
            name: parameter.register_hook(partial(self._see, name))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and any(part in name for part in _ZEROS)
        }
        self._adapters = len(self._waiting)

    def _see(self, name: str, gradient: torch.Tensor) -> None:
        if name in self._waiting:
            found = local_part(gradient).any()
            self._seen[name] = found | self._seen[name] if name in self._seen else found

    def _settle(self) -> None:
        """Wait for the device once a step, not for each gradient."""
        seen, self._seen = self._seen, {}
        for device in {found.device for found in seen.values()}:
            names = [name for name, found in seen.items() if found.device == device]
            for name, found in zip(names, torch.stack([seen[name] for name in names]).tolist(), strict=True):
                if found:
                    self._waiting.pop(name).remove()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self._waiting:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    self._see(name, parameter.grad)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._settle()
        if state.global_step == self._began + WATCHED:
            self._count(WATCHED)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if 0 < state.global_step - self._began < WATCHED:
            self._count(state.global_step - self._began)

    def _count(self, steps: int) -> None:
        """Collective: every rank must call it. An adapter is idle if it got no gradient on any rank."""
        self._seen = {}
        for handle in self._waiting.values():
            handle.remove()
        of_ranks = of_all(list(self._waiting))
        names = [name for name in of_ranks[0] if all(name in others for others in of_ranks)]
        self._waiting = {}
        if not names or not self._has_signal():
            return
        modules = [name.removeprefix("base_model.model.").partition(".lora_")[0] for name in names]
        first = modules[:_SHOWN]
        self.found = {"count": len(modules), "of": self._adapters, "steps": steps, "first": first}
        if rank() == 0:
            print(f"WARNING: adapters: {describe_idle_adapters(self.found)}", flush=True)
