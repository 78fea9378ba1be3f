"""A ds_config beside a recipe, and as the base profile of one."""

from __future__ import annotations

import json

import pytest
from factories import BASE, facts, plan, recipe

from launcher.engines.deepspeed_config import render_ds_config
from launcher.errors import RecipeError
from launcher.inputs.planning_facts import load_profile
from launcher.knowledge.lint.against_recipe import AgainstRecipe
from launcher.knowledge.lint.check import lint_text
from launcher.planner.planner import make_plan

FULL = BASE.replace("adapter: {type: lora, r: 8}\n", "")
AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}


def found(made, config):
    return [(f.code, f.path) for f in lint_text(json.dumps(config, indent=1), "ds.json", AgainstRecipe(made))]


def test_a_config_that_leaves_all_to_the_trainer_fights_nothing(tmp_path):
    assert found(plan(tmp_path), AUTO) == []


@pytest.mark.parametrize(
    ("change", "code", "path"),
    [
        ({"train_micro_batch_size_per_gpu": 77}, "ds-hf-mismatch", "train_micro_batch_size_per_gpu"),
        ({"gradient_accumulation_steps": 77}, "ds-hf-mismatch", "gradient_accumulation_steps"),
        ({"train_batch_size": 7777}, "ds-batch-mismatch", "train_batch_size"),
        ({"gradient_clipping": 0.3}, "ds-hf-mismatch", "gradient_clipping"),
        ({"bf16": {"enabled": False}}, "ds-hf-mismatch", "bf16.enabled"),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, "ds-scheduler-overrides", "scheduler"),
        ({"optimizer": {"type": "AdamW", "params": {}}}, "ds-optimizer-block", "optimizer"),
    ],
)
def test_what_fights_the_plan(tmp_path, change, code, path):
    assert found(plan(tmp_path, precision="bf16"), {**AUTO, **change}) == [(code, path)]


def test_the_number_of_ranks_makes_a_batch_size_wrong(tmp_path):
    made = plan(tmp_path)
    right = {**AUTO, "train_batch_size": made.batch.global_size}
    assert found(made, right) == []
    assert found(made, {**right, "train_batch_size": made.batch.global_size * 2}) == [
        ("ds-batch-mismatch", "train_batch_size")
    ]


def test_accumulation_that_is_left_out_is_said_where_there_is_some(tmp_path):
    config = {key: value for key, value in AUTO.items() if key != "gradient_accumulation_steps"}
    made = plan(tmp_path, trainer__gradient_accumulation_steps=4)
    assert made.batch.accumulation == 4
    assert found(made, config) == [("ds-hf-mismatch", "gradient_accumulation_steps")]
    assert found(plan(tmp_path, trainer__gradient_accumulation_steps=1), config) == []


def test_only_what_the_recipe_says_itself_is_fought(tmp_path):
    config = {**AUTO, "zero_optimization": {"stage": 2}}
    assert found(plan(tmp_path), config) == []
    made = plan(tmp_path, sharding__engine="deepspeed", sharding__zero_stage=3)
    assert found(made, config) == [("ds-recipe-conflict", "zero_optimization.stage")]


def test_the_default_clipping_is_said_where_the_recipe_wants_another(tmp_path):
    config = {key: value for key, value in AUTO.items() if key != "gradient_clipping"}
    assert found(plan(tmp_path), config) == []
    assert found(plan(tmp_path, trainer__max_grad_norm=0.3), config) == [
        ("ds-clip-default", "gradient_clipping")
    ]


def test_buckets_are_held_against_the_device(tmp_path):
    config = {
        **AUTO,
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 500000000},
    }
    expected = [("ds-bucket-memory", "zero_optimization.reduce_bucket_size")]
    assert found(plan(tmp_path, "8xA100-80GB"), config) == []
    assert found(plan(tmp_path, "8x24GB"), config) == expected


def test_stage_3_without_gathering_matters_for_a_full_fine_tune(tmp_path):
    config = {**AUTO, "zero_optimization": {"stage": 3}}
    expected = [("ds-zero3-no-gather", "zero_optimization.stage3_gather_16bit_weights_on_model_save")]
    assert found(plan(tmp_path), config) == []
    assert found(plan(tmp_path, text=FULL), config) == expected


def test_offload_takes_the_place_of_another_optimizer(tmp_path):
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = {**AUTO, "zero_optimization": zero}
    assert found(plan(tmp_path), config) == []
    assert found(plan(tmp_path, trainer__optim="adafactor"), config) == [
        ("ds-offload-optimizer-swap", "zero_optimization.offload_optimizer.device")
    ]
    assert (
        found(plan(tmp_path, trainer__optim="adafactor"), {**config, "zero_force_ds_cpu_optimizer": False})
        == []
    )


def profile_of(tmp_path, text):
    file = tmp_path / "base.json"
    file.write_text(text, encoding="utf-8")
    return load_profile(recipe(tmp_path, sharding__config=str(file)).recipe), file


def test_a_base_profile_may_leave_to_the_plan_what_the_plan_decides(tmp_path):
    profile, file = profile_of(tmp_path, '{"zero_optimization": {"stage": 2, "overlap_comm": "auto"}}')
    made = make_plan(recipe(tmp_path, sharding__config=str(file)), facts(profile=profile))
    assert made.sharding.zero_stage == 2


def test_loss_scaling_of_a_base_profile_is_in_the_config(tmp_path):
    """And an empty block of it leaves the plan's own."""
    text = '{"fp16": {"loss_scale_window": 500}, "zero_optimization": {}, "wall_clock_breakdown": true}'
    profile, file = profile_of(tmp_path, text)
    asked = recipe(tmp_path, precision="fp16", sharding__zero_stage=2, sharding__config=str(file))
    config = render_ds_config(make_plan(asked, facts(profile=profile)))
    assert (config["fp16"]["loss_scale_window"], config["fp16"]["hysteresis"]) == (500, 2)
    assert (config["zero_optimization"]["stage"], config["wall_clock_breakdown"]) == (2, True)


@pytest.mark.parametrize(
    ("text", "code", "line", "column"),
    [
        ('{\n "zero_optimisation": {"stage": 3}}', "ds-typo-toplevel", 2, 2),
        ('{"zero_optimization":\n {"overlap_com": true}}', "ds-typo-nested", 2, 3),
        ('{"amp": {"enabled": false}}', "ds-removed-key", 1, 2),
        ('{"train_batch_size": 8,\n}', "profile-unreadable", 1, 23),
        ('{"train_batch_size": 8', "profile-unreadable", 1, 23),
        ("[]", "profile-unreadable", 1, 1),
        ("", "profile-unreadable", 1, 1),
    ],
)
def test_a_base_profile_with_an_error_is_refused_at_its_place(tmp_path, text, code, line, column):
    with pytest.raises(RecipeError) as caught:
        profile_of(tmp_path, text)
    (problem,) = caught.value.problems
    assert (problem.code, problem.line, problem.path) == (code, line, "sharding.config")
    assert problem.file == str(tmp_path / "base.json")
    assert problem.message.startswith(f"column {column}: ")


def test_a_base_profile_that_is_absent_says_which_are_shipped(tmp_path):
    with pytest.raises(RecipeError) as caught:
        load_profile(recipe(tmp_path, sharding__config="nothing_of_this_name").recipe)
    (problem,) = caught.value.problems
    assert problem.code == "profile-missing"
    assert "zero2_offload" in problem.hint
