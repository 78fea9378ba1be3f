"""Mappings inside `trainer:` are checked by what the installed packages take."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path
from types import NoneType
from typing import get_args, get_type_hints

import pytest
from factories import recipe

from launcher.errors import RecipeError
from launcher.recipe import nested_fields
from launcher.recipe.nested_fields import check_nested

pytest.importorskip("transformers")


def test_schedules_take_what_the_table_says():
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
    from transformers.trainer_utils import SchedulerType

    given = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    for kind in SchedulerType:
        made = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[kind]).parameters
        if kind.value in nested_fields.ANY_SCHEDULE:
            assert any(one.kind is one.VAR_KEYWORD for one in made.values())
            continue
        assert set(nested_fields.SCHEDULERS.get(kind.value, ())) == made.keys() - given, kind
        hints = get_type_hints(TYPE_TO_SCHEDULER_FUNCTION[kind])
        for name in made.keys() - given:
            types = get_args(hints.get(name)) or (hints.get(name, float),)
            values = {int: 2, float: 0.5, str: "cosine", NoneType: None}
            for value in (0.5, "cosine", None):
                taken = not _wrong_of({"lr_scheduler_type": kind.value, "lr_scheduler_kwargs": {name: value}})
                assert taken == (value in [values[one] for one in types] or (value == 0.5 and int in types))


def _wrong_of(trainer):
    return [problem for problem in check_nested(trainer) if problem.code == "wrong-value"]


def test_accelerator_config_has_the_fields_of_the_table():
    from accelerate.utils import GradientAccumulationPlugin
    from transformers.trainer_pt_utils import AcceleratorConfig

    fields = [field.name for field in dataclasses.fields(AcceleratorConfig)]
    assert sorted(fields) == sorted(nested_fields.ACCELERATOR)
    inner = {field.name for field in dataclasses.fields(GradientAccumulationPlugin)}
    assert inner == {*nested_fields.ACCUMULATION, "num_steps"}
    for field in dataclasses.fields(AcceleratorConfig):
        assert bool(_wrong_of({"accelerator_config": {field.name: None}})) == (field.type is bool), field


def test_optimizers_read_the_arguments_of_the_table():
    """Read from the source of each function that makes one: what it takes out of `optim_args`."""
    from transformers import trainer_optimizer
    from transformers.training_args import OptimizerNames

    read: dict[str, set[str]] = {}
    for node in ast.parse(Path(trainer_optimizer.__file__).read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_get_"):
            read[node.name] = {
                word.value
                for part in ast.walk(node)
                if "optim_args" in ast.unparse(part) and isinstance(part, ast.Call | ast.Subscript | ast.For)
                for word in ast.walk(part)
                if isinstance(word, ast.Constant) and isinstance(word.value, str)
            }
    for optim in OptimizerNames:
        maker = trainer_optimizer._OPTIMIZER_HANDLERS.get(optim)
        known = set(nested_fields.OPTIMIZERS.get(optim.value, ()))
        if maker is None or (not known and "bitsandbytes" in maker.__name__):
            continue
        assert known <= read[maker.__name__], optim
        others = {word for word in read[maker.__name__] - known if word.isidentifier()}
        values = {"False", "float32", "bfloat16", "std", "random", "channel", "true", "yes"}
        assert "bitsandbytes" in maker.__name__ or others <= values, optim


MIN_LR = {"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 1e-4}
IN_STEPS = {"gradient_accumulation_kwargs": {"num_steps": 3}}
MISSPELT = {"gradient_accumulation_kwargs": {"sync": 3}}
WRONG = [
    ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"min_lr": 1e-6}}, "unknown-key",
     "lr_scheduler_kwargs.min_lr"),
    ({"lr_scheduler_kwargs": '{"power": 2}'}, "unknown-key", "lr_scheduler_kwargs.power"),
    ({"lr_scheduler_type": "warmup_stable_decay"}, "missing-key", "lr_scheduler_kwargs"),
    ({**MIN_LR, "lr_scheduler_kwargs": {"min_lr": 1e-3}}, "wrong-value", "lr_scheduler_kwargs.min_lr"),
    ({"accelerator_config": {"even_batch": True}}, "unknown-key", "accelerator_config.even_batch"),
    ({"accelerator_config": IN_STEPS}, "owned-key",
     "accelerator_config.gradient_accumulation_kwargs.num_steps"),
    ({"accelerator_config": MISSPELT}, "unknown-key", "accelerator_config.gradient_accumulation_kwargs.sync"),
    ({"optim_args": "momentum=0.9"}, "unknown-key", "optim_args"),
    ({"optim": "sgd", "optim_args": "momentum:0.9"}, "wrong-value", "optim_args"),
    ({"optim": "sgd", "optim_args": "momentum=0.9,=1"}, "wrong-value", "optim_args"),
    ({"liger_kernel_config": {"fused_rope": False}}, "unknown-key", "liger_kernel_config.fused_rope"),
    ({"activation_checkpointing_kwargs": {"use_reentrent": False}}, "unknown-key",
     "activation_checkpointing_kwargs.use_reentrent"),
    ({"activation_checkpointing_kwargs": {"context_fn": "f"}}, "unknown-key",
     "activation_checkpointing_kwargs.context_fn"),
    ({"activation_checkpointing_kwargs": {"use_reentrant": "no"}}, "wrong-value",
     "activation_checkpointing_kwargs.use_reentrant"),
    ({"activation_checkpointing_kwargs": {"determinism_check": "off"}}, "wrong-value",
     "activation_checkpointing_kwargs.determinism_check"),
    ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": "abc"}}, "wrong-value",
     "lr_scheduler_kwargs.power"),
    ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": True}}, "wrong-value",
     "lr_scheduler_kwargs.lr_end"),
    ({**MIN_LR, "lr_scheduler_kwargs": {"min_lr": "abc"}}, "wrong-value", "lr_scheduler_kwargs.min_lr"),
    ({**MIN_LR, "lr_scheduler_kwargs": {"min_lr_rate": 1.5}}, "wrong-value",
     "lr_scheduler_kwargs.min_lr_rate"),
    ({"lr_scheduler_type": "warmup_stable_decay",
      "lr_scheduler_kwargs": {"num_decay_steps": 2, "decay_type": "root"}}, "wrong-value",
     "lr_scheduler_kwargs.decay_type"),
    ({"accelerator_config": {"even_batches": "maybe"}}, "wrong-value", "accelerator_config.even_batches"),
    ({"accelerator_config": {"even_batches": None}}, "wrong-value", "accelerator_config.even_batches"),
    ({"accelerator_config": {"gradient_accumulation_kwargs": 3}}, "wrong-value",
     "accelerator_config.gradient_accumulation_kwargs"),
    ({"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": 1}}}, "wrong-value",
     "accelerator_config.gradient_accumulation_kwargs.sync_each_batch"),
    ({"liger_kernel_config": {"rope": "x"}}, "wrong-value", "liger_kernel_config.rope"),
    ({"optim": "sgd", "optim_args": "momentum=much"}, "wrong-value", "optim_args"),
    ({"optim": "sgd", "optim_args": "nesterov=maybe"}, "wrong-value", "optim_args"),
]  # fmt: skip
RIGHT = [
    {**MIN_LR, "lr_scheduler_kwargs": {"min_lr": 1e-5}},
    {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 10}},
    {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 2}},
    {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
    {"optim": "sgd", "optim_args": "momentum=0.9, nesterov=true"}, {"optim_args": "${ENV:ARGS}"},
    {"liger_kernel_config": {"fused_linear_cross_entropy": False, "rope": True}},
    {"activation_checkpointing_kwargs": {"determinism_check": "none", "use_reentrant": False}},
    {**MIN_LR, "lr_scheduler_kwargs": {"min_lr": None, "min_lr_rate": 0.1}},
    {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": '{"power": 2, "lr_end": 1e-7}'},
    {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": "${ENV:POWER}"}},
    {"optim": "galore_adamw", "optim_args": "rank=64, proj_type=std, scale=0.25"},
]  # fmt: skip


@pytest.mark.parametrize(("trainer", "code", "path"), WRONG)
def test_a_key_that_nothing_reads_is_refused_with_its_place(trainer, code, path):
    (problem,) = check_nested(trainer)
    assert (problem.code, problem.path) == (code, f"trainer.{path}")


def test_what_upstream_takes_passes():
    assert [problem for trainer in RIGHT for problem in check_nested(trainer)] == []


def test_the_value_of_a_variable_is_in_no_message(tmp_path, monkeypatch):
    monkeypatch.setenv("ARGS", "kept-private")
    asked = {"trainer__optim": "sgd", "trainer__optim_args": "${ENV:ARGS}"}
    with pytest.raises(RecipeError) as caught:
        recipe(tmp_path, **asked, trainer__lr_scheduler_kwargs="{power: 2}")
    assert [problem.path for problem in caught.value.problems] == ["trainer.lr_scheduler_kwargs.power"]
    assert "kept-private" not in str(caught.value)
