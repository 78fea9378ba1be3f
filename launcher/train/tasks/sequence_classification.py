"""A class for each text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launcher.train.tasks.task import Shown, TrainTask, traced_tokens

if TYPE_CHECKING:
    from launcher.train.data.encoded import Encoder
    from launcher.train.data.formats import Detected
    from launcher.train.job import Job


class TrainSequenceClassification(TrainTask):
    def encoder(self, job: Job, processing: Any, detected: Detected, labels: Sequence[str] | None) -> Encoder:
        from launcher.train.data.tokenize import EncodeClasses, max_length_of, overlong_of

        overlong = overlong_of(job, detected.format)
        return EncodeClasses(processing, max_length_of(job), overlong, tuple(labels or ()))

    def shown(self, processing: Any, sample: Mapping[str, Any], labels: Sequence[str] | None) -> Shown:
        assert labels is not None, "a single label is a class"
        pieces = [(processing.decode(sample["input_ids"]), False), (f" -> {labels[sample['labels']]}", True)]
        return pieces, len(sample["input_ids"]), 1

    def traced_inputs(self, memory: Mapping[str, Any], config: Any, batch: int) -> dict[str, Any]:
        import torch

        inputs = traced_tokens(memory, batch)
        inputs.pop("position_ids", None)
        return inputs | {"labels": torch.zeros(len(inputs["input_ids"]), dtype=torch.long)}


TRAIN_TASK = TrainSequenceClassification()
