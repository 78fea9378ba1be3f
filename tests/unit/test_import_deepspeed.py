"""DeepSpeed configs as recipe keys and a base profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from every import every
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import RecipeError
from launcher.importing import deepspeed
from launcher.importing.reading import Effect, Reading
from launcher.knowledge.lint.check import lint_text


def read(config: dict[str, Any]) -> Reading:
    return deepspeed.read(json.dumps(config, indent=1), "ds.json")


def taken(made: Reading) -> dict[str, Any]:
    return {key: value.value for key, value in made.taken.items()}


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


@every(
    ("config", "key", "wanted"),
    [
        (zero(stage=3), "sharding.zero_stage", 3),
        (zero(stage="2"), "sharding.zero_stage", 2),
        (zero(overlap_comm=True), "sharding.zero_stage", 0),
        ({"zero_optimization": True}, "sharding.zero_stage", 1),
        (zero(stage=2, offload_optimizer={"device": "cpu"}), "sharding.offload_optimizer", "cpu"),
        (zero(stage=2, cpu_offload=True), "sharding.offload_optimizer", "cpu"),
        (
            zero(stage=3, offload_param={"device": "nvme", "nvme_path": "/n"}),
            "sharding.offload_param",
            "nvme",
        ),
        (zero(stage=3, offload_param={"device": "nvme", "nvme_path": "/n"}), "sharding.nvme_path", "/n"),
        (zero(stage=3, cpu_offload_params=True), "sharding.offload_param", "cpu"),
        ({"bf16": {"enabled": True}}, "precision", "bf16"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": False}}, "precision", "fp16"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": False}}, "precision", "fp32"),
        ({"train_micro_batch_size_per_gpu": 4}, "trainer.per_device_train_batch_size", 4),
        ({"gradient_accumulation_steps": 8}, "trainer.gradient_accumulation_steps", 8),
        ({"train_batch_size": 64}, "global_batch_size", 64),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, "global_batch_size", 64),
        ({**zero(stage=1), "gradient_clipping": 0}, "trainer.max_grad_norm", 0.0),
        (optimizer("AdamW", lr=3e-5), "trainer.optim", "adamw_torch"),
        (optimizer("Adam", lr=3e-5), "trainer.learning_rate", 3e-5),
        (optimizer("Adam"), "trainer.learning_rate", 1e-3),
        (optimizer("AdamW", betas=[0.8, 0.99]), "trainer.adam_beta1", 0.8),
        (optimizer("AdamW", betas=[0.8, 0.99]), "trainer.adam_beta2", 0.99),
        (optimizer("AdamW", eps=1e-7), "trainer.adam_epsilon", 1e-7),
        (optimizer("AdamW", weight_decay=0.1), "trainer.weight_decay", 0.1),
        (scheduler("WarmupLR"), "trainer.warmup_steps", 1000),
        (scheduler("WarmupLR", warmup_max_lr=1e-4), "trainer.learning_rate", 1e-4),
        (scheduler("WarmupLR"), "trainer.lr_scheduler_type", "constant_with_warmup"),
        (scheduler("WarmupDecayLR", total_num_steps=99), "trainer.lr_scheduler_type", "linear"),
        (scheduler("WarmupDecayLR", total_num_steps=99), "trainer.max_steps", 99),
        (scheduler("WarmupCosineLR", warmup_num_steps=5), "trainer.lr_scheduler_type", "cosine"),
        ({**zero(stage=1), "tensor_parallel": {"autotp_size": 4}}, "sharding.tp_size", 4),
        ({**zero(stage=1), "sequence_parallel_size": 2}, "sharding.sp_size", 2),
    ],
)
def test_a_key_becomes_its_recipe_key(config: dict[str, Any], key: str, wanted: Any) -> None:
    made = read(config)
    assert taken(made)[key] == wanted
    assert taken(made)["sharding.engine"] == "deepspeed"
    assert not made.refusals


@pytest.mark.parametrize(
    ("config", "key", "effect"),
    [
        (optimizer("Lamb", lr=1e-3), "optimizer.type", Effect.TRAINING),
        (optimizer("Lion", lr=1e-3), "optimizer.type", Effect.TRAINING),
        (optimizer("AdamW", amsgrad=True), "optimizer.params.amsgrad", Effect.TRAINING),
        (scheduler("OneCycle", cycle_min_lr=0), "scheduler.type", Effect.TRAINING),
        (scheduler("WarmupLR"), "scheduler.params", Effect.TRAINING),
        (scheduler("WarmupLR", warmup_type="log"), "scheduler.params.warmup_type", Effect.TRAINING),
        (scheduler("WarmupLR", warmup_min_lr=1e-6), "scheduler.params.warmup_min_lr", Effect.TRAINING),
        ({**zero(stage=1), "activation_checkpointing": {"cpu_checkpointing": True}},
         "activation_checkpointing", Effect.NONE),
        ({**zero(stage=1), "monitor_config": {"enabled": True}}, "monitor_config", Effect.NONE),
        ({**zero(stage=7)}, "zero_optimization.stage", Effect.NEEDED),
        ({"train_batch_size": "many"}, "train_batch_size", Effect.NEEDED),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
         "train_batch_size", Effect.NONE),
    ],
)  # fmt: skip
def test_what_no_recipe_key_says_is_listed(config: dict[str, Any], key: str, effect: Effect) -> None:
    made = read(config)
    assert (key, effect) in {(entry.key, entry.effect) for entry in made.dropped}


def test_a_linear_warm_up_from_nothing_needs_no_word() -> None:
    made = read(scheduler("WarmupLR", warmup_type="linear", warmup_min_lr=0, warmup_num_steps=5))
    assert made.dropped == []


def test_processes_are_told_from_three_numbers() -> None:
    made = read(
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    )
    assert made.dropped[0].reason.startswith("for 8 processes")


@pytest.mark.parametrize(
    "config",
    [
        optimizer("Adam", adam_w_mode=False),
        {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
        {**optimizer("AdamW", lr=1e-4), **scheduler("WarmupLR", warmup_max_lr=1e-5)},
        {**zero(stage=2), "elasticity": {"enabled": True}},
        {**zero(stage=2), "curriculum_learning": {"enabled": True}},
    ],
)
def test_another_training_and_contradictions_are_refused(config: dict[str, Any]) -> None:
    refusal = read(config).refusals[0]
    assert refusal.line is not None
    assert refusal.file == "ds.json"


def test_what_is_left_is_a_profile_that_a_recipe_takes() -> None:
    made = read({
        **zero(stage=3, overlap_comm=False, sub_group_size=1e9, stage3_max_live_parameters=5e8,
               reduce_bucket_size="auto", stage3_gather_16bit_weights_on_model_save=True),
        "fp16": {"enabled": "auto", "loss_scale_window": 500},
        "comms_logger": {"enabled": True}, "wall_clock_breakdown": False, "monitor_config": {"enabled": True},
    })  # fmt: skip
    assert made.profile == {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"overlap_comm": False, "stage3_max_live_parameters": 500_000_000},
        "comms_logger": {"enabled": True},
    }
    assert taken(made)["sharding.config"] == "profile"


def test_the_written_files_lint_clean() -> None:
    """Of published configs."""
    lines = (Path(__file__).parent / "ds_examples.jsonl").read_text(encoding="utf-8").splitlines()
    written, offenders = 0, {}
    for line in lines:
        example, config = json.loads(line), {}
        for key, value in example["facts"].items():
            deepspeed._put(config, key, value)
        if profile := read(config).profile:
            written += 1
            if findings := lint_text(json.dumps(profile), "x.json"):
                offenders[example["url"]] = findings
    assert written > 40
    assert offenders == {}


def test_defaults_and_autos_leave_no_profile() -> None:
    assert read({**zero(stage=2, contiguous_gradients=True), "train_batch_size": "auto"}).profile == {}


def test_loss_scaling_stays_with_fp16() -> None:
    made = read({"fp16": {"enabled": True, "loss_scale_window": 500}})
    assert made.profile["fp16"] == {"enabled": "auto", "loss_scale_window": 500}
    assert taken(made)["sharding.config"] == "profile"
    assert made.taken["sharding.config"].said == "fp16.loss_scale_window"


def test_a_key_twice_is_refused_as_deepspeed_does() -> None:
    text = '{\n"zero_optimization": {"stage": 2},\n"zero_optimization": {"stage": 3}}'
    assert deepspeed.read(text, "ds.json").refusals[0].line == 3


@pytest.mark.parametrize("text", ["[]", "{", "3", '{"a": }'])
def test_what_is_no_object_is_said_with_its_line(text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        deepspeed.read(text, "ds.json")
    assert caught.value.problems[0].line == 1


_KEYS = [*deepspeed._DEFAULTS, *deepspeed._OTHER_TRAINING, "zero_optimization.stage", "bf16.enabled",
         "fp16.enabled", "optimizer.type", "optimizer.params.lr", "scheduler.type", "scheduler.params.x",
         "train_batch_size", "gradient_clipping", "aio.block_size", "no_such.key",
         "zero_optimization.offload_param.device", "zero_optimization.offload_param.nvme_path"]  # fmt: skip
_VALUES = st.one_of(st.booleans(), st.integers(-3, 9), st.floats(allow_nan=False, allow_infinity=False),
                    st.sampled_from(["auto", "cpu", "x", None, [], {}]))  # fmt: skip


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=6))
def test_no_key_vanishes(flat: dict[str, Any]) -> None:
    config: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, last = key.split(".")
        inner: Any = config
        for parent in parents:
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):
                return
        inner[last] = value
    made = read(config)
    told = made.seen | {refusal.path for refusal in made.refusals}
    for key in deepspeed.flatten(config):
        assert key in told or key.partition(".")[0] in told, key
    assert not made.profile or lint_text(json.dumps(made.profile), "x.json") == []


@pytest.mark.parametrize(
    ("block", "key", "value", "effect"),
    [
        ("zero_optimization", "mics_shard_size", 4, Effect.NONE),
        ("zero_optimization", "zeropp_loco_param", {"err_beta": 0.8}, Effect.TRAINING),
        ("zero_optimization", "stage3_max_live_paramters", 5, Effect.NONE),
        ("", "gradient_accumulation_dtype", "fp32", Effect.NONE),
        ("", "graph_harvesting", True, Effect.NONE),
    ],
)
def test_names_that_deepspeed_does_not_read_are_listed_as_they_are(
    block: str, key: str, value: Any, effect: Effect
) -> None:
    config: dict[str, Any] = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    (config[block] if block else config)[key] = value
    reading = deepspeed.read(json.dumps(config), "ds.json")
    assert [(entry.key, entry.effect) for entry in reading.dropped] == [
        (f"{block}.{key}".lstrip("."), effect)
    ]
    assert not reading.profile


def test_a_switch_where_a_block_is_expected_is_listed() -> None:
    made = read({"fp16": True, **zero(stage=2)})
    assert made.value("sharding.zero_stage") == 2
    assert {entry.key: entry.effect for entry in made.dropped} == {"fp16": Effect.NONE}
