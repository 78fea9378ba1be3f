"""The planner: precision by capability, one value from one place, the lowest stage that fits."""

from __future__ import annotations

import pytest
from factories import BASE, facts, plan, recipe
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.errors import DoesNotFit, RecipeError
from launcher.planner.planner import make_plan

FULL = BASE.replace("adapter: {type: lora, r: 8}\n", "")


@pytest.mark.parametrize(
    ("on", "precision"),
    [
        ("8xA100-80GB", "bf16"),
        ("1xRTX4090-24GB", "bf16"),
        ("8xV100-32GB", "fp16"),
        ("1xT4-16GB", "fp16"),
        ("1xP100-16GB", "fp32"),
        ("1x24GB", "fp16"),
        ("cpu", "fp32"),
    ],
)
def test_auto_precision_follows_compute_capability(tmp_path, on, precision):
    made = plan(tmp_path, on, model__quantization="nf4")
    assert (made.precision, made.provenance["precision"].source) == (precision, "hardware")


def test_explicit_bf16_on_v100_is_refused_at_its_line(tmp_path):
    text = BASE + "precision: bf16\n"
    with pytest.raises(RecipeError) as caught:
        plan(tmp_path, "8xV100-32GB", text)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path, problem.line) == ("fix-bf16-emulated", "precision", 5)
    assert problem.file is not None
    assert problem.file.endswith("recipe.yaml")


def test_bf16_on_an_unnamed_device_is_taken_with_a_warning(tmp_path):
    made = plan(tmp_path, "1x24GB", precision="bf16", model__quantization="nf4")
    assert made.precision == "bf16"
    assert any("unnamed device" in warning for warning in made.warnings)


def test_zero_stage_auto_is_the_lowest_that_fits(tmp_path):
    roomy = plan(tmp_path, "8xA100-80GB", FULL, global_batch_size=8)
    tight = plan(tmp_path, "8xRTX3090-24GB", FULL, global_batch_size=8)
    assert roomy.sharding.zero_stage == 1, "26 GB of states per GPU need stage 1"
    assert tight.sharding.zero_stage > roomy.sharding.zero_stage
    for below in range(roomy.sharding.zero_stage):
        with pytest.raises(DoesNotFit):
            plan(tmp_path, "8xA100-80GB", FULL, global_batch_size=8, sharding__zero_stage=below)


@pytest.mark.parametrize("stage", [1, 2])
def test_the_margin_alone_refuses_7b_on_two_devices_of_80_gb(tmp_path, stage):
    """docs/memory.md has these figures and what plans instead."""
    with pytest.raises(DoesNotFit) as caught:
        plan(tmp_path, "2xA100-80GB", FULL, trainer__optim="adamw_torch", sharding__zero_stage=stage)
    memory = caught.value.nearest_miss.memory
    assert memory.needed < memory.device_bytes < memory.needed + memory.margin
    assert round(memory.needed / 2**30, 1) == 76.6
    for key, value in {"zero_stage": 3, "offload_optimizer": "cpu", "tp_size": 2}.items():
        more = {"sharding__zero_stage": stage, f"sharding__{key}": value}
        made = plan(tmp_path, "2xA100-80GB", FULL, trainer__optim="adamw_torch", **more)
        assert made.memory.fits, key


def test_nothing_fits_carries_the_nearest_miss(tmp_path):
    with pytest.raises(DoesNotFit) as caught:
        plan(tmp_path, "1xT4-16GB", FULL)
    miss = caught.value.nearest_miss
    assert miss.memory.fits is False
    assert caught.value.problems[0].code == "does-not-fit"
    assert "GiB" in caught.value.problems[0].message


def test_checkpointing_is_chosen_only_where_needed(tmp_path):
    text = BASE.replace("max_length: 512", "max_length: 2048")
    small = plan(tmp_path, "1xRTX4090-24GB", text, global_batch_size=1)
    large = plan(tmp_path, "1xA100-80GB", text, global_batch_size=1)
    assert small.trainer.activation_checkpointing is True
    assert large.trainer.activation_checkpointing is False
    assert small.provenance["trainer.activation_checkpointing"].source == "search"


def test_an_indivisible_global_batch_names_its_neighbours(tmp_path):
    with pytest.raises(RecipeError, match="use 8 or 16") as caught:
        plan(tmp_path, "8xA100-80GB", global_batch_size=10)
    assert caught.value.problems[0].path == "global_batch_size"


