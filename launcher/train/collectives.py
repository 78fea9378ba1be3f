"""Exchange values between the ranks of a run."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def of_rank_0(value: Any) -> Any:
    """Rank 0's value, on every rank; every rank must call it."""
    if not _several():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def of_all(value: Any) -> list[Any]:
    """Every rank's value by rank, on every rank; every rank must call it, and waits for the last."""
    if not _several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _several() -> bool:
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
