"""Trainers of trl that hold a model against the one it was: the frozen reference of a run.

Importing this module imports torch.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

from transformers import set_seed

from launcher.train.job import Job
from launcher.train.tasks.pairs import needs_reference
from launcher.train.trainers import PreparedTrainer


class ReferenceTrainer(PreparedTrainer):
    """Precedes a trainer of trl that has a reference.

    `keep_initial_adapter`: the reference is the adapter as it was before training (a continued one), not the
    bare model.
    """

    def __init__(self, model: Any, *, keep_initial_adapter: bool, **more: Any) -> None:
        super().__init__(model=model, **more)
        if not keep_initial_adapter and "ref" in getattr(model, "peft_config", {}):
            # Without its frozen copy trl switches a new adapter off instead, which is the same model.
            model.delete_adapter("ref")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Weights without the reference adapter, which is the one that training started from."""
        super().save_model(output_dir, _internal_call)
        self.drop_reference(Path(output_dir or self.args.output_dir))

    def drop_reference(self, folder: Path) -> None:
        """Take the reference adapter out of what was saved."""
        reference = folder / "ref"
        if self.args.should_save and (reference / "adapter_config.json").is_file():
            shutil.rmtree(reference)


def make_reference(job: Job, args: Any, model: Any, processing: Any) -> Any:
    """The reference of a fully trained model; None where there is none, or trl finds it inside the model."""
    return None if job.has_adapter or not needs_reference(job) else frozen_copy(job, args, model, processing)


def frozen_copy(job: Job, args: Any, model: Any, processing: Any) -> Any:
    """A model as it is before training."""
    if job.zero_stage == 3:
        # Shards of a model cannot be copied; loading it again gives the same weights.
        from launcher.train.model.models import load_model

        set_seed(args.seed)
        reference = load_model(job, processing)
    else:
        reference = copy.deepcopy(model)
    return reference.eval().requires_grad_(False)
