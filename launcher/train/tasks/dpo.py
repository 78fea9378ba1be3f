"""Preference tuning with trl, whose preparation of rows runs on its own, before processes meet.

Importing this module imports trl. MachineError when that fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from launcher.rows.sources import Row
from launcher.tasks.dpo import is_reference_free
from launcher.train.data.encoded import EncodedBatch
from launcher.train.job import Job
from launcher.train.own_trainer import over_own
from launcher.train.tasks.pairs import TrainAgainstReference, importing_trl, refuse_mixture
from launcher.train.tasks.reference import ReferenceTrainer, frozen_copy, make_reference
from launcher.train.tasks.task import Shown
from launcher.train.trainers import on_device
from launcher.train.upstream.trl_seams import WholeMetrics, preference_samples, reference_from

with importing_trl("dpo"):
    from trl import DPOConfig, DPOTrainer

_COLUMNS = ["prompt_ids", "chosen_ids", "rejected_ids"]


class PreparedDpoTrainer(WholeMetrics, ReferenceTrainer, DPOTrainer):
    """DPOTrainer for rows of `encode_preferences`.

    `reference_free`: the losses read no reference, so none is built or run; rewards are beta times the
    log-probability itself, as with a reference that gives all answers the same one.
    """

    def __init__(self, model: Any, *, reference_free: bool, **more: Any) -> None:
        super().__init__(model=model, **more)
        self._reference_free = reference_free
        if reference_free:
            self.precompute_ref_logps = True  # `compute_loss` brings them

    def loss_items(self, inputs: Any) -> torch.Tensor:
        """Pairs; the tokens of chosen answers where the loss is their mean alone."""
        pairs = len(inputs["input_ids"]) // 2
        if self.loss_types != ["sft"]:
            return on_device(pairs, inputs["input_ids"])
        chosen: torch.Tensor = inputs["completion_mask"][:pairs, 1:].sum()
        return chosen

    def metric_counts(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        chosen, rejected = (side.sum() for side in inputs["completion_mask"][:, 1:].chunk(2))
        return {
            "rows": on_device(len(inputs["input_ids"]) // 2, inputs["input_ids"]),
            "entropy": chosen + rejected,
            "logits/chosen": chosen,
            "logits/rejected": rejected,
            "mean_token_accuracy": chosen,
        }

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._reference_free:
            none = inputs["input_ids"].new_zeros(len(inputs["input_ids"]) // 2, dtype=torch.float32)
            inputs = {**inputs, "ref_chosen_logps": none, "ref_rejected_logps": none}
        return super().compute_loss(model, inputs, *args, **kwargs)


def encode_preferences(job: Job, tokenizer: Any, rows: Sequence[Row]) -> EncodedBatch:
    """Rows {prompt, chosen, rejected}, all text or all messages, as prompt_ids, chosen_ids and rejected_ids.

    trl's own preparation makes them. Samples stay uncut: trl's collator cuts them. `tokens` are those of both
    sequences, prompt with chosen and prompt with rejected; a row whose prompt alone fills max_length is
    dropped (no-targets).
    """
    limit = job.data.max_length
    different = [number for number, row in enumerate(rows) if row.values["chosen"] != row.values["rejected"]]
    refuse_mixture([rows[number] for number in different])
    numbered = [{**rows[number].values, "row": number} for number in different]
    prepared = preference_samples(numbered, tokenizer, limit)
    batch = EncodedBatch(columns={name: [sample[name] for sample in prepared] for name in _COLUMNS})
    batch.rows = [sample["row"] for sample in prepared]
    batch.kept = len(prepared)
    reasons = {"equal": len(rows) - len(different), "no-targets": len(different) - len(prepared)}
    batch.dropped = +Counter(reasons)
    for sample in prepared:
        sizes = [len(sample["prompt_ids"]) + len(sample[name]) for name in _COLUMNS[1:]]
        lost = sum(max(0, size - limit) for size in sizes)
        batch.tokens += sum(sizes)
        batch.tokens_lost += lost
        batch.truncated += lost > 0
    return batch


class TrainDPO(TrainAgainstReference):
    encode = staticmethod(encode_preferences)

    def shown(self, processing: Any, sample: Mapping[str, Any], labels: Sequence[str] | None) -> Shown:
        pieces = [
            (f"[{name[:-4]}] {processing.decode(sample[name])}", name != "prompt_ids") for name in _COLUMNS
        ]
        tokens = sum(len(sample[name]) for name in _COLUMNS)
        return pieces, tokens, tokens - len(sample["prompt_ids"])

    def arguments(self, job: Job) -> tuple[Any, dict[str, Any]]:
        return DPOConfig, {"max_length": job.data.max_length}

    def trainer(self, job: Job, model: Any, processing: Any, common: dict[str, Any]) -> Any:
        reference = make_reference(job, common["args"], model, processing)
        free = is_reference_free(job.fields(job.trainer))
        keep = job.adapter.path is not None and not free

        def before_training() -> Any:
            return None if free else frozen_copy(job, common["args"], model, processing)

        with reference_from(DPOTrainer, before_training):
            return over_own(job, PreparedDpoTrainer)(
                **common, ref_model=reference, keep_initial_adapter=keep, reference_free=free
            )


TRAIN_TASK = TrainDPO()
