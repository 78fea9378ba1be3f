"""What the workers ask of a task: samples from rows, batches from samples, and the Trainer.

The defaults are those of tasks whose samples are tokens and whose Trainer is the Hugging Face one. Modules
that need torch are imported where they are used: preparing data does without most of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pathlib import Path

    from launcher.rows.sources import Detected, Row
    from launcher.train.data.encoded import Data, Encoder
    from launcher.train.job import Job


@dataclass(frozen=True, slots=True)
class Evaluated:
    """All samples of an evaluation."""

    names: Sequence[str]
    """Of the metrics to compute."""
    predictions: Any
    """numpy array, as `targets`."""
    targets: Any
    processing: Any
    labels: Sequence[str] | None
    problem_type: str = "single_label_classification"
    """`data.problem_type`."""


class TrainTask:
    """The worker half of a task; a subclass overrides what is different."""

    # --- data -----------------------------------------------------------------------------------
    def encoder(self, job: Job, processing: Any, detected: Detected, labels: Sequence[str] | None) -> Encoder:
        """What turns canonical rows of a format into samples.

        processing: the tokenizer or image processor. labels: classes in the order of their ids. RecipeError
        where the options of `data:` do not go with the format.
        """
        raise NotImplementedError

    def labels(self, job: Job, rows: Iterable[Row]) -> tuple[str, ...]:
        """Names of the labels in canonical rows of training, in the order of their ids.

        RecipeError where the rows cannot be learned from.
        """
        from launcher.rows.class_names import collect_labels

        return collect_labels(rows)

    def rehearsed(self, job: Job, values: dict[str, Any]) -> dict[str, Any]:
        """A row made up for `--tiny` as the options of `data:` need it."""
        return values

    def samples(self, job: Job, samples: Any, processing: Any) -> Any:
        """The dataset that the Trainer gets for prepared samples: packs, where the plan packs."""
        from launcher.train.data.batches import packed_rows

        return packed_rows(job, samples) if job.data.packing else samples

    def collator(self, job: Job, processing: Any) -> Any | None:
        """Samples to a batch of training; None: the Trainer's own."""
        from launcher.train.data.batches import make_collator

        kind: Literal["pad", "packed", "flatten"] = "packed" if job.data.packing else "pad"
        if job.data.padding_free:
            kind = "flatten"
        return make_collator(kind, processing, pad_to_multiple_of=job.data.pad_to_multiple_of)

    def shown(self, processing: Any, sample: Mapping[str, Any], labels: Sequence[str] | None) -> Shown:
        """A prepared sample as people read it."""
        raise NotImplementedError

    def shown_images(self, sample: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The images of a prepared sample as JSON: {name, size: [width, height], thumbnail: a data URI}, and
        `tokens`: [first, last], from 1, where they have tokens."""
        return []

    def check_batch(self, job: Job, tokenizer: Any, data: Data, micro_batch: int) -> None:
        """RecipeError when the first batch is not what the recipe asks for."""

    def tried(self, job: Job, processing: Any, samples: Any) -> dict[str, Any]:
        """Further entries of data.json, from what is tried on prepared training samples. RecipeError where it
        shows that the run would fail."""
        return {}

    # --- training -------------------------------------------------------------------------------

    def processing(self, job: Job) -> Any:
        """The tokenizer or processor of the model; None without one."""
        from launcher.train.model.processing import load_processing

        return load_processing(job)

    def model(self, job: Job, processing: Any, labels: Sequence[str] | None) -> Any:
        """The model before an adapter, as it is trained. labels: names of the classes."""
        from launcher.train.model.models import load_model

        return load_model(job, processing, labels)

    def arguments(self, job: Job) -> tuple[Any, dict[str, Any]]:
        """(class of the Trainer's arguments, values of its fields that come from other sections)."""
        from transformers import TrainingArguments

        return TrainingArguments, {}

    def trainer(self, job: Job, model: Any, processing: Any, common: dict[str, Any]) -> Any:
        """The Trainer. common: arguments of every one, model and args among them."""
        from launcher.train.metrics import keep_predictions
        from launcher.train.model.loss import takes_token_counts
        from launcher.train.own_trainer import over_own

        kind = over_own(job, self.trainer_class(job))
        keep = keep_predictions(job.task, generates=self.generates(job))
        trainer = kind(**common, preprocess_logits_for_metrics=keep)
        if not takes_token_counts(model.get_base_model() if job.has_adapter else model):
            trainer.model_accepts_loss_kwargs = False
        return trainer

    def trainer_class(self, job: Job) -> Any:
        from launcher.train.engines import train_engine
        from launcher.train.trainers import PlannedTrainer

        return train_engine(job).trainer_class(job) or PlannedTrainer

    def generates(self, job: Job) -> bool:
        """Whether evaluations of this run generate text."""
        return False

    def scores(self, found: Evaluated) -> dict[str, float]:
        """The metrics of an evaluation; here those of one class for each sample."""
        from launcher.train.metrics import class_scores

        return class_scores(found.names, found.predictions, found.targets)

    def as_it_began(self, job: Job, trainer: Any, processing: Any) -> None:
        """Before an evaluation after the run: what of the Trainer belongs to the state before training."""

    # --- result ---------------------------------------------------------------------------------

    def write_beside(self, job: Job, model: Any, folder: Path) -> None:
        """Write what belongs beside the files of a result: of the modules that follow the model."""

    def reply(self, model: Any, processing: Any, prompt: str, inputs: Any) -> str:
        """What `generate` prints where the model does not write: the label, or what replaces it.

        inputs: the encoded prompt, on the model's device.
        """
        return str(model.config.id2label[int(model(**inputs).logits[0].argmax())])

    def reply_to_pair(self, trained: Any, texts: Sequence[str]) -> str:
        """What `generate` prints for two texts. trained: the loaded result (results/generate.py)."""
        raise NotImplementedError

    # --- trace ----------------------------------------------------------------------------------

    def traced_inputs(self, memory: Mapping[str, Any], config: Any, batch: int) -> dict[str, Any]:
        """A micro-batch of full rows as the collator gives it. memory: fields of MemoryJob."""
        import torch

        inputs = traced_tokens(memory, batch)
        return inputs | {"labels": torch.zeros_like(inputs["input_ids"])}

    counts_targets: bool = False
    """Whether the Trainer hands the model the number of target tokens (`num_items_in_batch`)."""
    shifts_labels: bool = False
    """Whether a token's label is the next one."""


Shown = tuple[list[tuple[str, bool]], int, int]
"""(pieces: text and whether it contributes to the loss, tokens, target tokens)."""


def traced_tokens(memory: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """Token ids [rows, length] of full rows, with the mask or the positions that the collator adds."""
    import torch

    rows, length = batch, memory["sequence_length"]
    if memory["one_row"]:
        rows, length = 1, batch * length
    tokens = torch.zeros(rows, length, dtype=torch.long)
    inputs = {"input_ids": tokens}
    if memory["padded"]:
        inputs["attention_mask"] = torch.ones_like(tokens)
    if memory["document_mask"]:
        inputs["position_ids"] = torch.zeros_like(tokens)
    return inputs
