"""The trained weights in one place, as from_pretrained reads them, whatever the ranks hold of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.train.job import Job
from launcher.train.upstream.trainer_seams import save_state_dict


def save_trained(job: Job, trainer: Any, folder: Path) -> None:
    """Write the model, or its adapter, into `folder`; every process must call it.

    FSDP2's checkpoints are shards, and the Trainer then saves nothing else: rank 0 gathers here, tensor by
    tensor into host memory, what was trained. Of an adapter that leaves out the base, which stays sharded.
    """
    if job.engine != "fsdp":
        trainer.save_model(str(folder))
        return
    state = gathered(trainer.model, trained_alone=job.has_adapter)
    save_state_dict(trainer, folder, state)
    if hasattr(trainer, "drop_reference"):  # of DPO
        trainer.drop_reference(folder)


def gathered(model: Any, *, trained_alone: bool) -> dict[str, Any]:
    """Name -> whole tensor on the host, on rank 0; {} on the others.

    Names of one parameter have one tensor, so that save_pretrained sees that they are tied.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=trained_alone)
    state = dict(get_model_state_dict(model, options=options))
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in state:
            state[name] = state[first.setdefault(id(parameter), name)]
    return state
