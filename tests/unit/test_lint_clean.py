"""Sane configs are clean: the shipped ones, ours, and the official examples, each finding justified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from every import every

from launcher.knowledge.lint.check import lint_text
from launcher.knowledge.lint.consistency import BELOW_STAGE3_ONLY, READ_NOWHERE, STAGE3_ONLY
from launcher.knowledge.lint.keys import known_keys, spellings, vocabulary

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "ds_configs").glob("*.json"))
GOLDEN = sorted((ROOT / "tests" / "golden" / "plans").glob("*.json"))
# Keys and values of the official example configs (DeepSpeedExamples, transformers, accelerate), each with
# its link and with what lint says of it: [code, path, why that is right].
EXAMPLES = [
    json.loads(line)
    for line in (ROOT / "tests/unit/ds_examples.jsonl").read_text(encoding="utf-8").splitlines()
]
# They are templates of a shell script: a bare word stands where a number belongs.
TEMPLATES = {
    "DeepSpeedExamples compression/bert/config/ds_config_TEMPLATE.json": "BATCH_SIZE_PER_GPU",
    "DeepSpeedExamples data_efficiency/gpt_finetuning/finetune/ds_config_gpt2_TEMPLATE.json": "GB_SIZE",
    "DeepSpeedExamples tensor_parallel/hf_integration/configs/ds_config_temp.json": "${zero_stage}",
}


def nested(facts: dict) -> dict:
    """Dotted keys as objects in objects."""
    whole: dict = {}
    for dotted, value in facts.items():
        *parents, last = dotted.split(".")
        level = whole
        for key in parents:
            level = level.setdefault(key, {})
        level[last] = value
    return whole


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_profile_is_clean(path):
    assert lint_text(path.read_text(encoding="utf-8"), path.name) == []


def test_the_config_of_every_golden_plan_is_clean():
    configs = {path.stem: json.loads(path.read_text(encoding="utf-8"))["ds_config"] for path in GOLDEN}
    written = {name: config for name, config in configs.items() if config is not None}
    assert len(written) >= 5
    for name, config in written.items():
        assert lint_text(json.dumps(config, indent=2), name) == []


@every("example", EXAMPLES, ids=lambda example: "/".join(example["url"].split("/")[3:5]))
def test_an_official_example_has_the_justified_findings_alone(example):
    text = json.dumps(nested(example["facts"]))
    found = sorted({(f.code, f.path) for f in lint_text(text, "ds.json")})
    assert found == [(code, path) for code, path, _ in example["findings"]]


def test_each_finding_on_an_official_example_is_justified():
    assert len(EXAMPLES) >= 50
    assert sum(not example["findings"] for example in EXAMPLES) >= 30
    assert all(why for example in EXAMPLES for _, _, why in example["findings"])
    assert all(example["url"].startswith("https://github.com/") for example in EXAMPLES)


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_official_template_is_no_json(name):
    text = f'{{\n  "train_batch_size": {TEMPLATES[name]}\n}}'
    assert [(f.code, f.line, f.column) for f in lint_text(text, name)] == [("ds-json-syntax", 2, 23)]


@every(
    "text",
    [
        # Whole numbers with an exponent are how buckets are written everywhere.
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e9}}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}}',
        # DeepSpeed's other names of a key, and a choice in any case.
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "max_live_parameters": 5}}',
        '{"train_batch_size": 8, "communication_data_type": "BF16"}',
        '{"train_batch_size": 8, "checkpoint": {"tag_validation": "FAIL"}}',
        # A comment as a key, and null where DeepSpeed takes it.
        '{"train_batch_size": 8, "_comment": "mine", "zero_optimization": {"overlap_comm": null}}',
        # Off, so there is nothing to say.
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_param": {"device": "none"}}}',
        '{"train_batch_size": 8, "bf16": {"enabled": true}, "fp16": {"enabled": false}}',
        # DeepSpeed reads these "auto" itself.
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "zenflow": {"select_interval": "auto"}}}',
        # Stages 1 and 2 read these, stage 3 those.
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "allgather_partitions": true, '
        '"allgather_bucket_size": 5e8, "round_robin_gradients": true, "contiguous_gradients": true}}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "contiguous_gradients": true, '
        '"reduce_scatter": true, "round_robin_gradients": false, "offload_param": {"device": "nvme", '
        '"nvme_path": "/x", "buffer_count": 5}, "offload_optimizer": {"device": "cpu", "fast_init": true}}}',
        # Read with offload, by pipelines, and by DeepCompile.
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "ignore_unused_parameters": false, '
        '"offload_optimizer": {"device": "cpu"}}}',
        '{"train_batch_size": 8, "pipeline": {}, "compile": {"deepcompile": true}, "zero_optimization": '
        '{"stage": 0, "allgather_bucket_size": 5, "reduce_bucket_size": 5, "contiguous_gradients": false}}',
        '{"train_batch_size": 8, "activation_checkpointing": {"partition_activations": true, '
        '"contiguous_memory_optimization": true, "number_checkpoints": 4}}',
        # A base profile leaves the stage to the plan.
        '{"train_batch_size": 8, "zero_optimization": {"stage3_max_live_parameters":5, "overlap_comm":true}}',
        # Keys of one's own beside DeepSpeed's.
        '{"zero_optimization": {"stage": 2}, "train_batch_size": 8, "_model_type": "x", "_name": "y"}',
        # The number of ranks is not known, and may be 4.
        '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}',
        # An integer where a decimal number may be.
        '{"train_batch_size": 8, "gradient_clipping": 1}',
        # torch's own Adam takes what FusedAdam does not.
        '{"train_batch_size": 8, "optimizer": {"type": "Adam", "params":{"fused":true, "torch_adam": true}}}',
        '{"train_batch_size": 8, "optimizer": {"type": "aDaM", "params": {"lr": 1e-4, "adam_w_mode": true}}}',
        # What the classes of optimizers and schedules take.
        '{"train_batch_size": 8, "optimizer": {"type": "Adafactor", "params": {"eps": [null, 1e-3]}}}',
        '{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0, 0.95]}}, '
        '"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 1e5, "warmup_max_lr": 3e-5}}}',
        '{"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": null, '
        '"warmup_min_lr": [0, 1e-6]}}}',
        '{"train_batch_size": 8, "zero_allow_untested_optimizer": true, "zero_optimization": {"stage": 2}, '
        '"optimizer": {"type": "SGD", "params": {"lr": 1}}}',
        # DeepSpeed reads this form, too.
        '{"train_batch_size": 8, "zero_optimization": false}',
        '{"train_batch_size": 8, "data_efficiency": {"data_sampling": {"curriculum_learning": '
        '{"curriculum_metrics": {"seqlen": {"difficulty_type": "value"}}}}}}',
    ],
)  # fmt: skip
def test_no_false_finding(text):
    assert lint_text(text, "ds.json") == []


def test_the_two_configs_of_the_field_notes():
    """What people had: `bfloat16: auto` beside fp16 and 1e5 steps; ZeRO-2 with optimizer offload."""
    folder = ROOT / "tests" / "unit" / "ds_field_notes"
    found = {
        path.stem: [(f.code, f.line, f.column) for f in lint_text(path.read_text("utf-8"), path.name)]
        for path in sorted(folder.glob("*.json"))
    }
    assert found == {
        "bfloat16_beside_fp16": [("ds-bfloat16-alias", 9, 3), ("ds-wrong-type", 25, 22)],
        "stage2_offload": [],
    }


def test_every_key_of_one_stage_is_one_that_deepspeed_knows():
    known = spellings(known_keys()["zero_optimization"]["keys"])
    unknown = {
        key
        for key in STAGE3_ONLY | BELOW_STAGE3_ONLY | READ_NOWHERE
        if key not in known and f"stage3_{key}" not in known
    }
    assert unknown == set()


def test_the_table_has_what_the_rules_read():
    blocks = {"optimizers", "optimizer_params", "schedulers", "scheduler_params"}
    assert {"version", "keys", "removed", "auto"} | blocks == set(vocabulary())
    assert len(spellings(known_keys())) >= 45
    assert known_keys()["zero_optimization"]["strict"] is True
    assert known_keys()["activation_checkpointing"]["strict"] is False


def test_autotp_reads_a_key_of_stage_3():
    """accelerate puts its parts together only where the key is there; without AutoTP it does nothing."""
    zero = {"stage": 1, "stage3_gather_16bit_weights_on_model_save": True}
    config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": zero}
    assert "ds-no-effect" in {found.code for found in lint_text(json.dumps(config), "x")}
    cut = {**config, "tensor_parallel": {"autotp_size": 2}}
    assert "ds-no-effect" not in {found.code for found in lint_text(json.dumps(cut), "x")}
