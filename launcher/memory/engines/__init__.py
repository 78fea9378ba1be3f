"""What each engine holds in memory: one module per engine, behind `EngineMemory`."""

from __future__ import annotations

from launcher.memory.engines.ddp import Ddp
from launcher.memory.engines.deepspeed import DeepSpeed
from launcher.memory.engines.engine import EngineMemory
from launcher.memory.engines.fsdp import Fsdp
from launcher.memory.job import MemoryJob

DDP, FSDP, DEEPSPEED = Ddp(), Fsdp(), DeepSpeed()
ENGINES: tuple[EngineMemory, ...] = (DDP, FSDP, DEEPSPEED)
_BY_NAME = {engine.name: engine for engine in ENGINES}


def engine_of(job: MemoryJob) -> EngineMemory:
    """The memory rules of a job's engine."""
    return _BY_NAME[job.engine]
