"""A class, several labels, or scores for each text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from launcher.rows.own_formats import MOODS
from launcher.tasks.sequence_classification import MULTI, REGRESSION, SINGLE
from launcher.train.tasks.task import Evaluated, Shown, TrainTask, traced_tokens

if TYPE_CHECKING:
    from launcher.rows.sources import Detected, Row
    from launcher.train.data.encoded import Encoder
    from launcher.train.job import Job

THRESHOLD = 0.5
"""Probability from which on a label of several applies."""


class TrainSequenceClassification(TrainTask):
    def labels(self, job: Job, rows: Iterable[Row]) -> tuple[str, ...]:
        from launcher.rows.targets import PROBLEM_TYPES

        return PROBLEM_TYPES[job.data.problem_type].names(rows)

    def rehearsed(self, job: Job, values: dict[str, Any]) -> dict[str, Any]:
        mood = values["label"]
        made = {SINGLE: mood, REGRESSION: list(MOODS).index(mood) / 2, MULTI: [mood]}
        return {**values, "label": made[job.data.problem_type]}

    def encoder(self, job: Job, processing: Any, detected: Detected, labels: Sequence[str] | None) -> Encoder:
        from launcher.rows.targets import PROBLEM_TYPES
        from launcher.train.data.tokenize import EncodeClasses, max_length_of, overlong_of

        overlong = overlong_of(job, detected.format)
        target = partial(PROBLEM_TYPES[job.data.problem_type].target, tuple(labels or ()))
        several = job.data.problem_type == MULTI
        return EncodeClasses(processing, max_length_of(job), overlong, target, several)

    def shown(self, processing: Any, sample: Mapping[str, Any], labels: Sequence[str] | None) -> Shown:
        assert labels is not None, "every kind of label has names"
        target = sample["labels"]
        if isinstance(target, int):
            said = labels[target]
        elif isinstance(target, float):
            said = f"{target:g}"
        else:
            said = ", ".join(f"{name} {value:g}" for name, value in zip(labels, target, strict=True))
        pieces = [(processing.decode(sample["input_ids"]), False), (f" -> {said}", True)]
        return pieces, len(sample["input_ids"]), 1

    def scores(self, found: Evaluated) -> dict[str, float]:
        from launcher.train.metrics import class_scores, label_scores, regression_scores

        score = {SINGLE: class_scores, REGRESSION: regression_scores, MULTI: label_scores}
        return score[found.problem_type](found.names, found.predictions, found.targets)

    def reply(self, model: Any, processing: Any, prompt: str, inputs: Any) -> str:
        """The class; or each score; or the labels that apply, with their probabilities."""
        kind = model.config.problem_type
        if kind not in (REGRESSION, MULTI):
            return super().reply(model, processing, prompt, inputs)
        logits = model(**inputs).logits[0].float()
        names = [model.config.id2label[number] for number in range(len(logits))]
        if kind == REGRESSION and len(names) == 1:
            return f"{float(logits[0]):.4f}"
        values = (logits if kind == REGRESSION else logits.sigmoid()).tolist()
        found = list(zip(names, values, strict=True))
        if kind == MULTI:
            best, share = max(found, key=lambda one: one[1])
            if share < THRESHOLD:
                return f"no label reaches {THRESHOLD}; the most probable is {best} ({share:.4f})"
            found = [one for one in found if one[1] >= THRESHOLD]
        return "\n".join(f"{name}\t{value:.4f}" for name, value in found)

    def traced_inputs(self, memory: Mapping[str, Any], config: Any, batch: int) -> dict[str, Any]:
        import torch

        inputs = traced_tokens(memory, batch)
        inputs.pop("position_ids", None)
        return inputs | {"labels": torch.zeros(len(inputs["input_ids"]), dtype=torch.long)}


TRAIN_TASK = TrainSequenceClassification()
