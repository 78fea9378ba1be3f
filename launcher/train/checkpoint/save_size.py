"""What a checkpoint takes, before one was written: the bytes of the tensors that the engine will write."""

from __future__ import annotations

from typing import Any

import torch

from launcher.train.memory_states import bytes_by_device, optimizer_tensors
from launcher.train.together import of_all

BESIDE = 32 * 2**20
"""Bytes for what is no tensor of the model: a tokenizer of 256,000 words takes this much."""


def first_save_bytes(trainer: Any, *, weights_alone: bool) -> int:
    """Bytes of the first checkpoint, or of the weights alone, which are the least; every rank must call it.

    The engines' ways to write: `_save_optimizer_and_scheduler` and `save_model` of transformers/trainer.py.
    """
    weights = _weight_bytes(trainer)
    if weights_alone:
        return weights
    if trainer.args.save_only_model:
        return weights + BESIDE
    sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    states = sum(bytes_by_device(optimizer_tensors(trainer.model, trainer.optimizer)).values())
    own = of_all(states)
    return _copies(trainer) * weights + (sum(own) if sharded else int(own[0])) + BESIDE


def _weight_bytes(trainer: Any) -> int:
    """The weights that a save writes, whole: an adapter's, or the model's. Tied ones count once."""
    adapter = hasattr(trainer.model, "peft_config")
    return sum(
        _count(parameter) * parameter.element_size()
        for parameter in trainer.model.parameters()
        if parameter.requires_grad or not adapter
    )


def _count(parameter: torch.nn.Parameter) -> int:
    """Of a sharded parameter, all of it: ZeRO-3 keeps the number aside, a DTensor knows it."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def _copies(trainer: Any) -> int:
    """How often the weights are written: DeepSpeed below stage 3 and whole FSDP states repeat the model's."""
    if trainer.is_fsdp_enabled:
        return 2 if "FULL" in str(trainer.accelerator.state.fsdp_plugin.state_dict_type) else 1
    return 2 if trainer.is_deepspeed_enabled and trainer.deepspeed.zero_optimization_stage() < 3 else 1
