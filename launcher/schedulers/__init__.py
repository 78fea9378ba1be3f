"""Schedulers: how the nodes of a run are started and find each other, and where `submit` queues jobs.

A scheduler is a module of this package that defines `SCHEDULER`, an object of a subclass of `Scheduler` or
`Queue` (scheduler.py), and its name in `SCHEDULERS`. Modules are imported when they are needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.schedulers.scheduler import Queue, Scheduler

SCHEDULERS = ("ssh", "slurm", "local")
"""In the order in which `run` asks them whether they start its nodes; the last one always does."""
QUEUES = ("slurm",)
"""Schedulers for `submit --to`."""


def scheduler_named(name: str) -> Scheduler:
    """The scheduler of this name."""
    found: Scheduler = import_module(f"{__name__}.{name}").SCHEDULER
    return found


def queue_named(name: str) -> Queue:
    """The scheduler of this name, one of QUEUES."""
    found: Queue = import_module(f"{__name__}.{name}").SCHEDULER
    return found
