"""A reward model: one number for a prompt with its answer, learned from pairs, with trl's RewardTrainer."""

from __future__ import annotations

from launcher.tasks.task import ArgumentTable, PairTask

_LEFT_OUT = "but pairs with a side longer than max_length are left out: a cut answer has another reward"


class Reward(PairTask):
    name = "reward"
    aliases = ("reward-model", "reward-modeling", "rm")
    overlong = {"split": _LEFT_OUT, "truncate": _LEFT_OUT}
    model_class = "AutoModelForSequenceClassification"
    num_labels = 1
    peft_task = "SEQ_CLS"
    untraceable = "the loss compares the rewards of two rows, which a trace of the model alone does not see"
    argument_table = ArgumentTable("reward_config", "trl", "trainer/reward_config.py", "RewardConfig")
    owned_arguments = {
        **PairTask.owned_arguments,
        "chat_template_path": "write `model.chat_template`",
        "eos_token": "the tokenizer decides it",
    }
    loss_arguments = ("center_rewards_coefficient",)
    own_metrics = ("accuracy", "margin", "mean_reward", "min_reward", "max_reward")
    known_as = {"trl": ("reward",), "llamafactory": ("rm",)}
    known_by = {"trl": ("center_rewards_coefficient",), "axolotl": ("reward_model",)}
    tool_defaults = {"trl": {"trainer.learning_rate": 1e-4}}
    smoothing_hint = "remove it: a reward has no labels to smooth"
    goals = {"reward-model": ("preference",)}
    first_rates = {"full": 1e-5, "adapter": 1e-4}
    first_rate_note = " by pairs"
    pipeline = "text-classification"
    pipeline_options = ', function_to_apply="none"'  # else the sigmoid of a single logit
    tags = ("reward-model",)

    def default_rate(self, *, adapter: bool) -> tuple[float, str]:
        return (1e-4, "trl's default") if adapter else (1e-5, "a tenth of that for adapters")
