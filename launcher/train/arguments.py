"""The plan's `trainer` settings as the argument class of its task."""

from __future__ import annotations

from typing import Any

from transformers import Seq2SeqTrainingArguments, TrainingArguments

from launcher.train.job import Job
from launcher.train.metrics import asked_metrics, is_generated


def make_arguments(job: Job) -> TrainingArguments:
    """TrainingArguments, or the subclass of the plan's task; folders and the DeepSpeed file are the run's.

    Settles device and process group. MachineError when the task's package is missing.
    """
    task = job.value("task", "causal-lm")
    fields = job.section("trainer")
    fields.setdefault("seed", job.seed)
    fields.setdefault("logging_nan_inf_filter", False)
    _count_tokens(fields, task)
    fields["output_dir"] = str(job.checkpoints)
    if job.ds_config is not None:
        fields["deepspeed"] = str(job.ds_config)
    kind: Any = TrainingArguments
    if task == "seq2seq-lm":
        kind = Seq2SeqTrainingArguments
        _generation(job, fields)
    elif task == "image-classification":
        # Pictures are read from columns that no model knows.
        fields["remove_unused_columns"] = False
    elif task == "dpo":
        from launcher.train.dpo import DPOConfig

        kind = DPOConfig
        _preferences(job, fields)
    args = kind(**fields)
    _ = args.device  # settles device and process group now
    return args


def _count_tokens(fields: dict[str, Any], task: str) -> None:
    """Speeds are reported in tokens, without padding; pictures have none."""
    if task == "image-classification":
        fields["include_num_input_tokens_seen"] = "no"
    elif fields.get("include_num_input_tokens_seen") in (None, False, "no"):
        fields["include_num_input_tokens_seen"] = "non_padding"


def _generation(job: Job, fields: dict[str, Any]) -> None:
    if any(is_generated(name) for name in asked_metrics(job)):
        fields.setdefault("predict_with_generate", True)
    if fields.get("predict_with_generate") and fields.get("generation_max_length") is None:
        fields["generation_max_length"] = job.value("data.max_length")


def _preferences(job: Job, fields: dict[str, Any]) -> None:
    """trl's own defaults give way to upstream's, so that only the plan changes how a run trains.

    The learning rate keeps trl's default (1e-6): preference losses diverge at upstream's.
    """
    fields["max_length"] = job.value("data.max_length")
    fields.setdefault("bf16", False)
    fields.setdefault("logging_steps", TrainingArguments.logging_steps)
    # With the new name left out, trl's default of the old one (true) would be taken for it.
    fields.setdefault("activation_checkpointing", bool(fields.pop("gradient_checkpointing", False)))
