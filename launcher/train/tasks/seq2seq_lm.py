"""Encoder-decoder language models: what the encoder reads, and what the decoder writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launcher.errors import Problem, RecipeError
from launcher.rows.class_names import IGNORED
from launcher.train.tasks.task import Evaluated, Shown, TrainTask

if TYPE_CHECKING:
    from launcher.rows.sources import Detected
    from launcher.train.data.encoded import Data, Encoder
    from launcher.train.job import Job


class TrainSeq2SeqLM(TrainTask):
    counts_targets = True

    def encoder(self, job: Job, processing: Any, detected: Detected, labels: Sequence[str] | None) -> Encoder:
        from launcher.train.data.tokenize import EncodeSeq2Seq, max_length_of, overlong_of

        return EncodeSeq2Seq(processing, max_length_of(job), overlong_of(job, detected.format))

    def shown(self, processing: Any, sample: Mapping[str, Any], labels: Sequence[str] | None) -> Shown:
        ids, own = sample["input_ids"], [token for token in sample["labels"] if token != IGNORED]
        pieces = [(processing.decode(ids), False), (processing.decode(own), True)]
        return pieces, len(ids) + len(own), len(own)

    def scores(self, found: Evaluated) -> dict[str, float]:
        from launcher.train.metrics import decoded, text_scores

        texts = [decoded(found.processing, ids) for ids in (found.predictions, found.targets)]
        return text_scores(found.names, *texts)

    def check_batch(self, job: Job, tokenizer: Any, data: Data, micro_batch: int) -> None:
        from launcher.train.data.gate import check_targets

        check_targets(tokenizer, data, micro_batch)

    def arguments(self, job: Job) -> tuple[Any, dict[str, Any]]:
        from transformers import Seq2SeqTrainingArguments

        return Seq2SeqTrainingArguments, {}

    def trainer_class(self, job: Job) -> Any:
        from launcher.train.trainers import PlannedSeq2SeqTrainer

        return PlannedSeq2SeqTrainer

    def trainer(self, job: Job, model: Any, processing: Any, common: dict[str, Any]) -> Any:
        base = model.get_base_model() if job.has_adapter else model
        smooths = common["args"].label_smoothing_factor
        if smooths and not hasattr(base, "prepare_decoder_input_ids_from_labels"):
            message = f"{type(base).__name__} cannot tell what its decoder reads without labels"
            path, hint = "trainer.label_smoothing_factor", "remove it"
            raise RecipeError(Problem("conflict", message, path=path, hint=hint))
        return super().trainer(job, model, processing, common)

    def generates(self, job: Job) -> bool:
        return bool(job.trainer.predict_with_generate)


TRAIN_TASK = TrainSeq2SeqLM()
