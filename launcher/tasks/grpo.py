"""GRPO: the model writes answers, functions score them, good ones become likelier (trl's GRPOTrainer)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.errors import Problem
from launcher.tasks.rows import PROMPT_COMPLETION, RowFormat
from launcher.tasks.task import FIXED_REFERENCE, TRL_PADS, ArgumentTable, Task

PROMPT = RowFormat(
    "prompt",
    "prompts to answer",
    {"prompt": "text or messages"},
    related={"prompt": PROMPT_COMPLETION.related["prompt"]},
    other_names={"prompt": "messages"},
)
"""Further columns go to the reward functions."""
KEY = "reward"
"""The section of the recipe with the reward functions."""
GENERATION = "write it under `generation:`"
BACKENDS: Mapping[str, Mapping[str, object]] = {
    "transformers": {"use_vllm": False},
    "vllm-colocate": {"use_vllm": True, "vllm_mode": "colocate"},
    "vllm-server": {"use_vllm": True, "vllm_mode": "server"},
}
"""`generation.backend` -> fields of GRPOConfig."""
SHIPPED_REWARDS: Mapping[str, Mapping[str, object]] = {
    "exact_match": {"column": "answer", "ignore_case": False},
    "numeric_answer": {"column": "answer", "tolerance": 1e-6},
    "regular_expression": {"pattern": None},
    "format": {"tags": ["think", "answer"]},
    "length": {"tokens": None},
}
"""Reward function of ours -> its arguments with their defaults; None: the recipe must give it."""
_TRL_SIDE = "remove it: reward functions are files of the recipe"
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "vllm_model_impl": ("vllm", "transformers"),
}
"""Fields of GRPOConfig -> what its trainer takes; it finds another value in the first step (trl 1.16)."""
_OVER_THE_MICRO_BATCH = "bnpo"
"""The loss type that is a mean over the tokens of a micro-batch."""
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens", "max_tokens",
    "num_return_sequences", "n", "do_sample",
)  # fmt: skip
"""Keys of `generation_kwargs` that would override what `generation:` says."""


class GRPO(Task):
    name = "grpo"
    hooks = ("format_row", "compute_metrics", "callbacks", "optimizer")
    aliases = ("rl", "rlhf", "rlvr", "reinforce")
    packages = ("trl",)
    extra = "dpo"
    row_formats = (PROMPT,)
    overlong = {
        "split": "but a prompt is never cut",
        "truncate": "but a cut prompt asks something else: one without room for a completion is left out",
    }
    own_padding, pads_as_asked = TRL_PADS, True
    prepared_by = ("trl",)
    model_class = "AutoModelForCausalLM"
    head = "language-model"
    head_in_checkpoint = True
    peft_task = "CAUSAL_LM"
    gguf = True
    tiled_logits = True
    rolls_out = True
    has_reference = True
    untraceable = "GRPO's loss works on tiles of logits that trl cuts, which a trace without trl does not see"
    argument_table = ArgumentTable("grpo_config", "trl", "trainer/grpo_config.py", "GRPOConfig")
    owned_arguments = {
        **dict.fromkeys(
            (
                "num_generations", "max_completion_length", "temperature", "top_p", "top_k", "min_p",
                "repetition_penalty",
            ),
            GENERATION,
        ),
        **dict.fromkeys(("use_vllm", "vllm_mode"), "write `generation.backend`"),
        "reward_weights": "write `weight` in each entry of `reward:`",
        "trust_remote_code": "write `model.trust_remote_code`",
        "model_init_kwargs": "`model` decides it",
        "use_transformers_paged": "write `use_transformers_continuous_batching`",
        "vllm_importance_sampling_cap": "write `vllm_importance_sampling_clip_max`",
        "generation_batch_size": "write `steps_per_generation`: it is that many micro-batches of all ranks",
        "max_tool_calling_iterations": "remove it: tools are not supported",
        "log_multimodal": "remove it: rows have no images",
        "log_completions_hub_repo": "remove it: completions stay in the run directory",
        **FIXED_REFERENCE,
    }  # fmt: skip
    loss_arguments = (
        "beta", "loss_type", "epsilon", "epsilon_high", "delta", "num_iterations", "scale_rewards",
        "importance_sampling_level", "mask_truncated_completions", "multi_objective_aggregation",
    )  # fmt: skip
    trainer_defaults = {
        "beta": (0.0, "trl's default: no reference model"),
        "num_iterations": (1, "trl's default: each completion is used for one update"),
        "loss_type": ("dapo", "trl's default, set explicitly"),
        "scale_rewards": ("group", "trl's default, set explicitly"),
        "remove_unused_columns": (False, "reward functions read the columns"),
    }
    adapter_dropout = False
    own_metrics = (
        "reward", "reward_std", "rewards/*/mean", "rewards/*/std", "frac_reward_zero_std", "entropy", "kl",
        "completions/*", "clip_ratio/*", "cispo_clip_ratio", "policy_loss", "aux_loss", "sampling/*",
        "vespo/*",
    )  # fmt: skip
    known_as = {"trl": ("grpo",), "axolotl": ("grpo", "gdpo")}
    known_by = {
        "trl": (
            "scale_rewards", "importance_sampling_level", "multi_objective_aggregation", "num_generations",
            "reward_funcs", "reward_weights", "num_iterations", "max_completion_length", "use_vllm",
            "epsilon", "beta",
        )
    }  # fmt: skip
    tool_defaults = {"trl": {"trainer.learning_rate": 1e-6}}
    goals = {"reasoning": ("prompt",)}
    goal_columns = ("answer", "solution", "final_answer", "ground_truth")
    first_least_batch = 8
    first_room = 512
    samples_are = "completions"
    first_rates = {"full": 1e-6, "adapter": 1e-5}
    first_rate_note = " by rewards"
    pipeline = "text-generation"
    tags = ("grpo",)

    def needs_reference(self, trainer: Mapping[str, Any]) -> bool:
        return super().needs_reference(trainer) and bool(trainer.get("beta"))

    def default_rate(self, *, adapter: bool) -> tuple[float, str]:
        return (1e-5, "trl's default, ten times for adapters") if adapter else (1e-6, "trl's default")

    def first_keys(self, rows: Mapping[str, Sequence[object]]) -> dict[str, tuple[object, str]]:
        column = next((name for name in self.goal_columns if name in rows), None)
        answers = rows.get(column or "", ())
        name = "numeric_answer" if answers and all(map(_is_number, answers)) else "exact_match"
        entry: dict[str, object] = {"function": name}
        if column not in (None, "answer"):
            entry["arguments"] = {"column": column}
        return {
            KEY: ([entry], "the reward: the answer of the row; a function of yours is FILE.py:NAME"),
            "generation": (
                {"num_generations": self.first_least_batch, "max_completion_length": self.first_room},
                "completions of each prompt, and their longest",
            ),
        }

    def compares(self, settings: Any) -> bool:
        return bool(settings.fields(settings.trainer).get("loss_type") == _OVER_THE_MICRO_BATCH)

    def loss_over(self, settings: Any) -> str:
        return "micro-batch"  # an advantage is one among the answers to a prompt

    def check_trainer(self, trainer: Mapping[str, Any]) -> list[Problem]:
        """What GRPOConfig refuses when the worker builds it."""

        def wrong(name: str, message: str, hint: str) -> Problem:
            return Problem("conflict", message, path=f"trainer.{name}", hint=hint)

        problems = []
        for name, choices in _CHOICES.items():
            value = trainer.get(name)
            if isinstance(value, str) and value not in choices and "${" not in value:
                message = f'is "{value}" (string), expected one of {", ".join(choices)}'
                problems.append(Problem("wrong-choice", message, path=f"trainer.{name}"))
        given = trainer.get("generation_kwargs")
        for name in given if isinstance(given, Mapping) else ():
            if name in _SAMPLING:
                message = "would override what `generation:` says"
                problems.append(wrong(f"generation_kwargs.{name}", message, "write it under `generation:`"))
        if trainer.get("auto_find_batch_size") is True:
            message = "would break the groups of completions that are compared"
            problems.append(wrong("auto_find_batch_size", message, "remove it, and set `on_oom: adapt`"))
        if trainer.get("label_smoothing_factor") not in (None, 0):
            message = "has no effect: the loss of trl's trainer does not read it"
            problems.append(wrong("label_smoothing_factor", message, "remove it"))
        if trainer.get("remove_unused_columns") is True:
            message = "is true, but reward functions read columns that no model knows"
            problems.append(wrong("remove_unused_columns", message, "remove it"))
        low, high = (trainer.get(f"vllm_importance_sampling_clip_{end}") for end in ("min", "max"))
        if isinstance(low, int | float) and low >= (3.0 if high is None else high):
            message = f"is {low}, not below the upper bound {3.0 if high is None else high}"
            hint = "raise `vllm_importance_sampling_clip_max`"
            problems.append(wrong("vllm_importance_sampling_clip_min", message, hint))
        return problems


def _is_number(answer: object) -> bool:
    try:
        float(str(answer).replace(",", ""))
    except ValueError:
        return False
    return True
