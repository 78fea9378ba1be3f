"""What a plan writes, builds and asks for, as `doctor` counts it."""

from __future__ import annotations

from dataclasses import replace

import factories
import pytest

from launcher.engines.ddp import DDP
from launcher.knowledge.doctor.needs import (  # fmt: skip
    built_ops,
    checkpoint_bytes,
    checkpoints_kept,
    hub_model,
    reports_to,
    result_bytes,
    weights_bytes,
)

FULL = factories.BASE.replace("adapter: {type: lora, r: 8}\n", "")
PARAMS = 6_738_415_616


def trainer(**values):
    rest = ", ".join(f"{name}: {value}" for name, value in values.items())
    return factories.BASE.replace("trainer: {max_steps: 10}", f"trainer: {{{rest}}}")


def test_an_adapters_checkpoint_holds_no_base_model(tmp_path):
    plan = factories.plan(tmp_path, text=factories.BASE + "sharding: {engine: ddp}\n")
    trained = plan.job.trainable_params
    assert result_bytes(plan) == 4 * trained
    assert checkpoint_bytes(plan) == 4 * trained + 8 * trained  # AdamW's two moments


@pytest.mark.parametrize(("stage", "copies"), [(2, 2), (3, 1)])
def test_a_full_checkpoint_under_deepspeed(tmp_path, stage, copies):
    text = FULL + f"precision: bf16\nsharding: {{engine: deepspeed, zero_stage: {stage}}}\n"
    plan = factories.plan(tmp_path, text=text)
    assert weights_bytes(plan) == result_bytes(plan) == 2 * PARAMS
    # Master weights and two moments in float32; below stage 3 the module is written a second time.
    assert checkpoint_bytes(plan) == (2 * copies + 12) * PARAMS


def test_only_the_model_is_written_where_that_is_asked_for(tmp_path):
    text = trainer(max_steps=10, save_only_model="true")
    plan = factories.plan(tmp_path, text=text)
    assert checkpoint_bytes(plan) == result_bytes(plan)


BEST = {"metric_for_best_model": "eval_loss"}


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"max_steps": 1000, "save_steps": 100, "save_total_limit": 2}, 3),
        ({"max_steps": 100, "save_steps": 100, "save_total_limit": 2}, 1),
        ({"max_steps": 1000, "save_steps": 100}, 10),
        ({"max_steps": 1000, "save_steps": 0.25}, 4),
        ({"num_train_epochs": 3, "save_steps": 100, "save_total_limit": 2}, 3),
        ({"num_train_epochs": 3, "save_steps": 100}, None),
        ({"max_steps": 1000, "save_strategy": '"no"'}, 0),
        ({"max_steps": 1000, "save_steps": 100, "save_total_limit": 1}, 2),
        ({"max_steps": 1000, "save_steps": 100, "save_total_limit": 0}, 10),
        # The best one and the newest stay, and the next is written.
        ({"max_steps": 1000, "save_steps": 100, "save_total_limit": 1, **BEST}, 3),
        ({"max_steps": 1000, "save_steps": 100, "save_total_limit": 3, **BEST}, 4),
    ],
)
def test_checkpoints_on_the_disk_at_one_time(tmp_path, values, kept):
    plan = factories.plan(tmp_path, text=trainer(**values))
    if "save_total_limit" not in values:  # the plan sets one of its own
        plan = factories.with_settings(plan, {"trainer.save_total_limit": None})
    assert checkpoints_kept(plan) == kept


def test_operators_by_optimizer(tmp_path):
    text = FULL + "precision: bf16\nsharding: {engine: deepspeed, zero_stage: 3, offload_optimizer: cpu}\n"
    plan = factories.plan(tmp_path, text=text)
    assert built_ops(plan) == ["cpu_adam"]
    assert built_ops(replace(plan, job=replace(plan.job, offload_optimizer="nvme"))) == [
        "cpu_adam",
        "async_io",
    ]
    assert built_ops(replace(plan, job=replace(plan.job, offload_optimizer="none"))) == []
    assert DDP.compiled_ops(plan) == []
    on_cpu = replace(plan, hardware=replace(plan.hardware, device="cpu"))
    assert built_ops(on_cpu) == ["cpu_adam", "deepspeed_shm_comm"]
    assert built_ops(None) == []


def test_reporting_to_wandb(tmp_path):
    plan = factories.plan(tmp_path)
    assert not reports_to(plan, "wandb")
    for value, answer in (
        ("wandb", True),
        (["tensorboard", "wandb"], True),
        ("all", True),
        (["all"], True),
        ("none", False),
    ):
        asked = factories.with_settings(plan, {"trainer.report_to": value})
        assert reports_to(asked, "wandb") is answer
    assert not reports_to(None, "wandb")


def test_a_hub_id_is_told_from_a_folder(tmp_path):
    plan = factories.plan(tmp_path)
    assert hub_model(plan) == "huggyllama/llama-7b"
    assert hub_model(replace(plan, spec=replace(plan.spec, origin="folder"))) is None
    for local in ("/models/llama", "./llama", "package:x/y", None):
        assert hub_model(factories.with_settings(plan, {"model.name_or_path": local})) is None
