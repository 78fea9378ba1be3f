"""Engine fsdp in the plan: its settings and command, what it refuses, its memory and time beside ZeRO-3's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml
from factories import BASE, facts, plan, recipe

from launcher.errors import DoesNotFit, RecipeError
from launcher.memory.states import base_weight_bytes
from launcher.models.model import read_model_spec
from launcher.planner.adapting import adapt, ways_out
from launcher.planner.planner import make_plan
from launcher.planner.search import could_fit, search
from launcher.planner.tiny import tiny_on_cpu
from launcher.recipe.loading import with_changes
from launcher.recipe.optimizer_needs import IN_SHARDS
from launcher.render.bundle import render
from launcher.render.command import render_accelerate_config

FULL = BASE.replace("adapter: {type: lora, r: 8}\n", "")
SIXTEEN = {"global_batch_size": 16, "trainer__per_device_train_batch_size": 1}


def fsdp(folder, on="8xA100-80GB", text=BASE, **overrides):
    return plan(folder, on, text, sharding__engine="fsdp", **overrides)


def refused(folder, **overrides):
    with pytest.raises(RecipeError) as caught:
        fsdp(folder, **overrides)
    (problem,) = caught.value.problems
    assert problem.hint
    return problem


def test_what_fsdp_is_given_is_in_the_plan(tmp_path):
    made = fsdp(tmp_path)
    names = [name for name in made.names if name.startswith("fsdp.")]
    assert {name.removeprefix("fsdp."): made.at(name) for name in names} == {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": True,
        "activation_checkpointing": False,
        "cpu_ram_efficient_loading": True,
        "cpu_offload": False,
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    assert all(made.provenance[name].reason for name in names)
    assert made.sharding.zero_stage is None
    assert made.trainer.bf16 is True


def test_the_bundle_has_processes_alone_for_accelerate(tmp_path):
    bundle = render(fsdp(tmp_path))
    assert bundle.ds_config is None
    assert bundle.command[1:3] == ("-m", "launcher.train.loopback")
    config = yaml.safe_load(bundle.files["accelerate.yaml"])
    assert config == render_accelerate_config(fsdp(tmp_path))
    assert (config["distributed_type"], config["num_processes"]) == ("MULTI_GPU", 8)
    assert not [key for key in (*config, *bundle.env) if "fsdp" in key.lower()]


@pytest.mark.parametrize(("precision", "stored"), [("bf16", "bfloat16"), ("fp32", "float32")])
def test_packed_weights_are_stored_as_what_is_sharded(tmp_path, precision, stored):
    """As uint8 FSDP2 would leave them on every rank; as another dtype than it casts to they would be cast."""
    one, eight = (
        fsdp(tmp_path, on, precision=precision, model__quantization="nf4")
        for on in ("2xA100-80GB", "8xA100-80GB")
    )
    assert eight.model.quantization["quant_storage"] == stored
    assert eight.fsdp.cpu_ram_efficient_loading is False
    packed = one.spec.linear_weights // 2
    assert one.memory.components.weights - eight.memory.components.weights >= packed // 2 - packed // 8
    assert eight.memory.load_peak > packed
    other = plan(tmp_path, precision=precision, model__quantization="nf4", sharding__engine="ddp")
    assert "quant_storage" not in other.model.quantization


def test_other_engines_have_none_of_its_settings(tmp_path):
    for engine in ("ddp", "deepspeed"):
        made = plan(tmp_path, sharding__engine=engine)
        assert not [name for name in made.names if name.startswith("fsdp.")]
        assert "trainer.accelerator_config" not in made.names


def test_cpu_processes_are_planned_as_gpus_are(tmp_path):
    made, gpus = fsdp(tmp_path, "2xcpu", precision="bf16"), fsdp(tmp_path, "2xA100-80GB")
    assert made.launch.env["ACCELERATE_USE_CPU"] == "true"
    assert not any("FSDP" in warning or "engine" in warning for warning in made.warnings)
    assert (made.sharding, made.fsdp) == (gpus.sharding, gpus.fsdp)


@pytest.mark.parametrize("on", ["cpu", "1xA100-80GB"])
def test_a_single_process_gets_a_group_of_one(tmp_path, on):
    """Without a launcher nobody else sets what forms a process group, and the Trainer refuses FSDP."""
    bundle = render(fsdp(tmp_path, on))
    assert (bundle.env["RANK"], bundle.env["WORLD_SIZE"]) == ("0", "1")
    assert bundle.env["MASTER_PORT"] == "{master_port}"


@pytest.mark.parametrize(
    ("overrides", "code", "path"),
    [
        ({"sharding__zero_stage": 3}, "engine-conflict", "sharding.engine"),
        ({"sharding__offload_optimizer": "cpu"}, "engine-conflict", "sharding.engine"),
        ({"sharding__offload_param": "nvme"}, "engine-conflict", "sharding.engine"),
        ({"sharding__config": "zero2"}, "engine-conflict", "sharding.engine"),
        ({"on": "1xA100-80GB", "model__device_map": "auto"}, "fix-zero-device-map-asked", "model.device_map"),
        ({"on": "8xV100-32GB"}, "precision-conflict", "precision"),
        ({"precision": "fp16"}, "precision-conflict", "precision"),
        ({"model__quantization": "int8"}, "fsdp-quantized", "model.quantization"),
        ({"trainer__optim": "adafactor"}, "fsdp-optimizer", "trainer.optim"),
        ({"trainer__optim": "adamw_8bit"}, "fsdp-optimizer", "trainer.optim"),
        ({"trainer__optim": "adagrad"}, "fsdp-optimizer", "trainer.optim"),
        ({"launch__launcher": "deepspeed"}, "launcher-conflict", "launch.launcher"),
        (
            {"trainer__push_to_hub": "true", "trainer__hub_model_id": "a/b",
             "trainer__hub_strategy": "every_save"},
            "fsdp-push", "trainer.hub_strategy",
        ),
        (
            {"trainer__save_only_model": "true", "trainer__load_best_model_at_end": "true",
             "data__eval": "{split: 0.1}", "trainer__save_strategy": "epoch"},
            "fix-save-only-model-best", "trainer.save_only_model",
        ),
    ],
)  # fmt: skip
def test_what_fsdp2_cannot_train_is_refused_with_another_way(tmp_path, overrides, code, path):
    problem = refused(tmp_path, **overrides)
    assert (problem.code, problem.path) == (code, path)


def test_of_shards_the_result_alone_is_pushed(tmp_path):
    """Checkpoints hold no weights that from_pretrained reads, unless they hold nothing else."""
    pushed = {"trainer__push_to_hub": "true", "trainer__hub_model_id": "a/b"}
    made = fsdp(tmp_path, **pushed)
    assert made.trainer.hub_strategy == "end"
    assert "are shards" in made.provenance["trainer.hub_strategy"].reason
    for more in ({"trainer__save_only_model": "true"}, {"sharding__engine": "deepspeed"}):
        assert (
            "trainer.hub_strategy"
            not in plan(tmp_path, **{"sharding__engine": "fsdp", **pushed, **more}).names
        )
    fsdp(tmp_path, trainer__hub_strategy="every_save")  # where nothing is pushed, no shards are
    asked = fsdp(tmp_path, **pushed, trainer__hub_strategy="checkpoint")
    assert asked.trainer.hub_strategy == "checkpoint"


def test_an_encoder_decoder_is_refused(tmp_path):
    config = {
        "model_type": "t5", "vocab_size": 32128, "d_model": 512, "d_ff": 2048, "d_kv": 64, "num_layers": 6,
        "num_heads": 8,
    }  # fmt: skip
    loaded = recipe(tmp_path, FULL, task="seq2seq-lm", sharding__engine="fsdp")
    known = replace(facts(), model=read_model_spec("t5", config, "test", "seq2seq-lm"))
    with pytest.raises(RecipeError, match="both sides share an embedding") as caught:
        make_plan(loaded, known)
    assert caught.value.problems[0].code == "engine-conflict"


@pytest.mark.parametrize("optim", IN_SHARDS)
def test_optimizers_that_are_tested_are_planned(tmp_path, optim):
    assert fsdp(tmp_path, trainer__optim=optim).trainer.optim == optim


def test_quantisation_that_is_open_is_never_int8(tmp_path):
    for on in ("2xRTX3090-24GB", "8xA100-80GB"):
        assert fsdp(tmp_path, on, model__quantization="auto").model.quantization_type in ("none", "nf4")


def test_weights_alone_are_saved_whole(tmp_path):
    made = fsdp(tmp_path, trainer__save_only_model="true")
    assert made.fsdp.state_dict_type == "FULL_STATE_DICT"


@pytest.mark.parametrize(
    ("overrides", "loads_once"),
    [
        ({}, True),
        ({"model__add_tokens": "['<new>']"}, False),
        ({"task": "sequence-classification", "data__loss_on": "null"}, False),
    ],
)
def test_one_rank_reads_what_needs_no_fitting(tmp_path, overrides, loads_once):
    made = fsdp(tmp_path, **overrides)
    assert made.fsdp.cpu_ram_efficient_loading is loads_once
    assert made.job.each_loads is not loads_once


def test_host_memory_has_the_copy_that_computes_log_probabilities_before_training(tmp_path):
    """trl keeps it beside the model until training begins; the other engines use the model itself."""
    task = {"task": "dpo", "trainer__precompute_ref_log_probs": "true"}
    copies = [
        plan(tmp_path, text=text, sharding__engine=engine, **given).job.loaded_copies
        for text, engine, given in (
            (FULL, "fsdp", task),
            (BASE, "fsdp", task),
            (FULL, "deepspeed", task),
            (FULL, "fsdp", {"task": "dpo"}),
            (FULL, "fsdp", {"task": "dpo", "trainer__loss_type": "sft"}),
        )
    ]
    assert copies == [2, 1, 1, 2, 1]


def test_gradients_are_reduced_after_each_micro_batch_unless_the_recipe_decides(tmp_path):
    """Between micro-batches every rank would hold the gradients of the whole model."""
    each = fsdp(tmp_path, text=FULL, **SIXTEEN)
    assert each.batch.accumulation == 2
    config = each.trainer.accelerator_config
    assert config == {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    said = "{gradient_accumulation_kwargs: {sync_each_batch: false}}"
    waits = fsdp(tmp_path, text=FULL, trainer__accelerator_config=said, **SIXTEEN)
    assert waits.job.reduces_each is False
    # 16-bit gradients of all parameters, in place of float32 ones of an eighth.
    params = each.spec.params
    found = [made.memory.phases["step"].gradients for made in (each, waits)]
    assert found == [pytest.approx(4 * params / 8, rel=0.01), pytest.approx(2 * params, rel=0.01)]
    other = fsdp(tmp_path, trainer__accelerator_config="{split_batches: false}")
    assert other.trainer.accelerator_config == {"split_batches": False, **config}


def test_it_needs_what_zero3_needs_less_its_buffers(tmp_path):
    """Weights are float32 shards here; ZeRO-3 has 16-bit ones beside float32 master copies."""
    alike = {**SIXTEEN, "trainer__activation_checkpointing": "true"}
    mine = fsdp(tmp_path, text=FULL, **alike)
    zero3 = plan(tmp_path, text=FULL, sharding__zero_stage=3, **alike)
    params, ranks = mine.spec.params, 8
    states = [sum((m.weights, m.gradients, m.optimizer)) for m in (
        mine.memory.phases["step"], zero3.memory.phases["step"])]  # fmt: skip
    assert states[0] == pytest.approx(16 * params / ranks, rel=0.01)
    assert states[1] == pytest.approx(16 * params / ranks, rel=0.01)
    assert mine.memory.phases["step"].buffers < zero3.memory.phases["step"].buffers
    # Without overlap both take as long; FSDP2's is counted, what ZeRO-3 prefetches is not.
    assert mine.time.high == pytest.approx(zero3.time.high, rel=0.1)
    assert 0.75 * zero3.time.likely < mine.time.likely < zero3.time.likely


def test_offload_moves_all_states_to_the_host(tmp_path):
    """Weights, gradients and both moments in float32: 16 bytes for each of them."""
    alike = {**SIXTEEN, "trainer__activation_checkpointing": "true", "text": FULL}
    stays, moved = fsdp(tmp_path, **alike), fsdp(tmp_path, sharding__offload_param="cpu", **alike)
    sharding = moved.sharding
    assert (sharding.offload_param, sharding.offload_optimizer) == ("cpu", "cpu")
    assert (moved.fsdp.cpu_offload, moved.trainer.optim) == (True, stays.trainer.optim)
    step = moved.memory.phases["step"]
    assert (step.weights, step.gradients, step.optimizer) == (0, 0, 0)
    assert moved.memory.host.offloaded == pytest.approx(16 * moved.spec.params, rel=0.01)
    # What is left of the step's memory beside the states: a unit's shards come and go.
    assert stays.memory.needed - moved.memory.needed > 15 * moved.spec.params / 8
    assert moved.time.likely > stays.time.likely


def test_a_packed_base_that_no_device_holds_is_cut_on_its_way_from_the_host(tmp_path):
    """4-bit Llama-3.1-70B on two cards of 24 GiB: each rank quantises 41 GiB in the host's memory."""
    given = {
        "model__name_or_path": "meta-llama/Llama-3.1-70B", "model__quantization": "nf4",
        "data__max_length": 2048, "trainer__activation_checkpointing": "true",
    }  # fmt: skip
    on = "2xRTX4090-24GB"
    with pytest.raises(DoesNotFit):
        fsdp(tmp_path, on, **given)
    host = fsdp(tmp_path, on, sharding__offload_param="cpu", **given)
    largest = 2 * 128_256 * 8192  # the embedding, in 16 bits or widened
    assert largest < host.memory.load_peak < 4 * largest
    base = base_weight_bytes(host.spec, "bfloat16", "nf4", upcast_rest=True)
    assert host.memory.host.loading == pytest.approx(2 * base, rel=0.01)
    assert base > 39 * 2**30


