"""Preference tuning with trl, whose preparation of rows runs on its own, before processes meet.

Importing this module imports trl. MachineError when that fails.
"""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from transformers import set_seed

from launcher.errors import MachineError, Problem, RecipeError
from launcher.train.data.chat import in_forms, plain_message, require_template, template_origin
from launcher.train.data.encoded import EncodedBatch
from launcher.train.data.rendered import RenderCheck
from launcher.train.data.sources import Row
from launcher.train.data.turns import Message, Template
from launcher.train.job import Job
from launcher.train.processing import local_or_hub
from launcher.train.tasks.task import Shown, TrainTask
from launcher.train.trainers import PlannedTrainer

if TYPE_CHECKING:
    from launcher.train.data.encoded import Encoder
    from launcher.train.data.formats import Detected

try:
    from trl import DPOConfig, DPOTrainer
except ImportError as error:
    raise MachineError(
        Problem(
            "trl-missing",
            f"task dpo needs trl, which cannot be imported: {error}",
            path="task",
            hint="pip install 'effilaunch[dpo]'",
        )
    ) from error

_COLUMNS = ["prompt_ids", "chosen_ids", "rejected_ids"]


class PreparedDpoTrainer(PlannedTrainer, DPOTrainer):
    """DPOTrainer for rows of `encode_preferences`.

    `keep_initial_adapter`: the reference is the adapter as it was before training (a continued one), not the
    bare model. Trained weights keep the data type that they came with.
    """

    def __init__(self, model: Any, *, keep_initial_adapter: bool, **more: Any) -> None:
        # trl turns trainable weights over a quantised model into bfloat16; the plan decides data types.
        quantised = getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)
        before = _trainable_copies(model) if quantised else {}
        super().__init__(model=model, **more)
        for name, parameter in model.named_parameters():
            if name in before:
                parameter.data = before[name].to(parameter.device)
        if not keep_initial_adapter and "ref" in getattr(model, "peft_config", {}):
            # Without its frozen copy trl switches a new adapter off instead, which is the same model.
            model.delete_adapter("ref")

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset

    def _send_telemetry(self) -> None:
        """Nobody is told of a run."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Weights without the reference adapter, which is the one that training started from."""
        super().save_model(output_dir, _internal_call)
        self.drop_reference(Path(output_dir or self.args.output_dir))

    def drop_reference(self, folder: Path) -> None:
        """Take the reference adapter out of what was saved."""
        reference = folder / "ref"
        if self.args.should_save and (reference / "adapter_config.json").is_file():
            shutil.rmtree(reference)


