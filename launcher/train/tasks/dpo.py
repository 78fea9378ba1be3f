"""Preference tuning with trl, whose preparation of rows runs on its own, before processes meet.

Importing this module imports trl. MachineError when that fails.
"""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import set_seed

from launcher.train.data.encoded import EncodedBatch
from launcher.train.data.sources import Row
from launcher.train.job import Job
from launcher.train.model.processing import local_or_hub
from launcher.train.tasks.pairs import TrainPairs, importing_trl, refuse_mixture
from launcher.train.tasks.task import Shown
from launcher.train.trainers import PreparedTrainer
from launcher.train.upstream.trl_seams import preference_samples

with importing_trl("dpo"):
    from trl import DPOConfig, DPOTrainer

_COLUMNS = ["prompt_ids", "chosen_ids", "rejected_ids"]


class PreparedDpoTrainer(PreparedTrainer, DPOTrainer):
    """DPOTrainer for rows of `encode_preferences`.

    `keep_initial_adapter`: the reference is the adapter as it was before training (a continued one), not the
    bare model.
    """

    def __init__(self, model: Any, *, keep_initial_adapter: bool, **more: Any) -> None:
        super().__init__(model=model, **more)
        if not keep_initial_adapter and "ref" in getattr(model, "peft_config", {}):
            # Without its frozen copy trl switches a new adapter off instead, which is the same model.
            model.delete_adapter("ref")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Weights without the reference adapter, which is the one that training started from."""
        super().save_model(output_dir, _internal_call)
        self.drop_reference(Path(output_dir or self.args.output_dir))

    def drop_reference(self, folder: Path) -> None:
        """Take the reference adapter out of what was saved."""
        reference = folder / "ref"
        if self.args.should_save and (reference / "adapter_config.json").is_file():
            shutil.rmtree(reference)


def make_reference(job: Job, args: Any, model: Any, processing: Any) -> Any:
    """A frozen copy of a fully trained model; None where trl finds the reference inside the model."""
    if job.has_adapter or args.precompute_ref_log_probs:
        return None
    if job.zero_stage == 3:
        # Shards of a model cannot be copied; loading it again gives the same weights.
        from launcher.train.model.models import load_model

        set_seed(args.seed)
        reference = load_model(job, processing)
    else:
        reference = copy.deepcopy(model)
    return reference.eval().requires_grad_(False)


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


class TrainDPO(TrainPairs):
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
        keep = job.adapter.path is not None
        return PreparedDpoTrainer(**common, ref_model=reference, keep_initial_adapter=keep)

    def as_it_began(self, job: Job, trainer: Any, processing: Any) -> None:
        """The reference is what training began with; trl copies the weights that it is given."""
        from launcher.train.model.models import load_model

        if job.adapter.path:
            from peft import load_peft_weights, set_peft_model_state_dict

            from launcher.train.upstream.model_seams import adapters_by_own_names

            weights = load_peft_weights(local_or_hub(job.adapter.path), device="cpu")
            with adapters_by_own_names():
                set_peft_model_state_dict(trainer.model, weights, adapter_name="ref")
        elif not job.has_adapter:
            trainer.ref_model.load_state_dict(load_model(job, processing).state_dict())


TRAIN_TASK = TrainDPO()
