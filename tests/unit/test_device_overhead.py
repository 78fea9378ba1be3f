"""What a device and its host hold beyond tensors (NCCL, page-locked memory), and what operators need."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from factories import facts, plan, recipe

from launcher.engines.deepspeed_ops import OPERATORS, used_operators
from launcher.errors import DoesNotFit, MachineError, RecipeError
from launcher.execute import start_checks
from launcher.knowledge.doctor.build_checks import nvcc
from launcher.knowledge.doctor.needs import cuda_ops, needed_modules
from launcher.machine.hardware import MIB, parse_hardware
from launcher.machine.software import install_hint
from launcher.memory.allocator import EXACT_PINNED, expandable_in, power_of_two, rounds_pinned
from launcher.memory.estimate import estimate_memory
from launcher.memory.nccl import nccl_bytes
from launcher.plan.stored import StoredPlan
from launcher.planner.planner import make_plan
from launcher.planner.resuming import compare_plans
from launcher.planner.search import search
from launcher.planner.speed import predict_step
from launcher.render.bundle import render

LLAMA_8B = """\
model: {name_or_path: meta-llama/Llama-3.1-8B}
adapter: {type: lora, r: 16, target_modules: all-linear}
data: {train: [{path: data/train.jsonl}], max_length: 2048}
global_batch_size: 64
trainer: {max_steps: 10}
"""
OLD, NEW = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
GIB = 2**30


# --- saving, and who trains where nothing is sharded ---------------------------------------------


def test_a_lora_of_8b_is_planned_with_ddp_and_saves_the_adapter_alone(tmp_path):
    known = facts("8xH100-80GB", "meta-llama/Llama-3.1-8B")
    stored = replace(known.model, pretrained_dtype="bfloat16")
    made = make_plan(recipe(tmp_path, LLAMA_8B), replace(known, model=stored))
    assert (made.sharding.engine, made.sharding.zero_stage) == ("ddp", None)
    adapter = 4 * made.job.trainable_params
    assert made.memory.host.saving == adapter < GIB
    assert made.memory.host.loading == 0, "bf16 weights of a bf16 checkpoint stay memory maps"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_saves_the_adapter_once_where_the_recipe_asks_for_it(tmp_path, stage):
    made = plan(tmp_path, "8xH100-80GB", LLAMA_8B, sharding__zero_stage=stage)
    assert (made.sharding.engine, made.sharding.zero_stage) == ("deepspeed", stage)
    shards = 4 * made.job.trainable_params if stage else 0
    assert made.memory.host.saving == max(2 * made.job.trainable_params, shards)


def test_an_open_engine_leaves_stage_0_to_ddp(tmp_path):
    loaded = recipe(tmp_path, LLAMA_8B)
    found = search(loaded, facts("8xH100-80GB", "meta-llama/Llama-3.1-8B"))
    every = [*found.ranked, *found.misses]
    assert {c.zero_stage for c in every if c.job.engine.name == "deepspeed"} == {1, 2, 3}
    assert found.first.job.engine.name == "ddp"


def test_a_run_of_zero_0_is_refused_under_ddp_and_resumes_as_it_was(tmp_path):
    """Version 0.2.0 planned ZeRO-0 where nothing is sharded; its checkpoints are DeepSpeed's."""
    old = plan(tmp_path, "8xH100-80GB", LLAMA_8B, sharding__engine="deepspeed", sharding__zero_stage=0)
    stored = StoredPlan(_json(old))
    new = StoredPlan(_json(plan(tmp_path, "8xH100-80GB", LLAMA_8B)))
    refused = compare_plans(stored, new, 8).refused
    assert [difference.setting for difference in refused if difference.setting.startswith("sharding")] == [
        "sharding.engine"
    ]
    assert "sharding.engine: deepspeed, sharding.zero_stage: 0" in refused[0].problem().message
    assert compare_plans(stored, StoredPlan(_json(old)), 8).refused == []


def _json(made):
    return json.loads(render(made).files["plan.json"])


def test_what_is_not_overlapped_is_paid_for(tmp_path):
    job = plan(tmp_path, "8xH100-80GB", LLAMA_8B, sharding__zero_stage=2).job
    spec, hardware = facts("8xH100-80GB", "meta-llama/Llama-3.1-8B").model, parse_hardware("8xH100-80GB")
    assert not job.overlap_comm
    apart = predict_step(spec, job, hardware, kept=0)
    hidden = predict_step(spec, replace(job, overlap_comm=True), hardware, kept=0)
    assert apart.likely > hidden.likely
    assert apart.high == hidden.high, "at the worst nothing is hidden anyway"


