"""A reward model: one number for a prompt with its answer, learned from pairs, with trl's RewardTrainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.errors import Problem
from launcher.tasks.rows import PREFERENCE
from launcher.tasks.task import ArgumentTable, Task, unread_smoothing

_LEFT_OUT = "but pairs with a side longer than max_length are left out: a cut answer has another reward"


class Reward(Task):
    name = "reward"
    aliases = ("reward-model", "reward-modeling", "rm")
    packages = ("trl",)
    extra = "dpo"
    row_formats = (PREFERENCE,)
    unread_columns = {"margin": "the margin between the two answers"}
    overlong = {"split": _LEFT_OUT, "truncate": _LEFT_OUT}
    own_padding = "trl pads, as trainer.pad_to_multiple_of says"
    prepared_by = ("trl",)
    architectures = ("decoder",)
    model_class = "AutoModelForSequenceClassification"
    num_labels = 1
    peft_task = "SEQ_CLS"
    sequences_per_sample = 2
    untraceable = "the loss compares the rewards of two rows, which a trace of the model alone does not see"
    argument_table = ArgumentTable("reward_config", "trl", "trainer/reward_config.py", "RewardConfig")
    owned_arguments = {
        "max_length": "write `data.max_length`",
        "dataset_num_proc": "write `data.num_proc`",
        "trust_remote_code": "write `model.trust_remote_code`",
        "model_init_kwargs": "`model` decides it",
        "chat_template_path": "write `model.chat_template`",
        "pad_token": "the tokenizer decides it",
        "eos_token": "the tokenizer decides it",
    }
    loss_arguments = ("center_rewards_coefficient",)
    adapter_dropout = False
    own_metrics = True
    pipeline = "text-classification"
    pipeline_options = ', function_to_apply="none"'  # else the sigmoid of a single logit
    tags = ("reward-model",)

    def check_trainer(self, trainer: Mapping[str, Any]) -> list[Problem]:
        return unread_smoothing(trainer, "remove it: a reward has no labels to smooth")

    def default_rate(self, *, adapter: bool) -> tuple[float, str]:
        return (1e-4, "trl's default") if adapter else (1e-5, "a tenth of that for adapters")
