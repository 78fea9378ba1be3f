"""What each engine does in the workers: one module of the same name as in launcher/engines/."""

from __future__ import annotations

import importlib

from launcher.train.engines.engine import TrainEngine
from launcher.train.job import Job


def train_engine(job: Job) -> TrainEngine:
    """The worker half of the plan's engine, whose module is imported now."""
    found: TrainEngine = importlib.import_module(f"{__name__}.{job.engine.name}").TRAIN_ENGINE
    return found
