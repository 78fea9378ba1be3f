"""The inputs of checkpointed layers go to host memory, and come back one layer ahead in the backward pass.

Copies run on a stream of their own, so that they overlap with the computation: out while the layer runs
forwards, in while the layer above it runs backwards. The last layer's input stays, for it is needed first.

Neither upstream implementation fits. trl's (trl 1.16, models/activation_offloading.py) does not start without
an accelerator, moves logits as well, since it surrounds the complete step, keeps tensors in a table that it
clears when a further forward pass begins, and SFT, DPO, KTO and reward trainers alone call it. That of
transformers (5.23, `offload` of activation_checkpointing_enable) copies on the stream of the computation,
which waits for each copy, and has every layer of a decoder keep a copy of what the encoder made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from launcher.errors import Problem, RecipeError
from launcher.train.upstream.model_seams import wrap_checkpoints
from launcher.train.upstream.torch_seams import writes_to

KEY = "sharding.offload_activations"


class _Input:
    """A layer's input in host memory, and on the device where it was fetched or has not left it yet."""

    def __init__(self, host: torch.Tensor, device: torch.Tensor, copied: Any, below: _Input | None) -> None:
        self.host, self.place, self.version = host, device.device, writes_to(device)
        self.device: torch.Tensor | None = device
        self.done = copied
        """Event: the copy out, then the copy in, has ended."""
        self.fetched = False
        self.below: Callable[[], _Input | None] = (lambda: None) if below is None else weakref.ref(below)
        """The input that the backward pass needs next; a pass that was dropped leaves none."""

    def __del__(self) -> None:
        if self.device is not None:  # no layer asked for it: its memory is free when the copy has ended
            torch.get_device_module(self.place).current_stream().wait_event(self.done)

    def take(self) -> torch.Tensor | None:
        """What is on the device, which is then the caller's alone. RecipeError if a layer has changed it."""
        device, self.device, fetched, self.fetched = self.device, None, self.fetched, False
        if device is not None and not fetched and writes_to(device) != self.version:
            message = "a layer of the model changes its input in place, while it is copied"
            raise RecipeError(Problem("offload-activations", message, path=KEY, hint="set it to none"))
        return device


class OffloadedInputs:
    """Moves what the checkpointed layers of one process keep."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._top: Callable[[], _Input | None] = lambda: None
        """The newest input, which is still on the device."""

    def around(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """`checkpoint(function, *args)` of torch, which then keeps its first argument in host memory.

        RecipeError if that is no tensor: the layer would keep its input where it is.
        """

        def kept_in_host(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            hidden = args[0] if args else None
            if not isinstance(hidden, torch.Tensor):
                message = "a layer of the model takes its input by name, where it cannot be moved"
                raise RecipeError(Problem("offload-activations", message, path=KEY, hint="set it to none"))
            address, shape = hidden.data_ptr(), hidden.shape
            del hidden

            def pack(tensor: torch.Tensor) -> torch.Tensor | _Input:
                moves = tensor.data_ptr() == address and tensor.shape == shape
                return self._move(tensor) if moves else tensor

            with saved_tensors_hooks(pack, self._give):
                return checkpoint(function, *args, **options)

        return kept_in_host

    def _move(self, tensor: torch.Tensor) -> _Input:
        module = torch.get_device_module(tensor.device)
        if self._stream is None:
            self._stream = module.Stream()
        compute, top = module.current_stream(), self._top()
        if top is not None and top.device is not None and not top.fetched:
            compute.wait_event(top.done)  # what is computed next may overwrite it
            top.take()
        self._stream.wait_stream(compute)
        with module.stream(self._stream):
            host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
            host.copy_(tensor, non_blocking=True)
        moved = _Input(host, tensor, self._stream.record_event(), top)
        self._top = weakref.ref(moved)
        return moved

    def _fetch(self, moved: _Input) -> None:
        """Begin to copy it to the device, after what the device has been told to compute so far."""
        module = torch.get_device_module(moved.place)
        # Allocated and freed on the stream of the computation, which waits for the copy before it reads.
        moved.device = torch.empty_like(moved.host, device=moved.place)
        self._stream.wait_stream(module.current_stream())
        with module.stream(self._stream):
            moved.device.copy_(moved.host, non_blocking=True)
        moved.done, moved.fetched = self._stream.record_event(), True

    def _give(self, kept: torch.Tensor | _Input) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        if kept.device is None:
            self._fetch(kept)
        torch.get_device_module(kept.place).current_stream().wait_event(kept.done)
        tensor, below = kept.take(), kept.below()
        assert tensor is not None, "it was there, or has been fetched"
        if below is not None and below.device is None:
            self._fetch(below)
        return tensor


def offload_activations(model: torch.nn.Module) -> None:
    """Have the checkpointed layers of `model` keep their inputs in host memory, once checkpointing is
    switched on; trl does that again after each generation. RecipeError then if its class cannot."""
    inputs = OffloadedInputs()
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.activation_checkpointing_enable = _moving(part, inputs)


def _moving(part: Any, inputs: OffloadedInputs) -> Callable[..., None]:
    enable = part.activation_checkpointing_enable

    @wraps(enable)
    def enabled(*args: Any, **options: Any) -> None:
        enable(*args, **options)
        if not wrap_checkpoints(part, inputs.around):
            message = f"{type(part).__name__} has a way of its own to recompute activations"
            raise RecipeError(Problem("offload-activations", message, path=KEY, hint="set it to none"))

    return enabled
