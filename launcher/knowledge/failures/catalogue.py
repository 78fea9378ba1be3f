"""Every known failure, by chapter of docs/failures.md."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.knowledge.failures.adapters import ADAPTERS
from launcher.knowledge.failures.data import DATA
from launcher.knowledge.failures.deepspeed import DEEPSPEED_BUILD, DEEPSPEED_CONFIG, DEEPSPEED_ENGINE
from launcher.knowledge.failures.failure import Failure
from launcher.knowledge.failures.hub import HUB
from launcher.knowledge.failures.installation import INSTALLATION
from launcher.knowledge.failures.launching import DISTRIBUTED, PARALLEL, SLURM
from launcher.knowledge.failures.precision import PRECISION
from launcher.knowledge.failures.quantization import QUANTIZATION
from launcher.knowledge.failures.saving import MEMORY, SAVING

CHAPTERS: Mapping[str, tuple[Failure, ...]] = {
    "Precision": PRECISION,
    "Adapters and activation checkpointing": ADAPTERS,
    "Quantisation": QUANTIZATION,
    "DeepSpeed: the config": DEEPSPEED_CONFIG,
    "DeepSpeed: the engine": DEEPSPEED_ENGINE,
    "DeepSpeed: compiled operators": DEEPSPEED_BUILD,
    "Launching": DISTRIBUTED,
    "Slurm": SLURM,
    "Ranks that share a copy": PARALLEL,
    "Data": DATA,
    "Resuming and saving": SAVING,
    "Memory": MEMORY,
    "Trackers, hub, caches": HUB,
    "Installed packages": INSTALLATION,
}

FAILURES: tuple[Failure, ...] = tuple(failure for chapter in CHAPTERS.values() for failure in chapter)
