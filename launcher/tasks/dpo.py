"""Direct preference optimisation: a chosen and a rejected answer, with trl's DPOTrainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.errors import Problem
from launcher.tasks.task import ANSWER_METRICS, FIXED_REFERENCE, ArgumentTable, PairTask, precomputes

_REFERENCE_FREE = frozenset({"sft"})
"""Losses that read no log-probability of the reference (trl 1.16, DPOTrainer._compute_loss)."""
_SORTING = frozenset({"aot", "aot_unpaired"})
"""Losses that compare the sorted pairs of a micro-batch."""
_OF_DIFFERENCE = frozenset(
    {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
)
"""Losses that trl takes with another `f_divergence_type` than reverse_kl."""
_CUT_AT_THE_END = "but trl cuts preference rows at the end"


class DPO(PairTask):
    name = "dpo"
    unread_fields = ("margin",)
    aliases = ("preference", "preference-tuning", "pairs")
    overlong = {"split": _CUT_AT_THE_END, "drop": _CUT_AT_THE_END}
    prepared_by_ranks = False  # trl's preparation waits for all ranks
    model_class = "AutoModelForCausalLM"
    head = "language-model"
    head_in_checkpoint = True
    peft_task = "CAUSAL_LM"
    gguf = True
    tiled_logits = True
    has_reference = True
    untraceable = "DPO's loss works on tiles of logits that trl cuts, which a trace without trl does not see"
    argument_table = ArgumentTable("dpo_config", "trl", "trainer/dpo_config.py", "DPOConfig")
    owned_arguments = {
        **PairTask.owned_arguments,
        "padding_free": "remove it: trl does not support it now",
        "truncation_mode": "remove it: trl keeps the start of a sample",
        **FIXED_REFERENCE,
    }
    loss_arguments = ("beta", "loss_type")
    own_metrics = ("rewards/accuracies", *ANSWER_METRICS, "mean_token_accuracy")
    known_as = {"trl": ("dpo",), "llamafactory": ("dpo",), "axolotl": ("dpo", "ipo")}
    known_by = {
        "trl": (
            "f_divergence_type",
            "precompute_ref_log_probs",
            "loss_weights",
            "ld_alpha",
            "discopop_tau",
            "beta",
        )
    }
    tool_defaults = {
        "trl": {"trainer.learning_rate": 1e-6, "trainer.beta": 0.1},
        "llamafactory": {"trainer.beta": 0.1},
    }
    smoothing_hint = "remove it, or write `label_smoothing`"
    goals = {"preferences": ("preference",)}
    first_rates = {"full": 5e-7, "adapter": 5e-6}
    first_rate_note = " by preferences"
    first_arguments = {"beta": (0.1, "how strongly the model is held to what it was")}
    pipeline = "text-generation"
    tags = ("dpo",)

    def default_rate(self, *, adapter: bool) -> tuple[float, str]:
        return (1e-5, "trl's default, ten times for adapters") if adapter else (1e-6, "trl's default")

    def compares(self, settings: Any) -> bool:
        losses = loss_types(settings.fields(settings.trainer))
        # `sft` is a mean over the tokens of a micro-batch: beside others its share would be another.
        return bool(_SORTING & set(losses)) or ("sft" in losses and len(losses) > 1)

    def loss_over(self, settings: Any) -> str:
        alone = loss_types(settings.fields(settings.trainer)) == ["sft"]
        return "targets" if alone else super().loss_over(settings)

    def needs_reference(self, trainer: Mapping[str, Any]) -> bool:
        return super().needs_reference(trainer) and not is_reference_free(trainer)

    def check_trainer(self, trainer: Mapping[str, Any]) -> list[Problem]:
        losses = loss_types(trainer)
        weights = trainer.get("loss_weights")
        problems = super().check_trainer(trainer)
        if isinstance(weights, list) and len(weights) != len(losses):
            message = f"has {len(weights)} entries for {len(losses)} of `loss_type`"
            hint = "give one weight for each loss"
            problems.append(Problem("conflict", message, path="trainer.loss_weights", hint=hint))
        divergence = trainer.get("f_divergence_type", "reverse_kl")
        if divergence != "reverse_kl" and (others := sorted(set(losses) - _OF_DIFFERENCE)):
            message = f"is {divergence}, which {', '.join(others)} cannot have"
            hint = f"remove it, or use {', '.join(sorted(_OF_DIFFERENCE))}"
            problems.append(Problem("conflict", message, path="trainer.f_divergence_type", hint=hint))
        if "robust" in losses and not 0 <= _number(trainer.get("label_smoothing")) < 0.5:
            message = f"is {trainer['label_smoothing']}, but loss_type robust divides by 1 - 2 x it"
            hint = "write the share of wrong pairs, from 0 to below 0.5"
            problems.append(Problem("conflict", message, path="trainer.label_smoothing", hint=hint))
        if is_reference_free(trainer) and precomputes(trainer):
            message = f"computes log-probabilities that loss_type {losses[0]} does not read"
            path = "trainer.precompute_ref_log_probs"
            problems.append(Problem("conflict", message, path=path, hint="remove it"))
        if "exo_pair" in losses and not trainer.get("label_smoothing"):
            message = "is exo_pair, which needs `label_smoothing` above 0"
            hint = "write e.g. label_smoothing: 1.0e-3"
            problems.append(Problem("conflict", message, path="trainer.loss_type", hint=hint))
        if trainer.get("use_weighting") is True and _SORTING & set(losses):
            message, hint = (
                "cannot give weights to the pairs of aot losses, which sort them",
                "remove one of the two",
            )
            problems.append(Problem("conflict", message, path="trainer.use_weighting", hint=hint))
        return problems


def loss_types(trainer: Mapping[str, Any]) -> list[str]:
    """The losses of `loss_type`, which is one or a list."""
    given = trainer.get("loss_type") or "sigmoid"
    return [str(loss) for loss in given] if isinstance(given, list) else [str(given)]


def is_reference_free(trainer: Mapping[str, Any]) -> bool:
    """Whether no loss of the run reads a log-probability of the reference."""
    return set(loss_types(trainer)) <= _REFERENCE_FREE


def _number(value: Any) -> float:
    """A number of `trainer:`; 0 for a value of a wrong type, which has its own problem."""
    return float(value) if isinstance(value, int | float) else 0.0