def test_a_pinned_micro_batch_that_does_not_divide_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="does not divide the 8 samples"):
        plan(tmp_path, global_batch_size=64, trainer__per_device_train_batch_size=3)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(ranks=st.sampled_from([1, 2, 4, 8]), per_rank=st.integers(1, 24))
def test_the_global_batch_is_kept_exactly(tmp_path, ranks, per_rank):
    made = plan(tmp_path, f"{ranks}xA100-80GB", global_batch_size=ranks * per_rank)
    assert made.batch.global_size == ranks * per_rank
    assert made.trainer.per_device_train_batch_size == made.batch.micro
    assert made.trainer.gradient_accumulation_steps == made.batch.accumulation


def test_every_value_knows_its_source(tmp_path):
    made = plan(tmp_path, trainer__learning_rate="3e-4")
    assert made.provenance["trainer.learning_rate"].source == "override"
    assert made.provenance["trainer.max_steps"].by.endswith("recipe.yaml:4")
    assert made.provenance["adapter.lora_alpha"].source == "default"
    assert made.provenance["trainer.use_cache"].by == "use-cache-off"
    assert all(s.source and s.by for s in made.provenance.values())


def test_planning_twice_gives_the_same_plan(tmp_path):
    loaded = recipe(tmp_path)
    assert make_plan(loaded, facts()) == make_plan(loaded, facts())


def test_engine_and_launcher_follow_the_number_of_processes(tmp_path):
    one = plan(tmp_path, "1xA100-80GB")
    many = plan(tmp_path, "8xA100-80GB")
    ddp = plan(tmp_path, "8xA100-80GB", sharding__engine="ddp")
    chosen = [(p.sharding.engine, p.launch.launcher) for p in (one, many, ddp)]
    assert chosen == [("ddp", "python"), ("ddp", "accelerate"), ("ddp", "accelerate")]


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        ({"sharding__engine": "ddp", "sharding__zero_stage": 2}, "engine-conflict"),
        ({"precision": "bf16-true", "sharding__engine": "deepspeed"}, "precision-conflict"),
        ({"launch__launcher": "python"}, "launcher-conflict"),
        ({"sharding__engine": "ddp", "launch__launcher": "deepspeed"}, "launcher-conflict"),
        ({"fixes__disable": "[no-such-fix]"}, "unknown-fix"),
    ],
)
def test_contradictions_are_refused(tmp_path, overrides, code):
    with pytest.raises(RecipeError) as caught:
        plan(tmp_path, **overrides)
    assert caught.value.problems[0].code == code


def test_a_base_profile_gives_the_stage_and_keeps_its_own_keys(tmp_path):
    loaded = recipe(tmp_path, sharding__config="zero2_offload")
    profile = {
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "round_robin_gradients": True,
        },
    }
    made = make_plan(loaded, facts(profile=profile))
    assert made.sharding.zero_stage == made.job.zero_stage == 2
    assert made.sharding.offload_optimizer == "cpu"
    assert made.deepspeed.profile == {"zero_optimization.round_robin_gradients": True}


@pytest.mark.parametrize(
    ("size", "fits"), [(5, False), (3, False), (4, True), (8, True), (16, True), (0, True)]
)
def test_groups_of_a_base_profile_divide_the_ranks(tmp_path, size, fits):
    loaded = recipe(tmp_path, sharding__config="mine.json")
    profile = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": size}}
    if fits:
        make_plan(loaded, facts(profile=profile))
        return
    with pytest.raises(RecipeError, match=f"8 ranks do not divide into groups of .* = {size}") as caught:
        make_plan(loaded, facts(profile=profile))
    assert caught.value.problems[0].path == "sharding.config"
    assert "2, 4, 8" in caught.value.problems[0].hint


def test_what_a_base_profile_asks_for_in_vain_is_a_warning(tmp_path):
    asked = {"zero_hpz_partition_size": 5, "zero_quantized_gradients": True, "zero_quantized_weights": False}
    loaded = recipe(tmp_path, sharding__config="mine.json")

    def told(stage: int) -> list[str]:
        profile = {"zero_optimization": {"stage": stage, **asked, "zero_hpz_partition_size": 4 + (stage < 3)}}
        warnings = make_plan(loaded, facts(profile=profile)).warnings
        return [warning for warning in warnings if "of the base profile" in warning]

    for stage in (0, 1, 2):
        (only,) = told(stage)
        assert f"do nothing at ZeRO-{stage}" in only
        assert "zero_hpz_partition_size, zero_optimization.zero_quantized_gradients of" in only
    assert told(3) == []


