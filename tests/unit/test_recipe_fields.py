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
    ("name", "value", "text"),
    [
        ("max_steps", True, "trainer.max_steps: is true, expected a whole number"),
        ("max_steps", 1e3, "trainer.max_steps: is 1000.0, expected a whole number (write 1000)"),
        ("learning_rate", "fast", 'trainer.learning_rate: is "fast" (text), expected a number'),
        (
            "save_strategy",
            "step",
            'trainer.save_strategy: is "step" (text), expected one of no, steps, epoch, best'
            " (did you mean steps?)",
        ),
        ("eval_strategy", False, "trainer.eval_strategy: is false, expected one of no, steps, epoch"),
        (
            "group_by_length",
            True,
            "trainer.group_by_length: removed in transformers 5.23.0"
            " (write `train_sampling_strategy: group_by_length`)",
        ),
        (
            "gradient_checkpointing",
            True,
            "trainer.gradient_checkpointing: deprecated in transformers 5.23.0"
            " (write `activation_checkpointing`)",
        ),
        (
            "activation_checkpointing_kwargs",
            {"use_reentrent": False},
            "trainer.activation_checkpointing_kwargs.use_reentrent: unknown key, expected one of"
            " use_reentrant, preserve_rng_state, determinism_check, debug, early_stop, context_fn,"
            " every_n_layers, offload (did you mean `use_reentrant`?)",
        ),
        ("num_train_epochs", 0, "trainer.num_train_epochs: is 0, expected more than 0"),
        ("qqqq", 0, "trainer.qqqq: unknown key, expected a TrainingArguments field of transformers 5.23.0"),
    ],
)
def test_bad_trainer_values(name: str, value: Any, text: str) -> None:
    assert [str(problem) for problem in check_trainer({name: value})] == [text]


def test_good_adapter() -> None:
    adapter = {"type": "lora", "r": 16, "target_modules": "all-linear", "bias": "none"}
    assert check_adapter(adapter | {"init_lora_weights": "pissa_niter_16", "use_dora": True}) == []


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("r", 0, "adapter.r: is 0, expected at least 1"),
        (
            "rank",
            8,
            "adapter.rank: unknown key, expected a LoraConfig field of peft 0.21.2 (did you mean `r`?)",
        ),
        ("bias", "some", 'adapter.bias: is "some" (text), expected one of none, all, lora_only'),
        ("lora_dropout", 2, "adapter.lora_dropout: is 2, expected a number from 0 to 1"),
        ("task_type", "CAUSAL_LM", "adapter.task_type: not allowed here (`task` decides it)"),
        (
            "eva_config",
            {"rho": 2},
            "adapter.eva_config: is a mapping, expected a Python object (EvaConfig),"
            " which a recipe cannot hold",
        ),
    ],
)
def test_bad_adapter_values(name: str, value: Any, text: str) -> None:
    assert [str(problem) for problem in check_adapter({name: value})] == [text]


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
    ("task", "name", "value", "text"),
    [
        (
            "dpo",
            "loss_type",
            ["sigmod"],
            'trainer.loss_type: is "sigmod" (text), expected one of sigmoid, hinge, ipo, exo_pair, nca_pair,'
            " robust, bco_pair, sppo_hard, aot, aot_unpaired, apo_zero, apo_down, discopop, sft, sigmoid_norm"
            " (did you mean sigmoid?)",
        ),
        ("dpo", "beta", 0, "trainer.beta: is 0, expected more than 0"),
        ("dpo", "beta", float("inf"), "trainer.beta: is Infinity, expected a finite number"),
        ("dpo", "ld_alpha", 1.5, "trainer.ld_alpha: is 1.5, expected a number from 0 to 1"),
        (
            "dpo",
            "max_length",
            8,
            "trainer.max_length: not allowed under `trainer:` (write `data.max_length`)",
        ),
        (
            "dpo",
            "generation_num_beams",
            2,
            "trainer.generation_num_beams: unknown key, expected a TrainingArguments field of transformers"
            " 5.23.0, or a field that task dpo adds (trl 1.16.0) (it is a key of `task: seq2seq-lm`)",
        ),
        ("seq2seq-lm", "generation_num_beams", 0, "trainer.generation_num_beams: is 0, expected at least 1"),
        (
            "seq2seq-lm",
            "predict_with_generat",
            True,
            "trainer.predict_with_generat: unknown key, expected a TrainingArguments field of transformers"
            " 5.23.0 (did you mean `predict_with_generate`?)",
        ),
        (
            "causal-lm",
            "beta",
            0.1,
            "trainer.beta: unknown key, expected a TrainingArguments field of transformers 5.23.0"
            " (it is a key of `task: dpo`)",
        ),
    ],
)
def test_bad_values_of_the_fields_of_a_task(task: str, name: str, value: Any, text: str) -> None:
    assert [str(problem) for problem in check_trainer({name: value}, task=task)] == [text]


def test_references_get_the_types_of_the_task() -> None:
    assert resolve_trainer({"beta": "${ENV:B:0.5}"}, {}, "dpo") == {"beta": 0.5}
