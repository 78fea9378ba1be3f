"""What an engine does in the workers; the half that plans is in `launcher/engines/`."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, ClassVar

from launcher.train.job import Job


class TrainEngine:
    """An engine with what most have in common; a subclass sets what is different."""

    pickled_enum: ClassVar[tuple[str, str] | None] = None
    """(module, name) of the enumeration whose members its checkpoints hold."""
    steps_in_backward: ClassVar[bool] = False
    """Whether the optimizer steps inside the backward pass, where no callback reaches."""

    def before_arguments(self, job: Job) -> None:
        """Prepare the environment of TrainingArguments."""

    def arguments(self, job: Job) -> dict[str, Any]:
        """Fields of TrainingArguments that set it up."""
        return {}

    def after_arguments(self, job: Job) -> None:
        """Complete what TrainingArguments has set up, before the model is loaded."""

    def check_model(self, job: Job, model: Any) -> None:
        """RecipeError for a model that it cannot train."""

    def trainer_class(self, job: Job) -> Any:
        """The Trainer of tasks that have none of their own; None: PlannedTrainer."""
        return None

    def is_set_up(self, distributed_type: str) -> bool:
        """Whether accelerate has set it up. distributed_type: accelerate's name of what it did."""
        raise NotImplementedError

    def repair(self, trainer: Any, checkpoint: Path) -> None:
        """Fix what is restored incorrectly when `trainer` resumes from `checkpoint`."""

    def weights_to_save(self, trainer: Any) -> dict[str, Any] | None:
        """Name -> tensor of a checkpoint, where the Trainer's own save would copy more than that.

        None leaves it to the Trainer. {} on ranks that write nothing; every process must call it.
        """
        return None

    def save_trained(self, job: Job, trainer: Any, folder: Path) -> None:
        """Write the model, or its adapter, as from_pretrained reads it; every process must call it."""
        trainer.save_model(str(folder))


def stand_in_for_launcher() -> None:
    """Set the variables of a single process that no launcher started.

    Without them DeepSpeed asks MPI, and accelerate forms no process group, which FSDP2 shards over.
    """
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name, value in {**one, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        os.environ.setdefault(name, value)


def innermost(optimizer: Any) -> Any:
    """torch's optimizer within accelerate's and ZeRO's."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
