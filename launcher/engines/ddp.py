"""DDP: a complete copy on each rank, as read in torch 2.13 (nn/parallel/distributed.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.engines.engine import Engine
from launcher.memory.job import MemoryJob
from launcher.models.model import ModelSpec

if TYPE_CHECKING:
    from launcher.plan.draft import Draft
    from launcher.plan.plan import Plan

BUCKET_MB = 25
"""TrainingArguments.ddp_bucket_cap_mb where the recipe sets none: DDP's default."""


class Ddp(Engine):
    name = "ddp"
    updates_in_backward = True
    offload_limit = (
        "engine ddp keeps everything on its device",
        "use sharding.engine: deepspeed or fsdp, or drop the offload",
    )
    lacks = {
        "tp_size": (
            "engine ddp has no tensor parallelism: transformers can shard a model while loading it, but "
            "cannot save its optimizer, so such a run could not be resumed",
            "use sharding.engine: deepspeed (AutoTP, ZeRO 0 to 2)",
        ),
        "sp_size": (
            "engine ddp has no sequence parallelism: Ulysses is DeepSpeed's",
            "use sharding.engine: deepspeed",
        ),
        "cp_size": (
            "engine ddp has no context parallelism: accelerate has it with FSDP2 alone",
            "use sharding.engine: fsdp",
        ),
    }

    def label(self, zero_stage: int | None) -> str:
        return "DDP"

    def reduction_buffers(self, spec: ModelSpec, job: MemoryJob) -> int:
        # The reducer's buckets copy every gradient (gradient_as_bucket_view stays off).
        return self.trained_width(job) * job.trainable_params if job.data_parallel > 1 else 0

    def completed(self, job: MemoryJob, draft: Draft) -> MemoryJob:
        return replace(job, in_backward=draft.sharding.optim_in_backward)

    def bucket_bytes(self, plan: Plan, gradients: int) -> int:
        given = plan.trainer.ddp_bucket_cap_mb
        return min(gradients, (BUCKET_MB if given is None else given) * 2**20)


DDP = Ddp()
