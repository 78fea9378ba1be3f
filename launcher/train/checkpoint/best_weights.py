"""The best checkpoint's weights at the end of a run under DeepSpeed that went on on other ranks or stages.

DeepSpeed (0.19.8) refuses states that were cut for other ranks, and looks for every checkpoint of a run that
went on from a converted one in its universal form (`load_universal`), in which no run saves one. What
from_pretrained reads is the same for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from launcher.errors import Problem, RunFailed
from launcher.facts.checkpoint import read_manifest
from launcher.train.job import rank, read_job, world_size
from launcher.train.model.weights import stored, translated
from launcher.train.together import of_rank_0


def written_otherwise(checkpoint: Path, zero_stage: int) -> bool:
    """Whether other ranks or another ZeRO stage wrote a checkpoint; every rank must call it."""
    return bool(of_rank_0(_written_otherwise(checkpoint, zero_stage) if rank() == 0 else None))


def _written_otherwise(checkpoint: Path, zero_stage: int) -> bool:
    manifest = read_manifest(checkpoint)
    if manifest is not None and manifest.world_size != world_size():
        return True
    if not (checkpoint / "plan.json").is_file():
        return False
    return read_job(checkpoint).sharding.zero_stage != zero_stage


def load_weights(model: Any, checkpoint: Path) -> None:
    """Read a checkpoint's weights and buffers, or its adapter's, into a model under DeepSpeed.

    Every rank must call it. Its optimizer keeps what it had. RunFailed where a weight is not there.
    """
    from deepspeed.runtime.zero import GatheredParameters

    adapted = hasattr(model, "peft_config")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    read: set[int] = set()
    with torch.no_grad():
        for name, value in _adapter(model, checkpoint) if adapted else _whole(model, checkpoint):
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


def _whole(model: Any, checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for piece in translated(model, stored(checkpoint)):
        yield from piece.items()


def _adapter(model: Any, checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """peft leaves the adapter's own name, and the copies that it makes of modules, out of the names."""
    from safetensors.torch import load_file

    tensors = load_file(checkpoint / "adapter_model.safetensors")
    for name in [*dict(model.named_parameters()), *dict(model.named_buffers())]:
        key = name.replace("modules_to_save.default.", "").replace(".default", "")
        if key in tensors:
            yield name, tensors[key]


def _absent(checkpoint: Path, key: str) -> Problem:
    return Problem(
        "best-without-weights",
        f"the best checkpoint holds no weight {key} that could be read without DeepSpeed's states",
        file=str(checkpoint),
        path="trainer.load_best_model_at_end",
        hint="go on with trainer.load_best_model_at_end: false; ZeRO-3 writes whole weights with "
        "stage3_gather_16bit_weights_on_model_save",
    )
