"""Direct preference optimisation: a chosen and a rejected answer, with trl's DPOTrainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.errors import Problem
from launcher.tasks.task import ArgumentTable, PairTask

_CUT_AT_THE_END = "but trl cuts preference rows at the end"


class DPO(PairTask):
    name = "dpo"
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
        **dict.fromkeys(
            ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
            "remove it: the reference is the model before training, and stays so",
        ),
    }
    loss_arguments = ("beta", "loss_type")
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

    def check_trainer(self, trainer: Mapping[str, Any]) -> list[Problem]:
        given = trainer.get("loss_type", "sigmoid")
        losses = given if isinstance(given, list) else [given]
        weights = trainer.get("loss_weights")
        problems = super().check_trainer(trainer)
        if isinstance(weights, list) and len(weights) != len(losses):
            message = f"has {len(weights)} entries for {len(losses)} of `loss_type`"
            hint = "give one weight for each loss"
            problems.append(Problem("conflict", message, path="trainer.loss_weights", hint=hint))
        if "exo_pair" in losses and not trainer.get("label_smoothing"):
            message = "is exo_pair, which needs `label_smoothing` above 0"
            hint = "write e.g. label_smoothing: 1.0e-3"
            problems.append(Problem("conflict", message, path="trainer.loss_type", hint=hint))
        if trainer.get("use_weighting") is True and {"aot", "aot_unpaired"} & {str(loss) for loss in losses}:
            message, hint = (
                "cannot give weights to the pairs of aot losses, which sort them",
                "remove one of the two",
            )
            problems.append(Problem("conflict", message, path="trainer.use_weighting", hint=hint))
        return problems
