"""trl's KTOTrainer for prepared rows, and the KL pairs of its batches. Importing this module imports trl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl import KTOTrainer
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

from launcher.train.tasks.reference import ReferenceTrainer
from launcher.train.upstream.trl_seams import KlTerms, WholeMetrics


class KlPairs(DataCollatorForUnpairedPreference):
    """Batches whose KL term pairs each prompt with the answer of the row before it in the batch, as trl's.

    trl pairs neighbouring rows once, which only holds for rows that are never shuffled. Rows that have a pair
    keep it.
    """

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        if "KL_completion_ids" not in examples[0]:
            answers = [example["completion_ids"] for example in examples]
            pairs = zip(examples, answers[-1:] + answers[:-1], strict=True)
            examples = [{**example, "KL_completion_ids": answer} for example, answer in pairs]
        batch: dict[str, Any] = super().torch_call(examples)
        return batch


class PreparedKtoTrainer(WholeMetrics, KlTerms, ReferenceTrainer, KTOTrainer):
    """KTOTrainer for rows of `encode_labelled`, in any order: `KlPairs` makes the pairs of each batch."""

    def __init__(self, model: Any, *, args: Any, **more: Any) -> None:
        order = args.train_sampling_strategy
        if not args.precompute_ref_log_probs:
            args.train_sampling_strategy = "sequential"  # trl refuses any other for its own pairs
        super().__init__(model=model, args=args, **more)
        args.train_sampling_strategy = order

    def metric_counts(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        good, tokens = inputs["label"].bool(), inputs["completion_mask"][:, 1:].sum(1)
        counts = {"rows": self.loss_items(inputs), "entropy": tokens.sum()}
        for side, rows in (("chosen", good), ("rejected", ~good)):
            counts |= dict.fromkeys((f"rewards/{side}", f"logps/{side}"), rows.sum())
            counts[f"logits/{side}"] = (tokens * rows).sum()
        return counts