def test_what_ran_out_of_memory_moves_to_the_host_under_the_same_engine(tmp_path):
    text = FULL + "on_oom: adapt\nsharding: {engine: fsdp}\n"
    known = facts()
    given = {
        **SIXTEEN, "trainer__activation_checkpointing": "true", "sharding__offload_activations": "cpu",
    }  # fmt: skip
    step = adapt(recipe(tmp_path, text, **given), known, fsdp(tmp_path, text=FULL, **given), before={})
    assert step is not None
    assert (step.plan.sharding.engine, step.plan.fsdp.cpu_offload, step.keeps_checkpoints) == (
        "fsdp",
        True,
        True,
    )


def test_running_out_of_memory_leads_to_less_and_never_to_a_lower_stage(tmp_path):
    text = FULL + "on_oom: adapt\nsharding: {engine: fsdp}\n"
    loaded = recipe(tmp_path, text, global_batch_size=16, trainer__activation_checkpointing="false")
    known = facts()
    failed = make_plan(loaded, known)
    assert failed.batch.micro == 2
    recomputes = ["activation checkpointing", "activations in host memory"]
    assert ways_out(failed) == ["micro-batch 1", *recomputes, "offload"]
    seen, before = [], {}
    while (step := adapt(loaded, known, failed, before=before)) is not None:
        failed, before = step.plan, step.changes
        seen.append((failed.sharding.engine, failed.batch.micro, step.keeps_checkpoints))
    assert seen == [("fsdp", 1, True)] * 4
    assert failed.fsdp.cpu_offload is True