@pytest.mark.parametrize(
    "profile",
    [
        {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5},
        {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}},
        {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 3},
        {"zero_optimization": {"stage": 2}, "scheduler": {"type": "WarmupLR"}},
        {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 7.0}}},
    ],
    ids=lambda p: list(p)[1],
)
def test_a_base_profile_that_fights_the_plan_is_refused(tmp_path, profile):
    loaded = recipe(tmp_path, sharding__config="mine.json")
    with pytest.raises(RecipeError) as caught:
        make_plan(loaded, facts(profile=profile))
    assert caught.value.problems[0].code in ("profile-conflict", "profile-scheduler")


def test_an_optimizer_block_is_resolved_from_the_trainer(tmp_path):
    loaded = recipe(tmp_path, sharding__config="mine.json", trainer__learning_rate="3e-4")
    profile = {
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
    }
    extras = make_plan(loaded, facts(profile=profile)).deepspeed.profile
    assert extras["optimizer.params.lr"] == 3e-4
    assert extras["optimizer.params.betas"] == [0.9, 0.999]
    assert extras["optimizer.params.weight_decay"] == 0.0


EVALUATED = BASE.replace("max_length: 512}", "max_length: 512, eval: [{path: data/eval.jsonl}]}")


def planned_trainer(made, *names):
    return tuple(made.at(f"trainer.{name}") for name in names)


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({"max_steps": 60}, (6, 6)),
        ({"max_steps": 4}, (1, 1)),
        ({"max_steps": 100_000}, (500, 500)),
        ({"max_steps": 60, "eval_steps": 7}, (7, 7)),
        ({"max_steps": 600, "save_steps": 250}, (250, 250)),
        ({"max_steps": 600, "eval_steps": 50, "save_steps": 100}, (50, 100)),
        ({"max_steps": "null"}, (0.1, 0.1)),
    ],
)
@pytest.mark.parametrize("why", ["early_stopping", "load_best_model_at_end"])
def test_evaluations_by_steps_have_their_checkpoints(tmp_path, trainer, expected, why):
    asked = {f"trainer__{name}": value for name, value in trainer.items()}
    asked |= {"early_stopping__patience": 1} if why == "early_stopping" else {f"trainer__{why}": "true"}
    made = plan(tmp_path, text=EVALUATED, trainer__eval_strategy="steps", **asked)
    assert planned_trainer(made, "eval_steps", "save_steps") == expected


def test_a_stream_is_evaluated_by_steps(tmp_path):
    asked = {"data__streaming": "true", "trainer__max_steps": 60, "early_stopping__patience": 2}
    made = plan(tmp_path, text=EVALUATED, **asked)
    names = ("eval_strategy", "save_strategy", "eval_steps", "save_steps")
    assert planned_trainer(made, *names) == ("steps", "steps", 6, 6)
    assert made.provenance["trainer.eval_strategy"].reason == "a stream is one epoch without end"
    prepared = plan(tmp_path, text=EVALUATED, early_stopping__patience=2)
    assert planned_trainer(prepared, "eval_strategy", "save_strategy") == ("epoch", "epoch")


def test_the_arguments_that_upstream_derives_are_accepted_by_it(tmp_path):
    """Shares of all steps, and numbers of them."""
    transformers = pytest.importorskip("transformers")
    for steps in ("null", 60):
        asked = {
            "trainer__eval_strategy": "steps",
            "early_stopping__patience": 1,
            "trainer__max_steps": steps,
        }
        made = plan(
            tmp_path, "cpu", text=EVALUATED.replace("huggyllama/llama-7b", "facebook/opt-125m"), **asked
        )
        fields = made.fields(made.trainer)
        args = transformers.TrainingArguments(str(tmp_path), **fields)
        assert args.eval_steps == args.save_steps == fields["eval_steps"]


def test_the_evaluation_is_estimated_with_the_batch_that_it_has(tmp_path):
    made = plan(tmp_path, "1xA100-80GB", text=EVALUATED, global_batch_size=4)
    micro = made.batch.micro
    assert micro == made.trainer.per_device_eval_batch_size == made.job.eval_batch == 4
    written = plan(
        tmp_path, "1xA100-80GB", EVALUATED, global_batch_size=4, trainer__per_device_eval_batch_size=4
    )
    assert made.memory == written.memory
    larger = plan(
        tmp_path, "1xA100-80GB", EVALUATED, global_batch_size=4, trainer__per_device_eval_batch_size=16
    )
    assert larger.memory.eval_peak > made.memory.eval_peak