def _trainable_copies(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def make_reference(job: Job, args: Any, model: Any, processing: Any) -> Any:
    """A frozen copy of a fully trained model; None where trl finds the reference inside the model."""
    if job.has_adapter or args.precompute_ref_log_probs:
        return None
    if job.zero_stage == 3:
        # Shards of a model cannot be copied; loading it again gives the same weights.
        from launcher.train.models import load_model

        set_seed(args.seed)
        reference = load_model(job, processing)
    else:
        reference = copy.deepcopy(model)
    return reference.eval().requires_grad_(False)


def encode_preferences(job: Job, tokenizer: Any, rows: Sequence[Row]) -> EncodedBatch:
    """Rows {prompt, chosen, rejected}, all text or all messages, as prompt_ids, chosen_ids and rejected_ids.

    trl's own preparation does it, through a stream, so that no batch leaves a cache file or a progress bar.
    Samples stay uncut: trl's collator cuts them. `tokens` are those of both sequences, prompt with chosen and
    prompt with rejected; a row whose prompt alone fills max_length is dropped (no-targets).
    """
    from datasets import IterableDataset

    limit = job.value("data.max_length")
    settings = SimpleNamespace(max_length=limit, truncation_mode=DPOConfig.truncation_mode)
    different = [number for number, row in enumerate(rows) if row.values["chosen"] != row.values["rejected"]]
    _refuse_mixture([rows[number] for number in different])
    numbered = [{**rows[number].values, "row": number} for number in different]
    stream = IterableDataset.from_generator(lambda: iter(numbered))
    holder = SimpleNamespace(_tokenizer=tokenizer)
    prepared = (
        []
        if not numbered
        else list(DPOTrainer._prepare_dataset(holder, stream, tokenizer, settings, "train"))
    )
    batch = EncodedBatch({name: [sample[name] for sample in prepared] for name in _COLUMNS})
    batch.rows = [sample["row"] for sample in prepared]
    batch.kept = len(prepared)
    reasons = {"equal": len(rows) - len(different), "no-targets": len(different) - len(prepared)}
    batch.dropped = {reason: count for reason, count in reasons.items() if count}
    for sample in prepared:
        sizes = [len(sample["prompt_ids"]) + len(sample[name]) for name in _COLUMNS[1:]]
        lost = sum(max(0, size - limit) for size in sizes)
        batch.tokens += sum(sizes)
        batch.tokens_lost += lost
        batch.truncated += lost > 0
    return batch


def _refuse_mixture(rows: Sequence[Row]) -> None:
    """trl looks at the first row alone to tell text from messages, and text of a later row loses its EOS."""
    kinds = [isinstance(row.values["chosen"], str) for row in rows]
    for row, kind in zip(rows, kinds, strict=True):
        if kind is not kinds[0]:
            what = ("text", "messages") if kind else ("messages", "text")
            message = f"the answers are {what[0]}, those of rows before it are {what[1]}"
            hint = "put the two kinds into two sources"
            raise RecipeError(Problem("mixed-rows", message, file=row.file, line=row.number, hint=hint))


class PreferenceEncoder:
    """Preference pairs through trl's own preparation, which does not look at what the template leaves out."""

    def __init__(self, job: Job, tokenizer: Any) -> None:
        self.job, self.tokenizer = job, tokenizer
        self._rendered = RenderCheck(template_origin(job), masked=False)

    def __call__(self, rows: Sequence[Row]) -> EncodedBatch:
        notes: Counter[str] = Counter()
        rows = [row if isinstance(row.values["chosen"], str) else self._checked(row, notes) for row in rows]
        batch = encode_preferences(self.job, self.tokenizer, rows)
        batch.notes = +notes
        return batch

    def _checked(self, row: Row, notes: Counter[str]) -> Row:
        """The row with its messages as the template takes them. RecipeError where it leaves something out."""
        require_template(self.tokenizer)
        template = Template(self.tokenizer, row.values.get("tools"))

        def find(messages: list[Message]) -> tuple[list[Message], Counter[str]]:
            found: Counter[str] = Counter()
            taken = self._rendered.adapted(template, messages, row)
            self._rendered.check(template, taken, template.render(taken), row, found)
            return taken, found

        prompt, values = row.values["prompt"], dict(row.values)
        for name in ("chosen", "rejected"):
            messages = [plain_message(message) for message in [*prompt, *row.values[name]]]
            taken, found = in_forms(find, messages, self._rendered.origin, row)
            notes.update(found)
            values |= {"prompt": taken[: len(prompt)], name: taken[len(prompt) :]}
        return Row(values, row.file, row.number)


class TrainDPO(TrainTask):
    def encoder(self, job: Job, processing: Any, detected: Detected, labels: Sequence[str] | None) -> Encoder:
        return PreferenceEncoder(job, processing)

    def collator(self, job: Job, processing: Any) -> None:
        return None

    def shown(self, processing: Any, sample: Mapping[str, Any], labels: Sequence[str] | None) -> Shown:
        pieces = [
            (f"[{name[:-4]}] {processing.decode(sample[name])}", name != "prompt_ids") for name in _COLUMNS
        ]
        tokens = sum(len(sample[name]) for name in _COLUMNS)
        return pieces, tokens, tokens - len(sample["prompt_ids"])

    def arguments(self, job: Job) -> tuple[Any, dict[str, Any]]:
        return DPOConfig, {"max_length": job.value("data.max_length")}

    def trainer(self, job: Job, model: Any, processing: Any, common: dict[str, Any]) -> Any:
        reference = make_reference(job, common["args"], model, processing)
        keep = job.continued_adapter is not None
        return PreparedDpoTrainer(**common, ref_model=reference, keep_initial_adapter=keep)

    def as_it_began(self, job: Job, trainer: Any, processing: Any) -> None:
        """The reference is what training began with; trl copies the weights that it is given."""
        from launcher.train.models import load_model

        if job.continued_adapter:
            from peft import load_peft_weights, set_peft_model_state_dict

            weights = load_peft_weights(local_or_hub(job.continued_adapter), device="cpu")
            set_peft_model_state_dict(trainer.model, weights, adapter_name="ref")
        elif not job.has_adapter:
            trainer.ref_model.load_state_dict(load_model(job, processing).state_dict())


TRAIN_TASK = TrainDPO()
