"""Kahneman-Tversky optimisation: answers that are each labelled good or bad, with trl's KTOTrainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.errors import Problem
from launcher.tasks.rows import CHAT, INSTRUCTION, PROMPT_COMPLETION, RowFormat
from launcher.tasks.task import ANSWER_METRICS, FIXED_REFERENCE, ArgumentTable, TrlTask, precomputes

_CUT_AT_THE_END = "but trl cuts such rows at the end"
_LABEL_WORDS = ("tag", "desirable", "thumbs", "feedback", "good")
_NAMED = {"label": "kto_tag"}
WITHOUT_KL = "apo_zero_unpaired"
"""The loss type that has no KL term."""

LABELLED = RowFormat(
    "unpaired-preference",
    "answers with a label that says good or bad",
    {**PROMPT_COMPLETION.needed, "label": "label"},
    {"tools": "tools"},
    {**PROMPT_COMPLETION.related, "label": _LABEL_WORDS},
    other_names=_NAMED,
)
LABELLED_INSTRUCTION = RowFormat(
    "unpaired-instruction",
    "instructions whose output is labelled good or bad",
    {**INSTRUCTION.needed, "label": "label"},
    INSTRUCTION.optional,
    {**INSTRUCTION.related, "label": _LABEL_WORDS},
    other_names=_NAMED,
)
LABELLED_CHAT = RowFormat(
    "unpaired-chat",
    "conversations whose last answer is labelled good or bad",
    {**CHAT.needed, "label": "label"},
    CHAT.optional,
    {**CHAT.related, "label": _LABEL_WORDS},
    other_names={**CHAT.other_names, **_NAMED},
)


class KTO(TrlTask):
    name = "kto"
    aliases = ("unpaired-preference", "unpaired")
    row_formats = (LABELLED, LABELLED_INSTRUCTION, LABELLED_CHAT)
    overlong = {"split": _CUT_AT_THE_END, "drop": _CUT_AT_THE_END}
    prepared_by_ranks = False  # trl's preparation waits for all ranks
    model_class = "AutoModelForCausalLM"
    head = "language-model"
    head_in_checkpoint = True
    peft_task = "CAUSAL_LM"
    gguf = True
    tiled_logits = True
    has_reference = True
    untraceable = "KTO's loss works on tiles of logits that trl cuts, which a trace without trl does not see"
    argument_table = ArgumentTable("kto_config", "trl", "trainer/kto_config.py", "KTOConfig")
    owned_arguments = {**TrlTask.owned_arguments, **FIXED_REFERENCE}
    loss_arguments = ("beta", "loss_type", "desirable_weight", "undesirable_weight")
    own_metrics = (*ANSWER_METRICS, "kl")
    trainer_defaults = {
        "train_sampling_strategy": ("random", "the KL pairs are made of each batch, so rows are shuffled")
    }
    known_as = {"trl": ("kto",), "llamafactory": ("kto",), "axolotl": ("kto",)}
    known_by = {"trl": ("desirable_weight", "undesirable_weight", "beta", "precompute_ref_log_probs")}
    tool_defaults = {
        "trl": {
            "trainer.learning_rate": 1e-6,
            "trainer.beta": 0.1,
            "trainer.train_sampling_strategy": "sequential",
        },
        "llamafactory": {"trainer.beta": 0.1},
        "axolotl": {"trainer.train_sampling_strategy": "sequential"},
    }
    smoothing_hint = "remove it"
    goals = {"feedback": ("unpaired-preference", "unpaired-instruction", "unpaired-chat")}
    first_least_batch = 2
    first_rates = {"full": 5e-7, "adapter": 5e-6}
    first_rate_note = " by preferences"
    first_arguments = {"beta": (0.1, "how strongly the model is held to what it was")}
    pipeline = "text-generation"
    tags = ("kto",)

    def default_rate(self, *, adapter: bool) -> tuple[float, str]:
        return (1e-5, "trl's default, ten times for adapters") if adapter else (1e-6, "trl's default")

    def extra_forwards(self, trainer: Mapping[str, Any]) -> int:
        kl = trainer.get("loss_type") != WITHOUT_KL
        return kl + (1 + kl) * self.needs_reference(trainer)

    def least_batch(self, trainer: Mapping[str, Any]) -> tuple[int, str]:
        if trainer.get("loss_type") == WITHOUT_KL:
            return 1, ""
        return 2, "the KL term pairs each prompt with the answer of another row of its micro-batch"

    def compares(self, settings: Any) -> bool:
        return self.least_batch_of(settings)[0] > 1

    def loss_over(self, settings: Any) -> str:
        return "rows and KL term" if self.compares(settings) else self.loss_unit

    def check_trainer(self, trainer: Mapping[str, Any]) -> list[Problem]:
        problems = super().check_trainer(trainer)
        least, why = self.least_batch(trainer)
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
            size = trainer.get(name)
            if isinstance(size, int) and size < least:
                message = f"is {size}, but {why}: alone it would be paired with its own answer"
                hint = f"write at least {least}, or loss_type: {WITHOUT_KL}"
                problems.append(Problem("conflict", message, path=f"trainer.{name}", hint=hint))
        if least > 1 and precomputes(trainer):
            problems += _fixed_pairs(trainer)
        return problems


def _fixed_pairs(trainer: Mapping[str, Any]) -> list[Problem]:
    """Problems of KL pairs whose log-probabilities are computed once: each epoch must have the same ones."""
    if trainer.get("train_sampling_strategy") == "sequential":
        return []
    message = "computes the KL pairs of each batch once, but shuffled batches differ in each epoch"
    hint = f"write train_sampling_strategy: sequential, or loss_type: {WITHOUT_KL}"
    return [Problem("conflict", message, path="trainer.precompute_ref_log_probs", hint=hint)]
