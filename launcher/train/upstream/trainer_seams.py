"""Private methods of transformers' Trainer, led to public methods that a subclass overrides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import Trainer

from launcher.train.upstream.model_seams import adapters_by_own_names


class SeamTrainer(Trainer):
    """Trainer whose private steps call the public methods below.

    Each of these gets upstream's own code as `proceed`. The defaults run it.
    """

    def after_step(self, proceed: Callable[[], None]) -> None:
        """Log, evaluate and save what is due after a step or an epoch."""
        proceed()

    def run_epoch(self, epoch: int, proceed: Callable[[], None]) -> None:
        """Train one epoch; of a resumed run, the rest of it."""
        proceed()

    def save_checkpoint(self, write: Callable[[Path], None]) -> None:
        """Save a checkpoint; `write` writes checkpoint-N into the given folder."""
        write(Path(self.args.output_dir))

    def read_weights(self, checkpoint: Path) -> bool:
        """Read a checkpoint's weights; False leaves it to upstream."""
        return False

    def read_best(self, checkpoint: Path) -> bool:
        """Read the best checkpoint's weights at the end of training; False leaves it to upstream."""
        return False

    def count_tokens(self, inputs: Any) -> None:
        """Count the tokens of a micro-batch; called once for each."""

    def evaluate_after_step(self) -> None:
        """Evaluate as after a step, and judge whether the weights are the best so far."""
        self._determine_best_metric(metrics=self._evaluate(None, None), trial=None)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        upstream = super()._maybe_log_save_evaluate
        self.after_step(lambda: upstream(*args, **kwargs))

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        upstream = super()._run_epoch
        self.run_epoch(kwargs["epoch"], lambda: upstream(*args, **kwargs))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        upstream = super()._save_checkpoint

        def write(folder: Path) -> None:
            # Upstream pushes in the middle of the save, before the checkpoint is whole.
            with replaced(self.args, output_dir=str(folder), push_to_hub=False):
                upstream(model, trial)

        self.save_checkpoint(write)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self.read_weights(Path(resume_from_checkpoint)):
            with adapters_by_own_names():
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not self.read_best(Path(self.state.best_model_checkpoint)):
            with adapters_by_own_names():
                super()._load_best_model()

    def _track_num_input_tokens(self, inputs: Any) -> None:
        self.count_tokens(inputs)


@contextlib.contextmanager
def replaced(args: Any, **values: Any) -> Iterator[None]:
    """Give attributes other values for a while."""
    before = {name: getattr(args, name) for name in values}
    try:
        for name, value in values.items():
            setattr(args, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(args, name, value)


def columns_removed(trainer: Trainer, collate: Callable[..., Any]) -> Callable[..., Any]:
    """`collate` without the columns that the model's forward does not take, as in the Trainer's loaders."""
    found: Callable[..., Any] = trainer._get_collator_with_removed_columns(collate, description="training")
    return found


def per_device_batch(trainer: Trainer) -> int:
    """Samples of a micro-batch, as the Trainer counts them."""
    return int(trainer._train_batch_size)


def save_state_dict(trainer: Trainer, folder: Path, state: dict[str, Any]) -> None:
    """Save gathered weights with configuration and tokenizer, on the ranks that save."""
    trainer._save(str(folder), state_dict=state)
