"""Answers that are labelled good or bad, with trl, whose preparation of rows runs before processes meet.

Importing this module imports trl. MachineError when that fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launcher.errors import Problem, RecipeError
from launcher.rows.sources import Row
from launcher.train.data.encoded import EncodedBatch
from launcher.train.job import Job
from launcher.train.own_trainer import over_own
from launcher.train.tasks.pairs import TrainAgainstReference, importing_trl, refuse_mixture
from launcher.train.tasks.reference import ReferenceTrainer, frozen_copy, make_reference
from launcher.train.tasks.task import Shown
from launcher.train.upstream.trl_seams import KlTerms, WholeMetrics, labelled_samples, reference_from

with importing_trl("kto"):
    from trl import KTOConfig, KTOTrainer
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

if TYPE_CHECKING:
    from launcher.train.data.encoded import Data

_COLUMNS = ["prompt_ids", "completion_ids", "label"]


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


def encode_labelled(job: Job, tokenizer: Any, rows: Sequence[Row]) -> EncodedBatch:
    """Rows {prompt, completion, label}, all text or all messages, as prompt_ids, completion_ids and label.

    trl's own preparation makes them. Samples stay uncut: trl's collator cuts them. A row whose prompt alone
    fills max_length is dropped (no-targets).
    """
    limit = job.data.max_length
    refuse_mixture(rows, "completion")
    numbered = [{**row.values, "row": number} for number, row in enumerate(rows)]
    prepared = labelled_samples(numbered, tokenizer, limit)
    batch = EncodedBatch(columns={name: [sample[name] for sample in prepared] for name in _COLUMNS})
    batch.rows = [sample["row"] for sample in prepared]
    batch.kept = len(prepared)
    batch.dropped = +Counter({"no-targets": len(rows) - len(prepared)})
    for sample in prepared:
        size = len(sample["prompt_ids"]) + len(sample["completion_ids"])
        batch.tokens += size
        batch.tokens_lost += max(0, size - limit)
        batch.truncated += size > limit
    return batch


# --- rows


# --- the balance of the classes


def check_labels(job: Job, labels: Any) -> str:
    """One line about the labels of the training samples, as trl judges their weights.

    labels: an arrow column of booleans. RecipeError where all are the same.
    """
    import pyarrow.compute

    good = int(pyarrow.compute.sum(labels).as_py() or 0)
    bad = len(labels) - good
    if not good or not bad:
        message = f"all {len(labels)} training samples are labelled {'good' if good else 'bad'}"
        hint = "KTO needs answers of both kinds: add rows, or correct the column of the label"
        raise RecipeError(Problem("one-class", message, path="data.train", hint=hint))
    trainer = job.fields(job.trainer)
    weights = [float(str(trainer.get(f"{kind}_weight", 1.0))) for kind in ("desirable", "undesirable")]
    line = f"labels: {good} good (weight {weights[0]:g}), {bad} bad (weight {weights[1]:g})"
    # Eq. 8 of https://huggingface.co/papers/2402.01306, rounded as trl 1.16 rounds it
    shares = [round(bad * weights[1] / good * factor, 2) for factor in (1, 1.33)]
    others = [round(good * weights[0] / bad / factor, 2) for factor in (1.33, 1)]
    if good == bad or shares[0] <= weights[0] <= shares[1] or others[0] <= weights[1] <= others[1]:
        return line
    return (
        f"WARNING: {line}: trl recommends either desirable_weight from {shares[0]} to {shares[1]} or "
        f"undesirable_weight from {others[0]} to {others[1]}, not both"
    )


class TrainKTO(TrainAgainstReference):
    encode = staticmethod(encode_labelled)
    answers = ("completion",)

    def shown(self, processing: Any, sample: Mapping[str, Any], labels: Sequence[str] | None) -> Shown:
        answer = "good" if sample["label"] else "bad"
        pieces = [
            (f"[prompt] {processing.decode(sample['prompt_ids'])}", False),
            (f"[{answer}] {processing.decode(sample['completion_ids'])}", True),
        ]
        targets = len(sample["completion_ids"])
        return pieces, len(sample["prompt_ids"]) + targets, targets

    def check_batch(self, job: Job, tokenizer: Any, data: Data, micro_batch: int) -> None:
        print(check_labels(job, data.train.with_format("arrow")["label"][:]))

    def arguments(self, job: Job) -> tuple[Any, dict[str, Any]]:
        return KTOConfig, {"max_length": job.data.max_length}

    def trainer(self, job: Job, model: Any, processing: Any, common: dict[str, Any]) -> Any:
        args = common["args"]
        if job.task.least_batch_of(job)[0] > 1:
            common = common | {
                "data_collator": KlPairs(
                    pad_token_id=processing.pad_token_id,
                    max_length=args.max_length,
                    pad_to_multiple_of=args.pad_to_multiple_of,
                )
            }
        with reference_from(KTOTrainer, lambda: frozen_copy(job, args, model, processing)):
            return over_own(job, PreparedKtoTrainer)(
                **common,
                ref_model=make_reference(job, args, model, processing),
                keep_initial_adapter=job.adapter.path is not None,
            )


TRAIN_TASK = TrainKTO()
