"""Exact bytes of a live model's weights, gradients and optimizer states, by device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import TrainerCallback

from launcher.train.upstream.deepspeed_seams import call_before_step
from launcher.train.upstream.torch_seams import local_part, storage_key

CPU = -1
"""The CPU among device indices."""

# Where DeepSpeed's optimizers (runtime/zero/stage_1_and_2.py, stage3.py, bf16_optimizer.py,
# fp16/*.py) keep the float32 copies that they update.
_MASTERS = (
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat_partition",
    "fp32_groups_flat",
    "fp32_groups",
)


def bytes_by_device(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of the distinct storages behind tensors: device index -> bytes, the CPU's under `CPU`."""
    seen: set[int] = set()
    found: dict[int, int] = {}
    for tensor in tensors:
        storage = local_part(tensor).untyped_storage()
        if storage_key(storage) in seen or storage.device.type == "meta":
            continue
        seen.add(storage_key(storage))
        device = storage.device.index if storage.device.type == "cuda" else CPU
        found[device] = found.get(device, 0) + storage.nbytes()
    return found


def held_tensors(trainer: Any) -> Iterator[torch.Tensor]:
    """Every tensor of the model that is trained, and of the reference it is compared with."""
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            yield from weight_tensors(model)
            yield from model.buffers()


def weight_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters with the constants of quantised ones; under ZeRO-3 the shards of this process.

    What ZeRO-3 has gathered of small parameters and keeps is a buffer of the engine, no weight of the rank.
    """
    for parameter in model.parameters():
        shard = getattr(parameter, "ds_tensor", None)
        yield parameter.data if shard is None else shard
        if (scales := getattr(parameter, "SCB", None)) is not None:
            yield scales
        state = getattr(parameter, "quant_state", None)
        while state is not None:
            yield from _tensors(vars(state))
            state = getattr(state, "state2", None)
    for module in model.modules():  # bitsandbytes moves int8 scales there in the first forward
        scales = getattr(getattr(module, "state", None), "SCB", None)
        if isinstance(scales, torch.Tensor):
            yield scales


def gradient_tensors(model: torch.nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    """Gradients before an optimizer step: the parameters' own, and the partitions that ZeRO keeps."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            yield parameter.grad
    for level in _levels(optimizer):
        yield from _tensors(getattr(level, "averaged_gradients", {}))


def optimizer_tensors(model: torch.nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    """States of the optimizer and the float32 copies of an engine, without the model's own parameters."""
    own = {storage_key(local_part(parameter).untyped_storage()) for parameter in model.parameters()}
    for level in _levels(optimizer):
        copies = [getattr(level, name, ()) for name in _MASTERS]
        copies.append([group["params"] for group in getattr(level, "param_groups", ())])
        yield from (t for t in _tensors(copies) if storage_key(local_part(t).untyped_storage()) not in own)
        yield from _tensors(list(getattr(level, "state", {}).values()))


def _levels(optimizer: Any) -> Iterator[Any]:
    """An optimizer and those that it wraps: accelerate's, DeepSpeed's, torch's."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists and mappings."""
    if isinstance(value, torch.Tensor):
        yield value.data
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


class GradientBytes(TrainerCallback):
    """Takes the gradients' bytes once, just before the first optimizer step."""

    def __init__(self, *, steps_in_backward: bool) -> None:
        self._steps_in_backward = steps_in_backward
        self.found: dict[int, int] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """DeepSpeed's engine steps inside backward, where no callback reaches."""
        if self._steps_in_backward:
            engine = given["optimizer"].optimizer
            call_before_step(engine, lambda: self._take(given["model"], engine))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if not self._steps_in_backward:
            self._take(given["model"], given["optimizer"])

    def _take(self, model: torch.nn.Module, optimizer: Any) -> None:
        if not self.found:
            self.found = bytes_by_device(gradient_tensors(model, optimizer))