SEQ2SEQ = """\
task: seq2seq-lm
model: {name_or_path: google-t5/t5-large}
data: {train: [{path: a.jsonl}], eval: {split: 0.1}, max_length: 128}
"""


@pytest.mark.parametrize(
    ("asked", "generates", "length"),
    [
        ({}, False, None),
        ({"data__metrics": "[perplexity]"}, False, None),
        ({"data__metrics": "[perplexity, chrf]"}, True, 128),
        ({"trainer__predict_with_generate": "true"}, True, 128),
        ({"data__metrics": "[bleu]", "trainer__predict_with_generate": "false"}, False, None),
        ({"data__metrics": "[bleu]", "trainer__generation_max_length": "5"}, True, 5),
    ],
)
def test_evaluations_generate_where_a_metric_reads_text(tmp_path, asked, generates, length):
    made = plan(tmp_path, text=SEQ2SEQ, **asked)
    assert made.trainer.predict_with_generate is generates
    assert made.at("trainer.generation_max_length") == length


IMAGES = """\
task: image-classification
model: {name_or_path: google/vit-large-patch16-224}
data: {train: [{path: pictures}]}
"""


def test_what_pictures_need_is_in_the_plan(tmp_path):
    made = plan(tmp_path, text=IMAGES)
    names = ("remove_unused_columns", "include_num_input_tokens_seen")
    assert planned_trainer(made, *names) == (False, "no")
    assert made.data.pad_to_multiple_of is None
    assert "trainer.use_cache" not in made.names
    assert plan(tmp_path).trainer.others["include_num_input_tokens_seen"] == "non_padding"


@pytest.mark.parametrize(
    ("on", "asked", "expected"),
    [
        ("8xA100-80GB", {}, 64),
        ("8xV100-32GB", {}, 8),
        ("cpu", {"model__name_or_path": "facebook/opt-125m"}, None),
        ("8xA100-80GB", {"data__packing": "true"}, 64),
        ("8xA100-80GB", {"data__padding_free": "false"}, 64),
        ("8xA100-80GB", {"task": "dpo"}, None),
    ],
)
def test_rows_are_padded_for_tensor_cores(tmp_path, on, asked, expected):
    made = plan(tmp_path, on, **asked)
    assert made.data.pad_to_multiple_of == expected
    assert made.provenance["data.pad_to_multiple_of"].reason


def test_a_disabled_fix_leaves_the_setting_to_upstream(tmp_path):
    assert plan(tmp_path).trainer.others["logging_nan_inf_filter"] is False
    accepted = plan(tmp_path, fixes__disable="[nan-shown-as-zero]")
    assert accepted.trainer.others["logging_nan_inf_filter"] is True


def test_no_row_is_said_to_be_padded_where_none_is(tmp_path):
    made = plan(tmp_path)
    assert (made.data.padding_free, made.data.packing) == (True, False)
    assert "padded" not in made.provenance["data.packing"].reason


def test_a_plan_for_a_device_without_cuda_says_that_only_its_capacity_is_known(tmp_path):
    made = plan(tmp_path, "1xMI300X-192GB", precision="fp16")
    assert made.precision == "fp16"
    assert any("MI300X-192GB" in warning for warning in made.warnings)
    assert not any("capacity" in warning for warning in plan(tmp_path, "1xH200-141GB").warnings)


LEAST_RATE = {"trainer__lr_scheduler_type": "cosine_with_min_lr"}


def test_a_least_rate_above_the_planned_one_is_refused(tmp_path):
    plan(tmp_path, **LEAST_RATE, trainer__lr_scheduler_kwargs="{min_lr: 1.0e-5}")
    with pytest.raises(RecipeError) as caught:
        plan(tmp_path, **LEAST_RATE, trainer__lr_scheduler_kwargs="{min_lr: 1.0e-3}")
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("wrong-value", "trainer.lr_scheduler_kwargs.min_lr")


def test_a_warm_up_longer_than_the_run_is_a_warning(tmp_path):
    for steps, wrong in ((9, True), (10, False)):
        made = plan(tmp_path, trainer__max_steps=steps, trainer__warmup_steps=10)
        assert any(text.startswith("trainer.warmup_steps") for text in made.warnings) == wrong
