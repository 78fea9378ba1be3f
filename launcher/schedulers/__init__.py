"""Schedulers: how the nodes of a run are started and find each other, and where `submit` queues jobs.

One that starts nodes is a module of this package with `SCHEDULER`, an object of a subclass of `Scheduler`
(scheduler.py); one that takes jobs has `QUEUE`, of a subclass of `Queue` (queue.py). Modules are imported
when they are needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.schedulers.queue import Queue
    from launcher.schedulers.scheduler import Scheduler

SCHEDULERS = ("ssh", "slurm_nodes", "local")
"""In the order in which `run` asks them whether they start its nodes; the last one always does."""
QUEUES = ("slurm", "kubernetes", "skypilot", "ray")
"""Schedulers for `submit --to`; the first is the default."""


def scheduler_named(name: str) -> Scheduler:
    """The one of SCHEDULERS with this name."""
    found: Scheduler = import_module(f"{__name__}.{name}").SCHEDULER
    return found


def queue_named(name: str) -> Queue:
    """The one of QUEUES with this name."""
    found: Queue = import_module(f"{__name__}.{name}").QUEUE
    return found