def test_a_rehearsal_on_a_cpu_keeps_the_engine(tmp_path):
    loaded = recipe(tmp_path, sharding__engine="fsdp")
    assert tiny_on_cpu(loaded).recipe.sharding.engine == "fsdp"


SEVENTY = """\
model: {name_or_path: meta-llama/Llama-3.1-70B, quantization: nf4}
adapter: {type: lora, r: 16}
data: {train: [{path: data/train.jsonl}], max_length: 1024}
precision: bf16
global_batch_size: 2
trainer: {max_steps: 10}
sharding: {offload_param: auto}
"""


@pytest.mark.parametrize("on", ["1xRTX4090-24GB", "2xRTX4090-24GB"])
def test_auto_takes_it_where_nothing_else_fits(tmp_path, on):
    loaded = recipe(tmp_path, SEVENTY)
    known = replace(facts(on, "meta-llama/Llama-3.1-70B"), host_bytes=None)
    found = search(loaded, known)
    assert {c.job.engine.name for c in found.ranked} == {"fsdp"}
    assert {c.job.engine.name for c in found.misses} == {"fsdp", "deepspeed", "ddp"}
    made = make_plan(loaded, known)
    assert (made.sharding.engine, made.sharding.offload_param) == ("fsdp", "cpu")
    assert "GiB" in made.provenance["sharding.engine"].reason
    assert could_fit(loaded, known)


def test_auto_does_not_compare_it_where_something_else_fits_or_it_does_not_fit_either(tmp_path):
    loaded = recipe(tmp_path, SEVENTY)
    large, small = (facts(on, "meta-llama/Llama-3.1-70B") for on in ("2xH200-141GB", "2xRTX4070-12GB"))
    found = search(loaded, large)
    assert {c.job.engine.name for c in (*found.ranked, *found.misses)} == {"ddp", "deepspeed"}
    missed = search(with_changes(loaded, {"data.max_length": 65536}, "test"), small)
    assert missed.ranked == ()
    assert {c.job.engine.name for c in missed.misses} == {"ddp", "deepspeed"}
    pinned = with_changes(loaded, {"sharding.zero_stage": 3}, "test")
    assert not could_fit(pinned, facts("2xRTX4090-24GB", "meta-llama/Llama-3.1-70B"))
