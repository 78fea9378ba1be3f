"""The engines. To add one: a module here, one of this name in launcher/train/engines/, a line in ENGINES."""

from __future__ import annotations

from launcher.engines.ddp import DDP
from launcher.engines.deepspeed import DEEPSPEED
from launcher.engines.engine import Engine
from launcher.engines.fsdp import FSDP
from launcher.memory.job import MemoryJob
from launcher.plan.settings import HasSettings

ENGINES: tuple[Engine, ...] = (DDP, DEEPSPEED, FSDP)
"""In the order in which a search tries those that the recipe leaves open."""
_BY_NAME = {engine.name: engine for engine in ENGINES}


def engine_named(name: str) -> Engine:
    """The engine of `sharding.engine`; KeyError for `auto` and names that are none."""
    return _BY_NAME[name]


def engine_of(planned: HasSettings | MemoryJob) -> Engine:
    """The engine of a draft, a plan or a memory job."""
    return _BY_NAME[planned.engine.name if isinstance(planned, MemoryJob) else planned.sharding.engine]
