"""Names, types and choices of `trainer:` and `adapter:`."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.recipe.fields import check_adapter, check_trainer, resolve_trainer


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 1),
        ("learning_rate", 2e-4),
        ("eval_strategy", "no"),
        ("save_strategy", "best"),
        ("optim", "paged_adamw_8bit"),
        ("report_to", ["wandb", "tensorboard"]),
        ("report_to", "none"),
        ("save_total_limit", None),
        ("activation_checkpointing_kwargs", {"use_reentrant": False, "every_n_layers": 2}),
        ("max_steps", "${ENV:ANY:3}"),
    ],
)
def test_good_trainer_values(name: str, value: Any) -> None:
    assert check_trainer({name: value}) == []


@pytest.mark.parametrize(
    ("name", "value", "code", "path"),
    [
        ("max_steps", True, "wrong-type", "max_steps"),
        ("max_steps", 1000.0, "wrong-type", "max_steps"),
        ("learning_rate", "fast", "wrong-type", "learning_rate"),
        ("save_strategy", "step", "wrong-choice", "save_strategy"),
        ("eval_strategy", False, "wrong-type", "eval_strategy"),
        ("group_by_length", True, "renamed-key", "group_by_length"),
        ("gradient_checkpointing", True, "renamed-key", "gradient_checkpointing"),
        ("num_train_epochs", 0, "wrong-value", "num_train_epochs"),
        ("qqqq", 0, "unknown-key", "qqqq"),
    ],
)
def test_bad_trainer_values(name: str, value: Any, code: str, path: str) -> None:
    assert [(p.code, p.path) for p in check_trainer({name: value})] == [(code, f"trainer.{path}")]


def test_good_adapter() -> None:
    adapter = {"type": "lora", "r": 16, "target_modules": "all-linear", "bias": "none"}
    assert check_adapter(adapter | {"init_lora_weights": "pissa_niter_16", "use_dora": True}) == []


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("r", 0, "wrong-value"),
        ("rank", 8, "unknown-key"),
        ("bias", "some", "wrong-choice"),
        ("lora_dropout", 2, "wrong-value"),
        ("task_type", "CAUSAL_LM", "owned-key"),
        ("eva_config", {"rho": 2}, "wrong-type"),
    ],
)
def test_bad_adapter_values(name: str, value: Any, code: str) -> None:
    assert [(p.code, p.path) for p in check_adapter({name: value})] == [(code, f"adapter.{name}")]


def test_resolved_references_get_the_type_of_their_field() -> None:
    trainer = {"max_steps": "${ENV:N}", "run_name": "${ENV:N}", "bf16_full_eval": "${ENV:B:true}"}
    resolved = resolve_trainer(trainer, {"N": "12"})
    assert resolved == {"max_steps": 12, "run_name": "12", "bf16_full_eval": True}


@pytest.mark.parametrize(
    ("task", "name", "value"),
    [
        ("dpo", "beta", 0.1),
        ("dpo", "loss_type", "ipo"),
        ("dpo", "loss_type", ["sigmoid", "sft"]),
        ("dpo", "loss_weights", [1.0, 2]),
        ("dpo", "pad_to_multiple_of", 8),
        ("dpo", "learning_rate", 1e-6),
        ("seq2seq-lm", "predict_with_generate", True),
        ("seq2seq-lm", "generation_num_beams", 4),
        ("seq2seq-lm", "generation_config", "org/name"),
    ],
)
def test_good_values_of_the_fields_of_a_task(task: str, name: str, value: Any) -> None:
    assert check_trainer({name: value}, task=task) == []


@pytest.mark.parametrize(
    ("value", "codes"),
    [
        ({"a": 1}, []),
        ('{"a": 1}', []),
        ("{a", ["wrong-type"]),
        ("[1]", ["wrong-type"]),
        ("a", ["wrong-type"]),
    ],
)
def test_a_text_for_a_mapping_is_json(value: Any, codes: list[str]) -> None:
    """The Trainer parses it when it is built."""
    for task, name in (("causal-lm", "lr_scheduler_kwargs"), ("grpo", "chat_template_kwargs")):
        assert [problem.code for problem in check_trainer({name: value}, task=task)] == codes
    assert check_trainer({"accelerator_config": "accelerator.json"}) == []


@pytest.mark.parametrize(
    ("task", "name", "value", "code"),
    [
        ("dpo", "loss_type", ["sigmod"], "wrong-choice"),
        ("dpo", "beta", 0, "wrong-value"),
        ("dpo", "beta", float("inf"), "wrong-value"),
        ("dpo", "ld_alpha", 1.5, "wrong-value"),
        ("dpo", "max_length", 8, "owned-key"),
        ("dpo", "generation_num_beams", 2, "unknown-key"),
        ("seq2seq-lm", "generation_num_beams", 0, "wrong-value"),
        ("seq2seq-lm", "predict_with_generat", True, "unknown-key"),
        ("causal-lm", "beta", 0.1, "unknown-key"),
    ],
)
def test_bad_values_of_the_fields_of_a_task(task: str, name: str, value: Any, code: str) -> None:
    assert [(p.code, p.path) for p in check_trainer({name: value}, task=task)] == [(code, f"trainer.{name}")]


def test_references_get_the_types_of_the_task() -> None:
    assert resolve_trainer({"beta": "${ENV:B:0.5}"}, {}, "dpo") == {"beta": 0.5}
