"""Words between the processes of a run: what one decides, all do."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def of_rank_0(value: Any) -> Any:
    """Rank 0's value, on every rank; each of them must call it."""
    if not _several():
        return value
    told = [value]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def of_all(value: Any) -> list[Any]:
    """Every rank's value by rank, on every rank; each of them must call it, and waits for the last."""
    if not _several():
        return [value]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told


def _several() -> bool:
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
