"""How the workers train each task: one module of the same name as in launcher/tasks/."""

from __future__ import annotations

import importlib

from launcher.train.tasks.task import TrainTask


def train_task(name: str) -> TrainTask:
    """The worker half of a task. Its module is imported now: that of dpo imports trl.

    MachineError where a package of the task cannot be imported.
    """
    module = importlib.import_module(f"launcher.train.tasks.{name.replace('-', '_')}")
    task: TrainTask = module.TRAIN_TASK
    return task