def test_the_hosts_memory_decides_where_it_is_known(tmp_path):
    text = """\
    model: {name_or_path: Qwen/Qwen3-0.6B}
    data: {train: [{path: data/train.jsonl}], max_length: 512}
    sharding: {engine: ddp}
    trainer: {max_steps: 10}
    """
    loaded, known = recipe(tmp_path, text), facts("8xH100-80GB", "Qwen/Qwen3-0.6B")
    made = make_plan(loaded, known)
    assert made.memory.host.loading >= 8 * 4 * 590_000_000, "float32 copies of bf16 weights on each rank"
    with pytest.raises(DoesNotFit) as caught:
        make_plan(loaded, replace(known, host_bytes=20 * GIB))
    assert caught.value.problems[0].code == "does-not-fit"


def test_a_node_with_less_memory_than_planned_is_refused_at_the_start(tmp_path, monkeypatch):
    made = plan(tmp_path, "1xH100-80GB", LLAMA_8B)
    monkeypatch.setattr(start_checks.probe, "host_memory_bytes", lambda: made.memory.host_bytes - 1)
    with pytest.raises(MachineError) as caught:
        start_checks._check_host_memory(made)
    assert (caught.value.problems[0].code, caught.value.exit_code) == ("host-memory", 4)
    monkeypatch.setattr(start_checks.probe, "host_memory_bytes", lambda: made.memory.host_bytes)
    start_checks._check_host_memory(made)


# --- the allocator ---------------------------------------------------------------------------------


def test_the_older_variable_wins_as_in_torch():
    assert not expandable_in({NEW: "expandable_segments:True", OLD: "max_split_size_mb:64"})
    assert expandable_in({OLD: "expandable_segments:True", NEW: "max_split_size_mb:64"})


@pytest.mark.parametrize(
    ("shell", "in_recipe", "env", "expandable"),
    [
        ({}, {}, {NEW: "expandable_segments:True"}, True),
        ({OLD: "max_split_size_mb:64"}, {}, {OLD: "max_split_size_mb:64"}, False),
        ({NEW: "max_split_size_mb:64"}, {}, {NEW: "max_split_size_mb:64"}, False),
        ({OLD: "backend:native"}, {NEW: "expandable_segments:True"},
         {NEW: "expandable_segments:True", OLD: "expandable_segments:True"}, True),
        ({OLD: "expandable_segments:True"}, {OLD: "backend:native"}, {OLD: "backend:native"}, False),
    ],
)  # fmt: skip
def test_the_shells_options_hold_where_the_recipe_has_none(tmp_path, shell, in_recipe, env, expandable):
    changes = {f"launch__env__{name}": value for name, value in in_recipe.items()}
    made = make_plan(recipe(tmp_path, **changes), replace(facts(), allocator=shell))
    assert {name: value for name, value in made.launch.env.items() if "ALLOC_CONF" in name} == env
    assert made.job.expandable is expandable


