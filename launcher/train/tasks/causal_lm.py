"""Causal language models: text, instructions, and conversations, packed or padded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launcher.rows.class_names import IGNORED
from launcher.train.data.encoded import decode_pieces
from launcher.train.tasks.task import Evaluated, Shown, TrainTask

if TYPE_CHECKING:
    from launcher.rows.sources import Detected
    from launcher.train.data.encoded import Data, Encoder
    from launcher.train.job import Job


class TrainCausalLM(TrainTask):
    counts_targets = True
    shifts_labels = True

    def encoder(self, job: Job, processing: Any, detected: Detected, labels: Sequence[str] | None) -> Encoder:
        from launcher.train.data.tokenize import make_encoder

        return make_encoder(job, processing, detected)

    def shown(self, processing: Any, sample: Mapping[str, Any], labels: Sequence[str] | None) -> Shown:
        ids, targets = sample["input_ids"], sample["labels"]
        return decode_pieces(processing, ids, targets), len(ids), len(targets) - targets.count(IGNORED)

    def scores(self, found: Evaluated) -> dict[str, float]:
        from launcher.train.metrics import token_accuracy

        return {"accuracy": token_accuracy(found.predictions, found.targets)}

    def check_batch(self, job: Job, tokenizer: Any, data: Data, micro_batch: int) -> None:
        from launcher.train.data.gate import check_masks, check_targets

        # The model predicts nothing for the first token, whose label a flattened row leaves out.
        samples = check_targets(tokenizer, data, micro_batch, first=1)
        check_masks(job, tokenizer, samples, data.formats)


TRAIN_TASK = TrainCausalLM()
