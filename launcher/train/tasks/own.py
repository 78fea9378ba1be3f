"""Whatever the hooks make: samples, batches, model and loss are theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launcher.errors import Problem, RecipeError
from launcher.train.tasks.task import Shown, TrainTask

if TYPE_CHECKING:
    from launcher.rows.sources import Detected
    from launcher.train.data.encoded import Encoder
    from launcher.train.job import Job


class TrainOwn(TrainTask):
    def encoder(self, job: Job, processing: Any, detected: Detected, labels: Sequence[str] | None) -> Encoder:
        raise _no_rows()

    def shown(self, processing: Any, sample: Mapping[str, Any], labels: Sequence[str] | None) -> Shown:
        raise _no_rows()

    def processing(self, job: Job) -> Any:
        from launcher.train.own import own_processing

        return own_processing(job)

    def model(self, job: Job, processing: Any, labels: Sequence[str] | None) -> Any:
        from launcher.train.own import own_model

        return own_model(job)

    def trainer_class(self, job: Job) -> Any:
        from launcher.train.own import weighing_batches

        return weighing_batches(super().trainer_class(job))


def _no_rows() -> RecipeError:
    return RecipeError(Problem("usage", "task own reads no rows: the hook make_datasets makes the samples"))


TRAIN_TASK = TrainOwn()
