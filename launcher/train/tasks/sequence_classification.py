"""A class for each text."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launcher.tasks.sequence_classification import CLASSIFICATION
from launcher.train.tasks.task import OwnFormat, Shown, TrainTask, traced_tokens

if TYPE_CHECKING:
    from launcher.train.data.encoded import Encoder
    from launcher.train.data.formats import Detected
    from launcher.train.data.sources import Row
    from launcher.train.job import Job

_NOUNS = ("stone", "river", "lamp", "road", "bird", "cup")
_MOODS = {"bad": ("broken", "dull"), "fine": ("plain", "usual"), "good": ("lovely", "bright")}


def _shape(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    from launcher.train.data.formats import label_of, optional_text_in, text_in, value_in

    pair = optional_text_in(row, columns.get("text_pair"))
    text = text_in(row, columns["text"])
    label = label_of(row, value_in(row, columns["label"]), columns["label"])
    return {"text": text, "text_pair": pair, "label": label}


def _made_up(draw: random.Random, index: int) -> dict[str, Any]:
    mood = list(_MOODS)[index % len(_MOODS)]
    return {"text": f"This {draw.choice(_NOUNS)} is {draw.choice(_MOODS[mood])}.", "label": mood}


class TrainSequenceClassification(TrainTask):
    own_formats = {CLASSIFICATION.name: OwnFormat(_shape, _made_up)}

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
