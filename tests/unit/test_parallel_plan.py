"""Ranks that share a copy in the plan: what divides the batch, what each holds, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from factories import facts, plan, recipe

from launcher.errors import RecipeError
from launcher.models.capabilities import tp_plans
from launcher.models.model import read_model_spec
from launcher.models.model_config import shipped_model_config
from launcher.plan.stored import StoredPlan
from launcher.planner.decide import SIZES
from launcher.planner.parallel import FAMILIES
from launcher.planner.planner import make_plan
from launcher.planner.resuming import compare_plans, compare_settings, resume_of
from launcher.planner.search import search
from launcher.planner.tiny import tiny_hardware, tiny_on_cpu, tiny_on_gpus, tiny_recipe
from launcher.render.bundle import render
from launcher.report import plan_sections
from launcher.report.sections import line

MODEL = "Qwen/Qwen2.5-0.5B"
FULL = """\
model: {name_or_path: meta-llama/Llama-3.1-8B}
data: {train: [{path: data/train.jsonl}], max_length: 4096}
global_batch_size: 16
trainer: {max_steps: 10}
"""
PINNED = {
    "sharding__engine": "deepspeed", "sharding__zero_stage": 1, "trainer__per_device_train_batch_size": 1,
}  # fmt: skip


def shared(folder, on="8xH100-80GB", text=FULL, **overrides):
    return plan(folder, on, text, **overrides)


def refused(folder, on="8xH100-80GB", text=FULL, **overrides):
    with pytest.raises(RecipeError) as caught:
        shared(folder, on, text, **overrides)
    (problem,) = caught.value.problems
    assert problem.hint
    return problem


def layout(made):
    """What the facts of the plan say about it."""
    return [line(row.value) for row in plan_sections.facts(render(made).to_json()) if row.name == "layout"]


@pytest.mark.parametrize(
    ("size", "engine", "copies"),
    [("tp_size", "deepspeed", 4), ("sp_size", "deepspeed", 4), ("cp_size", "fsdp", 4)],
)
def test_copies_alone_divide_the_batch(size, engine, copies, tmp_path):
    made = shared(tmp_path, **{f"sharding__{size}": 2})
    assert made.sharding.engine == engine
    assert made.batch.data_parallel == copies
    assert made.batch.global_size == 16
    assert made.schedule.tokens_per_step == 16 * 4096
    assert made.at(f"sharding.{size}") == 2
    assert made.provenance[f"sharding.{size}"].source == "override"
    kind = {"tp_size": "tensor", "sp_size": "sequence", "cp_size": "context"}[size]
    assert layout(made) == [f"8 devices: 4 data-parallel x 2 {kind}-parallel"]


def test_without_sizes_nothing_is_said_of_a_layout(tmp_path):
    made = shared(tmp_path)
    assert [made.at(f"sharding.{name}") for name in SIZES] == [1, 1, 1]
    assert layout(made) == []


def test_a_batch_that_the_copies_cannot_divide_names_them(tmp_path):
    problem = refused(tmp_path, sharding__tp_size=2, global_batch_size=6)
    assert problem.code == "batch-not-divisible"
    assert "6 samples do not divide among 4 data-parallel ranks" in problem.message


@pytest.mark.parametrize("size", ["sp_size", "cp_size"])
def test_ranks_that_share_tokens_train_one_sample_at_a_time(size, tmp_path):
    made = shared(tmp_path, **{f"sharding__{size}": 4})
    assert (made.batch.micro, made.batch.accumulation, made.batch.data_parallel) == (1, 8, 2)
    parts = 4 if size == "sp_size" else 8
    assert made.data.pad_to_multiple_of % parts == 0


def test_what_the_libraries_are_told(tmp_path):
    bundle = render(shared(tmp_path, sharding__tp_size=2))
    assert bundle.ds_config is not None
    assert bundle.ds_config["tensor_parallel"] == {"autotp_size": 2}
    assert bundle.ds_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True
    plain = render(shared(tmp_path, sharding__sp_size=2)).ds_config
    assert plain is not None
    assert "tensor_parallel" not in plain
    settings = json.loads(bundle.files["plan.json"])["settings"]
    assert settings["sharding.tp_size"]["value"] == 2


def test_auto_never_chooses_sizes_and_the_search_keeps_them(tmp_path):
    loaded = recipe(tmp_path, FULL, sharding__tp_size=4)
    found = search(loaded, facts("8xH100-80GB", "meta-llama/Llama-3.1-8B"))
    assert {c.job.tensor_parallel for c in (*found.ranked, *found.misses)} == {4}
    assert {c.zero_stage for c in (*found.ranked, *found.misses)} == {1, 2}, "no norm is right at stage 0"
    assert {c.batch.data_parallel for c in found.ranked} == {2}


def test_fp32_may_be_cut_at_stage_0_whose_norm_is_right_there(tmp_path):
    found = search(
        recipe(tmp_path, FULL, precision="fp32", **TP), facts("8xH100-80GB", "meta-llama/Llama-3.1-8B")
    )
    assert {c.zero_stage for c in (*found.ranked, *found.misses)} == {0, 1, 2}
    assert shared(tmp_path, "8xH200-141GB", precision="fp32", sharding__zero_stage=0, **TP)
    profiled = replace(
        facts("8xH100-80GB", "meta-llama/Llama-3.1-8B"), profile={"zero_optimization": {"stage": 0}}
    )
    with pytest.raises(RecipeError, match="gradient norm") as caught:
        make_plan(recipe(tmp_path, FULL, **TP, sharding__config="zero0"), profiled)
    assert caught.value.problems[0].path == "sharding.config"


def test_more_ranks_hold_less_each(tmp_path):
    one = {**PINNED, "trainer__activation_checkpointing": "true", "model__loss": "full"}
    alone, tensor, tokens = (
        shared(tmp_path, **one, **more).memory.components
        for more in ({}, {"sharding__tp_size": 2}, {"sharding__sp_size": 2})
    )
    assert tensor.weights == pytest.approx(alone.weights / 2, rel=0.07), "but for the embedding"
    assert tokens.weights == alone.weights
    assert tokens.optimizer == pytest.approx(alone.optimizer, rel=0.01), "shared among all eight ranks"
    assert tokens.logits == pytest.approx(alone.logits / 2, rel=0.05)
    assert tokens.activations == pytest.approx(alone.activations / 2, rel=0.1)


def test_whole_samples_are_evaluated(tmp_path):
    rows = {"data__eval__split": 0.1, "trainer__per_device_eval_batch_size": 1, "data__max_length": 32768}
    peaks = [
        shared(tmp_path, **rows, sharding__zero_stage=3, sharding__sp_size=size).memory.eval_peak
        for size in (4, 8)
    ]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.02), "no part of the tokens, whatever the ranks"


def test_a_machine_s_ranks_share_sooner_than_machines_do(tmp_path):
    made = shared(tmp_path, "2x4xH100-80GB", sharding__tp_size=8)
    assert any("wait" in warning and "network" in warning for warning in made.warnings)
    inside = shared(tmp_path, "2x4xH100-80GB", sharding__tp_size=4)
    assert not any("network" in warning for warning in inside.warnings)


def test_time_counts_what_ranks_send_to_each_other(tmp_path):
    pinned = {**PINNED, "trainer__activation_checkpointing": "true"}
    alone, tensor = (shared(tmp_path, **pinned, **m).time.likely for m in ({}, {"sharding__tp_size": 8}))
    assert tensor > alone, "the same work, and sums of every layer between the ranks"


LORA = {"adapter__type": "lora"}
TP, SP, CP = {"sharding__tp_size": 2}, {"sharding__sp_size": 2}, {"sharding__cp_size": 2}
NVME = {"sharding__zero_stage": 3, "sharding__offload_optimizer": "nvme", "sharding__nvme_path": "/nvme"}
DISPATCH = "{dispatch_batches: true}"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({**TP, **SP}, "parallel-combination", "tp_size and sp_size"),
    ({**SP, **CP}, "parallel-combination", "sp_size and cp_size"),
    ({"sharding__tp_size": 3}, "parallel-devices", "groups of 3"),
    ({**TP, "sharding__engine": "fsdp"}, "parallel-engine", "accelerate's FSDP2"),
    ({**TP, "sharding__engine": "ddp"}, "parallel-engine", "no tensor parallelism"),
    ({**TP, "sharding__zero_stage": 3}, "parallel-engine", "ZeRO-3"),
    ({**TP, "sharding__zero_stage": 0, "precision": "bf16"}, "parallel-engine", "gradient norm"),
    ({**SP, "sharding__engine": "fsdp"}, "parallel-engine", "no sequence parallelism"),
    ({**SP, "sharding__engine": "ddp"}, "parallel-engine", "no sequence parallelism"),
    ({**CP, "sharding__engine": "deepspeed"}, "parallel-engine", "no context parallelism"),
    ({**TP, "sharding__zero_stage": 2, "sharding__offload_optimizer": "cpu"}, "parallel-engine", "offload"),
    ({**SP, **NVME}, "parallel-engine", "offload"),
    ({"sharding__tp_size": 8, **LORA}, "parallel-conflict", "adapter"),
    ({**TP, **LORA}, "parallel-conflict", "adapter"),
    ({**SP, **LORA, "model__quantization": "nf4"}, "parallel-conflict", "quantised"),
    ({**TP, "model__add_tokens": "[<a>]"}, "parallel-conflict", "new tokens"),
    ({**SP, "data__packing": "true"}, "parallel-conflict", "see each other"),
    ({**SP, "data__padding_free": "true"}, "parallel-conflict", "see each other"),
    ({**CP, "data__packing": "true"}, "parallel-conflict", "see each other"),
    ({**SP, "model__attn_implementation": "eager"}, "parallel-conflict", "sdpa or flash_attention_2"),
    ({**CP, "model__attn_implementation": "flash_attention_2"}, "parallel-conflict", "needs attention sdpa"),
    ({**SP, "data__max_length": 4095}, "parallel-length", "4095 tokens do not divide into 2 parts"),
    ({**CP, "data__max_length": 4098}, "parallel-length", "4098 tokens do not divide into 4 parts"),
    ({**SP, "trainer__per_device_train_batch_size": 2}, "parallel-conflict", "one sample at a time"),
    ({**SP, "precision": "fp16"}, "parallel-conflict", "fp16"),
    ({**TP, "trainer__optim": "adafactor"}, "parallel-conflict", "adafactor"),
    ({**TP, "data__streaming": "true"}, "parallel-conflict", "stream"),
    ({**SP, "trainer__use_liger_kernel": "true"}, "parallel-conflict", "use_liger_kernel"),
    ({**SP, "trainer__label_smoothing_factor": 0.1}, "parallel-conflict", "label_smoothing_factor"),
    ({**TP, "trainer__neftune_noise_alpha": 5.0}, "parallel-conflict", "neftune_noise_alpha"),
    ({**TP, "trainer__torch_compile": "true"}, "parallel-conflict", "torch_compile"),
    ({**TP, "on_oom": "adapt"}, "parallel-conflict", "memory runs out"),
    ({**CP, "data__eval__split": 0.1}, "parallel-conflict", "evaluations"),
    *(
        ({**size, "trainer__average_tokens_across_devices": "false"}, "parallel-conflict", "divides labels")
        for size in (TP, SP, CP)
    ),
    *(
        ({**size, "trainer__accelerator_config": DISPATCH}, "accelerator-config", "different rows")
        for size in (TP, SP, CP)
    ),
]  # fmt: skip


@pytest.mark.parametrize(("said", "code", "words"), REFUSED)
def test_what_cannot_be_shared_is_refused_with_the_alternative(said, code, words, tmp_path):
    problem = refused(tmp_path, **said)
    assert (problem.code, words in problem.message or words in (problem.path or "")) == (code, True)


def test_the_optimizer_of_ranks_that_share_tokens_may_be_in_host_memory(tmp_path):
    settings = {"sharding__zero_stage": 2, "sharding__offload_optimizer": "cpu"}
    made = shared(tmp_path, **SP, **settings)
    assert render(made).ds_config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert (
        made.memory.components.optimizer
        == 0
        < shared(tmp_path, **SP, sharding__zero_stage=2).memory.components.optimizer
    )


def test_a_profile_s_stage_and_own_metrics_are_looked_at_too(tmp_path):
    known = facts("8xH100-80GB", "meta-llama/Llama-3.1-8B")
    staged = replace(known, profile={"zero_optimization": {"stage": 3}})
    with pytest.raises(RecipeError, match="ZeRO-3"):
        make_plan(recipe(tmp_path, FULL, **TP, sharding__config="zero3"), staged)
    with pytest.raises(RecipeError, match="each prediction once for every rank"):
        make_plan(recipe(tmp_path, FULL, **TP), replace(known, hooks=("compute_metrics",)))


@pytest.mark.parametrize("size", SIZES)
def test_one_process_shares_nothing(size, tmp_path):
    problem = refused(tmp_path, "H100-80GB", **{f"sharding__{size}": 2})
    assert problem.code in ("parallel-devices", "engine-conflict")
    spread = refused(tmp_path, **{f"sharding__{size}": 2, "model__device_map": "auto"})
    assert spread.code in ("parallel-devices", "device-map-distributed", "engine-conflict")


def test_context_parallelism_needs_gpus_and_says_that_it_never_ran(tmp_path):
    assert refused(tmp_path, "2xcpu", **CP).code == "parallel-engine"
    assert any("never run" in warning for warning in shared(tmp_path, **CP).warnings)


def test_other_tasks_and_families_are_refused(tmp_path):
    assert refused(tmp_path, task="dpo", **TP).code == "parallel-task"
    gpt2 = FULL.replace("meta-llama/Llama-3.1-8B", "openai-community/gpt2").replace("4096", "512")
    problem = refused(tmp_path, text=gpt2, **TP)
    assert problem.code == "parallel-model"
    assert "has no tensor-parallel plan in transformers" in problem.message
    assert "was not tested" in refused(tmp_path, text=gpt2, **SP).message


ABSENT = object()


def with_config(folder, **changes: Any):
    """The plan of a Mistral whose configuration has these values, with two ranks to a sample or a layer."""
    config = {**(shipped_model_config("mistralai/Mistral-7B-v0.1") or {}), **changes}
    config = {name: value for name, value in config.items() if value is not ABSENT}
    known = facts("8xH100-80GB", "mistralai/Mistral-7B-v0.1")
    spec = read_model_spec("mistralai/Mistral-7B-v0.1", config, "test", "causal-lm")
    return replace(known, model=spec)


@pytest.mark.parametrize(
    ("said", "changes", "code", "words"),
    [
        (SP, {"sliding_window": 4096}, "parallel-model", "within a window"),
        (SP, {"sliding_window": ABSENT}, "parallel-model", "within a window"),
        (CP, {"layer_types": ["full_attention", "sliding_attention"]}, "parallel-model", "within a window"),
        (TP, {"attention_dropout": 0.1}, "parallel-conflict", "attention_dropout above 0"),
        (TP, {"num_key_value_heads": 1}, "parallel-heads", "1 key-value heads"),
        (SP, {"num_key_value_heads": 1}, "parallel-heads", "1 key-value heads"),
        (TP, {"num_attention_heads": 25, "num_key_value_heads": 25, "head_dim": 128}, "parallel-heads", "25"),
        (TP, {"vocab_size": 32001}, "parallel-heads", "vocab_size 32001"),
        (TP, {"intermediate_size": 14335}, "parallel-heads", "intermediate_size 14335"),
    ],
)
def test_what_the_configuration_forbids(said, changes, code, words, tmp_path):
    known = with_config(tmp_path, **{"sliding_window": None, **changes})
    with pytest.raises(RecipeError) as caught:
        make_plan(recipe(tmp_path, FULL, **said), known)
    (problem,) = caught.value.problems
    assert (problem.code, words in problem.message) == (code, True)


def test_a_mistral_without_a_window_shares_tokens_and_the_shipped_one_has_its_window(tmp_path):
    assert make_plan(recipe(tmp_path, FULL, **SP), with_config(tmp_path, sliding_window=None))
    with pytest.raises(RecipeError, match="within a window"):
        make_plan(recipe(tmp_path, FULL, **SP), with_config(tmp_path))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("{split_batches: true}", "not the plan's batch"),
        ("'{\"split_batches\": true}'", "not the plan's batch"),
        ("{even_batches: false}", "fewer batches"),
        ("accelerator.json", "cannot see"),
    ],
)
def test_batches_are_not_changed_behind_the_plan(said, words, tmp_path):
    text = FULL.replace("max_steps: 10", f"max_steps: 10, accelerator_config: {said}")
    problem = refused(tmp_path, text=text)
    assert (problem.code, words in problem.message, problem.line) == ("accelerator-config", True, 4)
    assert shared(tmp_path, "B200", text), "one process splits nothing"
    kept = text.replace(said, "{use_seedable_sampler: false, dispatch_batches: false}")
    assert shared(tmp_path, text=kept)


@pytest.mark.parametrize("size", [TP, SP])
def test_a_profile_s_optimizer_is_one_that_was_tried(size, tmp_path):
    known = facts("8xH100-80GB", "meta-llama/Llama-3.1-8B")
    asked = recipe(tmp_path, FULL, sharding__config="p.json", sharding__zero_stage=1, **size)
    for name in ("Lamb", "Muon", "Lion"):
        with pytest.raises(RecipeError, match=f"optimizer {name} of the base profile"):
            make_plan(asked, replace(known, profile={"optimizer": {"type": name, "params": {}}}))
    for name in ("AdamW", "adam", "SGD"):
        assert make_plan(asked, replace(known, profile={"optimizer": {"type": name, "params": {}}}))


@pytest.mark.parametrize(
    ("profile", "sizes"),
    [
        ({"pipeline": {"stages": 2}}, ""),
        ({"tensor_parallel": {"autotp_size": 2}}, ""),
        ({"scheduler": {"type": "WarmupLR"}}, ""),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, ", tp_size: 2"),
        ({"optimizer": {"type": "Lamb"}}, ", tp_size: 2"),
    ],
)
def test_what_a_profile_says_is_refused_at_the_line_that_names_it(profile, sizes, tmp_path):
    text = FULL + "sharding: {config: p.json" + sizes + "}\n"
    with pytest.raises(RecipeError) as caught:
        make_plan(
            recipe(tmp_path, text), replace(facts("8xH100-80GB", "meta-llama/Llama-3.1-8B"), profile=profile)
        )
    (problem,) = caught.value.problems
    assert (problem.path, problem.line) == ("sharding.config", 5)


def test_fp16_that_the_device_means_is_refused_at_the_size(tmp_path):
    problem = refused(tmp_path, "8xV100-32GB", FULL + "sharding: {tp_size: 2}\n")
    assert (problem.path, problem.line) == ("sharding.tp_size", 5)
    assert "8xV100-32GB implies fp16" in problem.message
    assert "precision: fp32" in (problem.hint or "")


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ('"pipeline": {"stages": 2}', "sharding.tp_size, or zero_stage: 3"),
        ('"tensor_parallel": {"autotp_size": 2}', "sharding.tp_size: N"),
        ('"sequence_parallel_size": 2', "sharding.sp_size: N"),
        ('"expert_parallel": {}', "zero_stage: 3"),
    ],
)
def test_a_profile_does_not_share_ranks_out_behind_the_plan(block, words, tmp_path):
    profile = json.loads(f'{{"zero_optimization": {{"stage": 1}}, {block}}}')
    with pytest.raises(RecipeError) as caught:
        make_plan(
            recipe(tmp_path, FULL, sharding__config="p.json"),
            replace(facts("8xH100-80GB", "meta-llama/Llama-3.1-8B"), profile=profile),
        )
    (problem,) = caught.value.problems
    assert problem.code == "profile-parallel"
    assert words in (problem.hint or "")


def test_a_profile_that_scales_gradients_does_not_go_with_parts_of_samples(tmp_path):
    profile = {"zero_optimization": {"stage": 3, "reduce_scatter": False}}
    with pytest.raises(RecipeError, match="gradients are averaged"):
        make_plan(
            recipe(tmp_path, FULL, sharding__config="p.json", **SP),
            replace(facts("8xH100-80GB", "meta-llama/Llama-3.1-8B"), profile=profile),
        )


@pytest.mark.parametrize("key", ["pp_size", "pipeline_parallel_size", "ep_size"])
def test_keys_of_other_launchers_name_what_there_is(key, tmp_path):
    with pytest.raises(RecipeError) as caught:
        recipe(tmp_path, FULL, **{f"sharding__{key}": 2})
    (problem,) = caught.value.problems
    assert problem.code == "unsupported"
    assert "zero_stage: 3" in (problem.hint or "")


@pytest.mark.parametrize("name", SIZES)
def test_a_run_goes_on_with_the_same_sizes_alone(name, tmp_path):
    assert resume_of(f"sharding.{name}").verdict == "refuse"
    old, new = ({"settings": {f"sharding.{name}": {"value": n, "by": ""}}} for n in (2, 1))
    (difference,) = compare_settings(StoredPlan(old), StoredPlan(new))
    assert difference.refused
    # A plan of an older version had no such setting, and no such ranks.
    assert compare_settings(StoredPlan({"settings": {}}), StoredPlan(new)) == []


def test_files_of_ranks_that_share_a_copy_are_not_converted(tmp_path):
    made = [
        json.loads(
            render(shared(tmp_path, on, sharding__sp_size=2, sharding__zero_stage=2)).files["plan.json"]
        )
        for on in ("8xH100-80GB", "4xH100-80GB")
    ]
    found = compare_plans(StoredPlan(made[0]), StoredPlan(made[1]), 8)
    assert any("ranks share a copy" in difference.reason for difference in found.refused)


def test_a_rehearsal_on_a_cpu_has_two_ranks(tmp_path):
    asked = recipe(tmp_path, FULL, sharding__sp_size=4, sharding__zero_stage=3)
    assert tiny_on_cpu(asked).recipe.sharding.sp_size == 2
    own = tiny_on_cpu(recipe(tmp_path, FULL, sharding__tp_size=8, sharding__engine="ddp")).recipe.sharding
    assert (own.tp_size, own.engine) == (2, "deepspeed")
    context = tiny_on_cpu(
        recipe(tmp_path, FULL, sharding__cp_size=4, sharding__engine="fsdp")
    ).recipe.sharding
    assert (context.cp_size, context.engine) == (1, "fsdp")


TINY_SIZES = [
    ("8xH100-80GB", {"sharding__tp_size": 8}, 8, 2),
    ("3xH100-80GB", {"sharding__tp_size": 4}, 2, 2),
    ("8xH100-80GB", {"sharding__sp_size": 4}, 8, 2),
    ("8xH100-80GB", {"sharding__cp_size": 8, "sharding__engine": "fsdp"}, 8, 2),
    ("H100-80GB", {"sharding__cp_size": 8, "sharding__engine": "fsdp"}, 1, 1),
    ("H100-80GB", {"sharding__tp_size": 8}, 1, 1),
    ("cpu", {"sharding__tp_size": 8}, 2, 2),
    ("cpu", {"sharding__sp_size": 4}, 2, 2),
    ("cpu", {"sharding__cp_size": 4, "sharding__engine": "fsdp"}, 1, 1),
]


@pytest.mark.parametrize(("found", "said", "devices", "size"), TINY_SIZES)
def test_a_tiny_run_keeps_the_sizes_that_its_devices_allow(found, said, devices, size, tmp_path):
    loaded = recipe(tmp_path, FULL, **said)
    known = facts(found, "meta-llama/Llama-3.1-8B")
    hardware = tiny_hardware(None, known.hardware, loaded.recipe)
    config = shipped_model_config("meta-llama/Llama-3.1-8B") or {}
    loaded = tiny_recipe(loaded, config)
    loaded = tiny_on_cpu(loaded) if hardware.is_cpu else tiny_on_gpus(loaded, hardware)
    spec = read_model_spec("tiny", loaded.recipe.model.config, "--tiny", "causal-lm")
    made = make_plan(loaded, replace(known, hardware=hardware, model=spec, tiny=True))
    assert hardware.num_devices == devices
    assert max(made.at(f"sharding.{name}") for name in SIZES) == size


def test_every_family_that_is_taken_has_a_plan_in_transformers():
    assert set(FAMILIES) <= {name for name, rules in tp_plans().items() if rules}
