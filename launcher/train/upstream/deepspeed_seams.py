"""Private parts of DeepSpeed, and of accelerate where it sets DeepSpeed up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def finish_decoupled_save(engine: Any) -> None:
    """Wait for DeepSpeed's background writer: what is hashed next must be on the disk."""
    if engine.checkpoint_engine.is_decoupled():
        engine._commit_decoupled_checkpoint()


def put_back(engine: Any) -> None:
    """Let the parameters be parts of ZeRO's buffers again, as they are after each of its steps.

    To save a model, AutoTP gathers each matrix, and puts a copy of the rank's own part in its place
    (module_inject/layers.py _tp_partition): until the next step a rank would hold these twice.
    """
    if engine.autotp_size() > 1 and engine.zero_optimization_stage() in (1, 2):
        for number in range(len(engine.optimizer.bit16_groups)):
            engine.optimizer._update_model_bit16_weights(number)


def rank_in_copy() -> int:
    """This rank's number among those that share a sample's tokens."""
    from deepspeed.utils import groups

    return int(groups._get_sequence_parallel_rank())


def give_whole_samples(accelerator: Any) -> None:
    """Keep the data loader from dividing samples among ranks: its adapter has no data set to resume in."""
    accelerator.deepspeed_ulysses_dl_adapter = lambda loader, model: loader


@contextlib.contextmanager
def rows_shared_by(accelerator: Any, ranks: int, device: str) -> Iterator[None]:
    """Loaders made within this give the same rows to each group of `ranks` ranks.

    accelerate does so for a mesh with a dimension `tp`.
    """
    from torch.distributed.device_mesh import init_device_mesh

    shape = (accelerator.num_processes // ranks, ranks)
    accelerator.state.ds_device_mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "tp"))
    try:
        yield
    finally:
        del accelerator.state.ds_device_mesh  # an evaluation has other rows for every rank


def call_before_step(optimizer: Any, action: Callable[[], None]) -> None:
    """Call `action` once before the next step: DeepSpeed steps inside backward, where no callback reaches."""
    step = optimizer.step

    def first(*args: Any, **kwargs: Any) -> Any:
        action()
        optimizer.step = step
        return step(*args, **kwargs)

    optimizer.step = first