def test_page_locked_buffers_take_their_size_or_count_as_powers_of_two(tmp_path):
    text = """\
    model: {name_or_path: huggyllama/llama-7b}
    data: {train: [{path: data/train.jsonl}], max_length: 512}
    sharding: {zero_stage: 2, offload_optimizer: cpu}
    trainer: {max_steps: 10, gradient_accumulation_steps: 1}
    """
    loaded, here = recipe(tmp_path, text), facts()
    exact = make_plan(loaded, replace(here, versions={"torch": "2.13.0"}))
    assert exact.launch.env[NEW] == f"expandable_segments:True,{EXACT_PINNED}"
    assert (exact.job.rounds_pinned, exact.memory.host.rounding) == (False, 0)
    older = make_plan(loaded, replace(here, versions={"torch": "2.12.0"}))
    assert older.launch.env[NEW] == "expandable_segments:True"
    owned = -(-older.job.trainable_params // 8)
    assert power_of_two(4 * owned) == 4 * GIB > 4 * owned
    two = 2 * (4 * GIB - 4 * owned)
    assert older.memory.host.rounding >= 8 * two, "weights and gradients in float32"
    assert older.memory.host_bytes - exact.memory.host_bytes == older.memory.host.rounding
    assert rounds_pinned({})
    assert not rounds_pinned({NEW: EXACT_PINNED})


def test_sleep_mode_goes_without_expandable_segments(tmp_path):
    text = _grpo() + "\n  vllm_enable_sleep_mode: true\n"
    here = facts("8xH100-80GB", "Qwen/Qwen3-8B", "grpo")
    made = make_plan(recipe(tmp_path, text), here)
    assert (NEW in made.launch.env, made.job.expandable) == (False, False)
    assert "vllm" in needed_modules(made)
    assert "generation.backend" in install_hint(["vllm"])
    with pytest.raises(RecipeError) as caught:
        make_plan(recipe(tmp_path, text, launch__env__PYTORCH_ALLOC_CONF="expandable_segments:True"), here)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("vllm-sleep-mode", "trainer.vllm_enable_sleep_mode")
    with pytest.raises(RecipeError):
        make_plan(recipe(tmp_path, text), replace(here, allocator={OLD: "expandable_segments:True"}))


def _grpo() -> str:
    from launcher.files.shipped import recipes_dir

    text = (recipes_dir() / "qwen3_8b_grpo.yaml").read_text()
    return text.split("\nhardware:")[0].rstrip()


# --- NCCL ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on", "mib"),
    [
        ("1xA100-80GB", 0),
        ("2xA100-80GB", 24 * 12),
        ("4xA100-80GB", 24 * 18),
        ("8xH100-80GB", 24 * 18 + 8 * 32),
        ("2xRTX4090-24GB", 4 * 12),
        ("4xcpu", 0),
    ],
)
def test_buffers_of_one_communicator(tmp_path, on, mib):
    """Source: NVIDIA/nccl#964 has 544 MiB for two A100 and 688 for four, 256 of which are not counted."""
    job, hardware = plan(tmp_path, "1xA100-80GB").job, parse_hardware(on)
    assert nccl_bytes(replace(job, data_parallel=hardware.num_devices), hardware) == mib * MIB


def test_deepspeed_has_a_second_communicator_and_tensors_stay_as_they_were(tmp_path):
    ddp = plan(tmp_path, "4xA100-80GB", LLAMA_8B, sharding__engine="ddp")
    zero = plan(tmp_path, "4xA100-80GB", LLAMA_8B, sharding__zero_stage=2)
    assert zero.memory.components.nccl == 2 * ddp.memory.components.nccl == 2 * 432 * MIB
    parts = ddp.memory.components
    assert parts.outside == parts.context + parts.nccl
    one = estimate_memory(ddp.spec, ddp.job, replace(ddp.hardware, device="cpu"))
    assert one.components.outside == 0


# --- operators -------------------------------------------------------------------------------------


def test_what_needs_the_toolkit_is_in_one_table(tmp_path):
    made = plan(tmp_path, sharding__zero_stage=3)
    quantized = replace(
        made,
        settings=made.settings.copy(),
    )
    quantized.settings.put("deepspeed.profile", {"zero_optimization.zero_quantized_weights": True})
    assert (used_operators(made), cuda_ops(made)) == ([], [])
    assert (used_operators(quantized), cuda_ops(quantized)) == (["quantizer"], ["quantizer"])
    nvme = replace(made, job=replace(made.job, offload_optimizer="nvme"))
    assert cuda_ops(nvme) == ["async_io"]
    assert cuda_ops(replace(nvme, hardware=parse_hardware("2xcpu"))) == []
    without = SimpleNamespace(
        build=SimpleNamespace(nvcc=None, cuda_home=None),
        stack={"deepspeed": {}, "torch": {"cuda": "12.8"}},
    )
    for one in (quantized, nvme):
        verdict = nvcc(without, one)
        assert verdict.status == "fail"
        assert OPERATORS[cuda_ops(one)[0]].instead in (verdict.hint or "")
    ready = replace_stack(without, ["quantizer"])
    assert nvcc(ready, quantized).status == "ok", "compiled when DeepSpeed was installed"


def replace_stack(machine, installed):
    return SimpleNamespace(
        build=machine.build, stack={**machine.stack, "deepspeed": {"installed": installed}}
    )
