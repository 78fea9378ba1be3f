"""DDP: a whole copy on each rank, as read in torch 2.13 (nn/parallel/distributed.py)."""

from __future__ import annotations

from launcher.facts.model import ModelSpec
from launcher.memory.engines.engine import EngineMemory
from launcher.memory.job import MemoryJob


class Ddp(EngineMemory):
    name = "ddp"

    def label(self, job: MemoryJob) -> str:
        return "DDP"

    def reduction_buffers(self, spec: ModelSpec, job: MemoryJob) -> int:
        # The reducer's buckets copy every gradient (gradient_as_bucket_view stays off).
        return self.trained_width(job) * job.trainable_params if job.data_parallel > 1 else 0
