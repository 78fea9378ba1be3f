"""`on_oom: adapt`: the order of savings, the unchanged global batch, what is passed over, and the end."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from factories import BASE, facts, recipe

from launcher.knowledge.failures.catalogue import CHAPTERS, FAILURES
from launcher.machine.hardware import parse_hardware
from launcher.planner import adapting
from launcher.planner.adapting import adapt, is_out_of_memory, moment_of, ways_out
from launcher.planner.planner import make_plan

FULL = BASE.replace("adapter: {type: lora, r: 8}\n", "")
SMALL = "huggyllama/llama-7b"


def tries(
    folder, on="8xA100-80GB", text=BASE, *, moment="training", host_bytes=None, profile=None, **overrides
):
    """The first plan, and every adaptation after it until nothing is left."""
    if profile is not None:
        overrides["sharding__config"] = str(profile)
    loaded = recipe(folder, text, **overrides)
    told = facts(
        on,
        SMALL,
        loaded.recipe.task,
        host_bytes=host_bytes,
        profile=None if profile is None else json.loads(profile.read_text("utf-8")),
    )
    failed = first = make_plan(loaded, told)
    found, before = [], {}
    while (step := adapt(loaded, told, failed, before=before, moment=moment)) is not None:
        found.append(step)
        failed, before = step.plan, step.changes
        assert len(found) < 30, "it must end"
    return first, found


def test_the_micro_batch_is_halved_to_one_before_anything_else(tmp_path):
    first, found = tries(
        tmp_path, global_batch_size=64, trainer__per_device_train_batch_size=8,
        trainer__activation_checkpointing="false", sharding__engine="ddp",
    )  # fmt: skip
    assert [step.plan.batch.micro for step in found[:4]] == [4, 2, 1, 1]
    assert [step.plan.batch.accumulation for step in found[:4]] == [2, 4, 8, 8]
    assert [step.plan.job.checkpointing for step in found[:4]] == [False, False, False, True]
    assert {step.plan.batch.global_size for step in found} == {first.batch.global_size} == {64}
    assert all(step.keeps_checkpoints for step in found[:4])


TEXTS = """\
task: embedding
model: {name_or_path: BAAI/bge-base-en-v1.5}
data: {train: [{path: data/train.jsonl}], max_length: 128}
trainer: {max_steps: 10, activation_checkpointing: false}
sharding: {engine: ddp}
global_batch_size: 512
"""


@pytest.mark.parametrize(
    ("loss", "sizes"),
    [
        ("MultipleNegativesRankingLoss", []),
        ("CachedMultipleNegativesRankingLoss", [16, 8, 4, 2, 1]),
        ("CoSENTLoss", []),
        ("AnglELoss", []),
    ],
)
@pytest.mark.parametrize("moment", ["training", "evaluating"])
def test_what_is_compared_in_a_micro_batch_stays(tmp_path, loss, sizes, moment):
    """Mini-batches of a cached loss are halved: it learns the same."""
    loaded = recipe(tmp_path, TEXTS, embedding__loss=loss, data__eval__split=0.1)
    told = facts("8xA100-80GB", "BAAI/bge-base-en-v1.5", "embedding")
    failed = first = make_plan(loaded, told)
    found, before = [], {}
    while (step := adapt(loaded, told, failed, before=before, moment=moment)) is not None:
        found.append(step)
        failed, before = step.plan, step.changes
    assert {step.plan.batch for step in found} <= {first.batch}
    assert {step.plan.job.eval_batch for step in found} <= {first.job.eval_batch}
    halved = [
        step.changes["embedding.mini_batch_size"]
        for step in found
        if "embedding.mini_batch_size" in step.changed
    ]
    assert halved == (sizes if moment == "training" else [])


def test_then_checkpointing_then_zero_then_the_host(tmp_path):
    first, found = tries(
        tmp_path, text=FULL, global_batch_size=16, trainer__per_device_train_batch_size=1,
        trainer__activation_checkpointing="false", sharding__zero_stage=1,
    )  # fmt: skip
    assert first.job.zero_stage == 1
    seen = [
        (
            s.plan.job.checkpointing,
            s.plan.job.offload_activations,
            s.plan.job.zero_stage,
            s.plan.job.offload_optimizer,
            s.plan.job.offload_param,
        )
        for s in found
    ]
    assert seen == [
        (True, "none", 1, "none", "none"),
        (True, "cpu", 1, "none", "none"),
        (True, "cpu", 2, "none", "none"),
        (True, "cpu", 3, "none", "none"),
        (True, "cpu", 3, "cpu", "none"),
        (True, "cpu", 3, "cpu", "cpu"),
    ]
    assert [step.keeps_checkpoints for step in found] == [True, True, True, False, False, True]
    assert all(a.plan.memory.needed < b.plan.memory.needed for b, a in pairwise(found[1:]))


def test_accumulation_that_the_recipe_names_keeps_the_global_batch(tmp_path):
    first, found = tries(
        tmp_path, trainer__per_device_train_batch_size=4, trainer__gradient_accumulation_steps=3,
    )  # fmt: skip
    assert first.batch.global_size == 96
    assert (found[0].plan.batch.micro, found[0].plan.batch.accumulation) == (2, 6)
    assert found[0].plan.batch.global_size == 96


def test_an_odd_micro_batch_goes_to_a_divisor(tmp_path):
    _, found = tries(tmp_path, global_batch_size=72, trainer__per_device_train_batch_size=9)
    assert [step.plan.batch.micro for step in found[:2]] == [3, 1]


def test_what_the_failed_plan_chose_is_not_chosen_anew(tmp_path):
    """With a smaller batch the search alone would leave checkpointing out again."""
    loaded = recipe(tmp_path, FULL, global_batch_size=256)
    told = facts("8xA100-80GB")
    pinned = recipe(tmp_path, FULL, global_batch_size=256, trainer__activation_checkpointing="true")
    failed = make_plan(pinned, told)
    step = adapt(loaded, told, failed, before={})
    assert step.plan.job.checkpointing is True
    assert (step.plan.job.engine, step.plan.job.zero_stage) == (failed.job.engine, failed.job.zero_stage)
    assert step.plan.batch.micro < failed.batch.micro


def test_the_reason_names_the_line_that_is_replaced(tmp_path):
    text = BASE.replace("max_steps: 10", "max_steps: 10, per_device_train_batch_size: 4")
    _, found = tries(tmp_path, text=text, global_batch_size=64)
    assert "micro-batch 4 ran out of memory: 2 with accumulation 4" in found[0].reason
    assert "in place of trainer.per_device_train_batch_size of" in found[0].reason
    assert "recipe.yaml:4" in found[0].reason
    assert found[0].changed["trainer.per_device_train_batch_size"] == (4, 2)
    assert found[0].changed["trainer.gradient_accumulation_steps"] == (2, 4)
    setting = found[0].plan.provenance["trainer.per_device_train_batch_size"]
    assert (setting.source, setting.by) == ("override", "on_oom: adapt")
    _, silent = tries(tmp_path, global_batch_size=64)
    assert "in place of" not in silent[0].reason


def test_one_device_has_nobody_to_share_with(tmp_path):
    _, found = tries(
        tmp_path, "1xA100-80GB", global_batch_size=1, trainer__activation_checkpointing="true",
    )  # fmt: skip
    assert found[0].plan.job.offload_activations == "cpu"
    assert {step.plan.job.offload_optimizer for step in found[1:]} == {"cpu"}
    assert found[-1].plan.job.offload_param == "cpu"


def test_a_cpu_has_no_other_memory_to_move_to(tmp_path):
    text = BASE.replace("max_length: 512", "max_length: 64")
    _, found = tries(
        tmp_path, "2xcpu", text, global_batch_size=2, trainer__activation_checkpointing="true",
        sharding__zero_stage=2,
    )  # fmt: skip
    assert [step.plan.job.zero_stage for step in found] == [3]
    assert {step.plan.job.offload_optimizer for step in found} == {"none"}


def test_what_a_fix_refuses_is_passed_over(tmp_path):
    """int8 weights are not sharded, and 8-bit AdamW cannot be offloaded."""
    _, found = tries(
        tmp_path, model__quantization="int8", trainer__optim="adamw_bnb_8bit", global_batch_size=8,
        trainer__activation_checkpointing="true", sharding__engine="ddp",
    )  # fmt: skip
    assert all(step.plan.job.zero_stage < 3 for step in found)
    assert all(step.plan.job.offload_optimizer == "none" for step in found)


def test_offload_that_the_host_cannot_hold_is_passed_over(tmp_path):
    given = {"global_batch_size": 8, "trainer__activation_checkpointing": "true", "sharding__zero_stage": 3}
    _, much = tries(tmp_path, text=FULL, host_bytes=2 * 10**12, **given)
    first, little = tries(tmp_path, text=FULL, host_bytes=40 * 10**9, **given)
    assert first.memory.host_bytes < 40 * 10**9 < much[0].plan.memory.host_bytes
    seen = [(step.plan.job.offload_optimizer, step.plan.job.offload_activations) for step in much]
    # The step of the optimizer needs the most, until its states have gone.
    assert seen == [("cpu", "none"), ("cpu", "cpu"), ("cpu", "cpu")]
    assert little == []


def test_what_a_base_profile_says_stays(tmp_path, root):
    """Its offload to NVMe, and its stage, which the plan may not contradict."""
    given = {"global_batch_size": 16, "trainer__per_device_train_batch_size": 2}
    first, found = tries(tmp_path, text=FULL, profile=root / "ds_configs" / "zero3_nvme.json", **given)
    assert ways_out(first) == ["micro-batch 1", "activation checkpointing", "activations in host memory"]
    assert [step.plan.batch.micro for step in found] == [1, 1, 1]
    assert {(s.plan.job.offload_optimizer, s.plan.job.offload_param) for s in found} == {("nvme", "nvme")}
    first, found = tries(tmp_path, text=FULL, profile=root / "ds_configs" / "zero2.json", **given)
    recomputes = ["activation checkpointing", "activations in host memory"]
    assert ways_out(first) == ["micro-batch 1", *recomputes, "offload"]
    assert {step.plan.job.zero_stage for step in found} == {2}
    assert found[-1].plan.job.offload_optimizer == "cpu"


def test_an_evaluation_that_ran_out_of_memory_leaves_training_alone(tmp_path):
    text = BASE.replace("max_length: 512}", "max_length: 512, eval: {split: 0.1}}")
    first, found = tries(
        tmp_path, text=text, moment="evaluating", global_batch_size=64,
        trainer__per_device_train_batch_size=8, trainer__per_device_eval_batch_size=4,
    )  # fmt: skip
    assert [step.plan.job.eval_batch for step in found[:2]] == [2, 1]
    assert {step.plan.batch.micro for step in found} == {first.batch.micro}


def test_while_loading_no_batch_matters(tmp_path):
    first, found = tries(
        tmp_path, text=FULL, moment="loading", global_batch_size=64, trainer__per_device_train_batch_size=4,
        sharding__zero_stage=2,
    )  # fmt: skip
    assert found[0].plan.job.zero_stage == 3
    assert {step.plan.batch.micro for step in found} == {first.batch.micro}


@pytest.mark.parametrize(
    ("failure", "on", "adapts"),
    [
        ("cuda-oom", "1xA100-80GB", True),
        ("eval-oom", "1xA100-80GB", True),
        ("sigkill-oom", "1xA100-80GB", False),
        ("sigkill-oom", "cpu", True),
        ("nccl-timeout", "cpu", False),
    ],
)
def test_which_failures_adapting_can_mend(failure, on, adapts):
    assert is_out_of_memory(failure, parse_hardware(on)) is adapts


def test_the_failures_that_it_mends_are_known_by_these_ids():
    mended = {*adapting._DEVICE_FAILURES, adapting._HOST_FAILURE}
    assert mended <= {failure.id for failure in FAILURES}
    by_itself = {failure.id for failure in CHAPTERS["Memory"] if "auto_find_batch_size" not in failure.fix}
    assert by_itself == adapting._DEVICE_FAILURES, (
        "every failure of device memory but upstream's own adapting"
    )


@pytest.mark.parametrize(
    ("failure", "calls", "moment"),
    [
        ("cuda-oom", ["forward", "compute_loss", "training_step", "_inner_training_loop", "fit"], "training"),
        ("cuda-oom", ["to", "from_pretrained", "load_model", "train", "main"], "loading"),
        ("cuda-oom", ["partition", "initialize", "_prepare_for_training", "fit"], "loading"),
        (
            "whole-model-oom",
            ["to", "_configure_distributed_model", "_prepare_for_training"],
            "loading",
        ),
        ("cuda-oom", ["_init_group", "step", "_inner_training_loop", "fit"], "loading"),
        ("eval-oom", ["forward", "prediction_step", "evaluation_loop"], "evaluating"),
        (
            "cuda-oom",
            ["forward", "generate", "_generate_and_score_completions", "training_step"],
            "generating",
        ),
        ("sigkill-oom", [], "training"),
    ],
)
def test_when_memory_ran_out(failure, calls, moment):
    assert moment_of(failure, calls) == moment


def test_checkpoints_without_training_states_are_not_continued(tmp_path):
    _, found = tries(
        tmp_path, global_batch_size=64, trainer__per_device_train_batch_size=8,
        trainer__save_only_model="true", sharding__engine="ddp",
    )  # fmt: skip
    assert not found[0].keeps_checkpoints
    assert "save_only_model" in found[0].unreadable


def test_the_plan_says_what_it_would_try(tmp_path):
    first, found = tries(
        tmp_path, text=FULL, global_batch_size=64, trainer__per_device_train_batch_size=4,
        trainer__activation_checkpointing="false", sharding__zero_stage=1,
    )  # fmt: skip
    recomputes = ["activation checkpointing", "activations in host memory"]
    assert ways_out(first) == ["micro-batch 2, 1", *recomputes, "ZeRO-2, ZeRO-3", "offload"]
    assert ways_out(found[-1].plan) == []
    on_cpu, _ = tries(tmp_path, "2xcpu", BASE.replace("512", "64"), sharding__zero_stage=3,
                      trainer__activation_checkpointing="true", global_batch_size=2)  # fmt: skip
    assert ways_out(on_cpu) == []


GROUPS = """\
task: grpo
model: {name_or_path: huggyllama/llama-7b}
data: {train: [{path: rows.jsonl}], max_length: 512}
reward: [{function: numeric_answer}]
adapter: {type: lora}
global_batch_size: 32
generation: {num_generations: 8, max_completion_length: 128}
sharding: {engine: ddp}
"""


def test_smaller_micro_batches_keep_the_groups_and_the_completions_of_a_generation(tmp_path):
    sizes = {"trainer__per_device_train_batch_size": 4, "trainer__steps_per_generation": 2}
    _, found = tries(tmp_path, "2xA100-80GB", GROUPS, **sizes)
    halved = [step.plan for step in found if step.plan.batch.micro < 4]
    steps = [plan.at("trainer.steps_per_generation") for plan in halved]
    assert [plan.batch.micro for plan in halved[:2]] == [2, 1]
    assert steps[:2] == [4, 8]
    for plan in halved:
        completions = plan.batch.micro * plan.batch.data_parallel * plan.at("trainer.steps_per_generation")
        assert (completions, plan.batch.global_size) == (16, 32)


def test_a_generation_that_ran_out_of_memory_is_not_made_smaller_by_micro_batches(tmp_path):
    """It has as many completions then: states are sharded at once, and nothing is left after that."""
    _, found = tries(
        tmp_path, "2xA100-80GB", GROUPS, moment="generating", trainer__per_device_train_batch_size=4
    )
    assert {step.plan.batch.micro for step in found} == {4}, "and something was found"
    assert all(step.plan.job.engine.name == "deepspeed" for step in found)
