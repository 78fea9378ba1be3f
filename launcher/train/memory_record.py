"""`memory` of result.json: what the plan predicted beside what this run took."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from typing import Any

import torch

from launcher.train.job import Job
from launcher.train.memory_meter import Meter

STATES = ("weights", "gradients", "optimizer", "context")


def memory_record(job: Job, meter: Meter, measured: Any) -> dict[str, Any]:
    """Predicted and measured bytes of one device, `host` of one machine; every process must call it.

    measured: what `fit` returned; of all processes the largest is told. Where nothing was predicted or
    measured: None.
    """
    context = measured.components["context"]
    train = meter.peak("train")
    assert train is not None, "a run is recorded after it was trained"
    on_cuda = meter.method.startswith("cuda")
    mine: dict[str, int | None] = {
        "measured": train.reserved + context,
        "allocated": train.allocated if on_cuda else None,
        "host": resident_peak(),
        "largest": measured.largest_batch or None,
        **_visible_states(job, measured.components, on_cuda=on_cuda),
    }
    for phase in ("load", "eval", "save"):
        peak = meter.peak(phase)
        mine[phase] = None if peak is None else peak.allocated + context
    ranks = gathered(mine)
    most = {name: _most(rank[name] for rank in ranks) for name in mine}
    plan = job.plan.get("memory") or {}
    resident = plan.get("phases", {}).get("step", {})
    return {
        "predicted": plan.get("total"),
        "measured": most["measured"],
        "method": meter.method,
        "allocated": most["allocated"],
        "load": {"predicted": plan.get("load_peak"), "measured": most["load"]},
        "eval": {"predicted": plan.get("eval_peak"), "measured": most["eval"]},
        "save": {"predicted": plan.get("save_peak"), "measured": most["save"]},
        "host": {"predicted": plan.get("host_bytes"), "measured": _fullest_machine(job, ranks)},
        "components": {name: {"predicted": resident.get(name), "measured": most[name]} for name in STATES},
        "device_bytes": meter.device_bytes(meter.fullest("train")),
        "steps": measured.steps,
        "tokens": {"planned": planned_tokens(job), "largest": most["largest"]},
    }


def _most(values: Iterable[int | None]) -> int | None:
    """The largest of the values that were measured."""
    return max((value for value in values if value is not None), default=None)


def _visible_states(job: Job, components: dict[str, int], *, on_cuda: bool) -> dict[str, int | None]:
    """The components that lie on the device for certain: a CPU run cannot tell it from its host."""
    found: dict[str, int | None] = dict(components)
    if not on_cuda and job.sharding.offload_optimizer != "none":
        found["optimizer"] = found["gradients"] = None
    if not on_cuda and job.sharding.offload_param != "none":
        found["weights"] = None
    return found


def planned_tokens(job: Job) -> int | None:
    """Tokens of a micro-batch as planned, padding included; None for pictures."""
    task = job.task
    if not task.reads_tokens:
        return None
    micro = job.trainer.per_device_train_batch_size or 1
    return task.sequences_per_sample * micro * job.data.max_length


def resident_peak() -> int:
    """Peak bytes of this process's resident set."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def gathered(mine: dict[str, int | None]) -> list[dict[str, int | None]]:
    """The values of every process, by rank; every process must call it."""
    if not torch.distributed.is_initialized():
        return [mine]
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    row = [-1 if value is None else value for value in mine.values()]
    tensor = torch.tensor(row, dtype=torch.int64, device=device)
    rows = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(rows, tensor)
    return [
        {name: None if value < 0 else value for name, value in zip(mine, row.tolist(), strict=True)}
        for row in rows
    ]


def _fullest_machine(job: Job, ranks: list[dict[str, int | None]]) -> int:
    """The workers' resident sets together, on the machine where they are largest."""
    local = min(job.plan["hardware"]["devices_per_node"], len(ranks))
    sizes = [rank["host"] or 0 for rank in ranks]
    return max(sum(sizes[start : start + local]) for start in range(0, len(sizes), local))
