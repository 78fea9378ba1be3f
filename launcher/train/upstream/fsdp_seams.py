"""Private parts of accelerate that decide whether FSDP2 shards, and torch's choice of where."""

from __future__ import annotations

import functools
from typing import Any


def shard_over_cpu() -> None:
    """Have accelerate and FSDP2 shard over CPU processes what they shard over GPUs.

    To be called between TrainingArguments, which form the process group, and the Trainer. accelerate 1.15
    (state.py AcceleratorState) looks at an FSDP plugin for GPUs alone, and sets up DDP elsewhere: the ranks
    count as GPUs until it has decided. FSDP2 (torch 2.13, _fsdp_init.py _init_default_mesh) shards over the
    kind of device that torch was built for, on a machine without one too. CPUOffloadPolicy page-locks what
    it moves, which needs a GPU.
    """
    import torch.distributed.fsdp
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import CPUOffloadPolicy

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    upstream = torch.distributed.fsdp.fully_shard
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    @functools.wraps(upstream)
    def fully_shard(module: Any, **given: Any) -> Any:
        if isinstance(given.get("offload_policy"), CPUOffloadPolicy):
            given["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        return upstream(module, **{**given, "mesh": given.get("mesh") or mesh})

    torch.distributed.fsdp.fully_shard = fully_shard
