"""The estimate as a whole: what it answers, which moment rules, the largest batch, its speed."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from factories import BASE, facts, recipe
from hypothesis import given
from hypothesis import strategies as st
from memory_cases import A100, CPU, FULL, JOB_1B, LLAMA_1B, LLAMA_7B, LORA_1B, NODE, ZERO, spec

from launcher.engines import ENGINES
from launcher.engines.deepspeed import DEEPSPEED
from launcher.engines.fsdp import FSDP
from launcher.facts.hardware import parse_hardware
from launcher.memory.estimate import MemoryEstimate, estimate_memory, max_micro_batch
from launcher.memory.job import MemoryJob
from launcher.planner.planner import make_plan
from launcher.planner.strategies import model_jobs, on_hardware, open_jobs, strategy_name, worth_a_row


def test_json_is_complete_and_the_total_is_the_sum_of_the_components() -> None:
    answer = estimate_memory(LLAMA_7B, FULL, A100).to_json()
    assert sum(answer["components"].values()) == answer["total"]
    assert answer["low"] <= answer["total"] < answer["high"]
    assert set(answer) == {
        "device_bytes", "fits", "margin", "low", "expected", "high", "components", "total",
        "save_peak", "eval_peak", "eval_kept", "load_peak", "host_bytes", "host", "phase",
        "phases", "method", "calibration", "notes", "needed", "moment",
    }  # fmt: skip
    json.dumps(answer)


def test_unknown_device_memory_gives_no_verdict_and_no_batch() -> None:
    assert estimate_memory(LLAMA_7B, FULL, CPU).fits is None
    assert max_micro_batch(LLAMA_7B, FULL, CPU) is None


def test_cpu_has_no_cuda_context() -> None:
    assert estimate_memory(LLAMA_7B, FULL, CPU).components.context == 0


def sized(device_bytes: int) -> MemoryEstimate:
    """A LoRA job that evaluates with a larger batch than it trains, on a device of this size."""
    job = replace(JOB_1B, micro_batch=1, adapter=True, trainable_params=LORA_1B, eval_batch=64)
    return estimate_memory(LLAMA_1B, job, replace(A100, device_bytes=device_bytes))


def test_a_plan_fits_only_if_evaluation_fits_too() -> None:
    memory = sized(80 * 2**30)
    assert memory.eval_peak > memory.total
    assert (memory.needed, memory.moment) == (memory.eval_peak, "evaluating")
    between = (memory.total + memory.eval_peak) // 2
    assert sized(int(between / 0.95)).fits is False
    assert sized(int(memory.needed / 0.94)).fits is True


@pytest.mark.parametrize("field", ["total", "save_peak", "eval_peak", "load_peak"])
def test_the_moment_that_needs_most_rules(field: str) -> None:
    memory = estimate_memory(LLAMA_1B, JOB_1B, A100)
    names = {
        "total": "training", "save_peak": "saving", "eval_peak": "evaluating", "load_peak": "loading",
    }  # fmt: skip
    largest = replace(memory, **{field: 10**12})
    assert (largest.needed, largest.moment) == (10**12, names[field])


def test_saving_gathers_one_module_at_stage_3_and_nothing_below() -> None:
    largest = 32000 * 4096
    third = estimate_memory(LLAMA_7B, replace(ZERO, zero_stage=3), NODE)
    resident = third.phases["step"].total - third.phases["step"].temporary
    assert third.save_peak == resident + 2 * largest
    assert third.load_peak == third.components.weights + third.components.context + 2 * largest
    plain = estimate_memory(LLAMA_7B, FULL, A100)
    assert plain.save_peak == plain.phases["step"].total - plain.phases["step"].temporary


def test_quantising_needs_a_matrix_in_16_bits_beside_the_weights() -> None:
    lora = LLAMA_7B.lora_params(16, "all-linear")
    job = replace(FULL, adapter=True, trainable_params=lora, quantization="nf4")
    memory = estimate_memory(LLAMA_7B, job, A100)
    assert memory.load_peak - memory.components.weights - memory.components.context == 2 * 4096 * 11008


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantised_base_is_whole_on_each_rank_while_it_loads_under_zero_3(kind: str) -> None:
    lora = LLAMA_7B.lora_params(16, "all-linear")
    job = replace(ZERO, adapter=True, trainable_params=lora, quantization=kind)
    plain, sharded = (estimate_memory(LLAMA_7B, replace(job, zero_stage=stage), NODE) for stage in (2, 3))
    assert sharded.components.weights < plain.components.weights / 4
    assert sharded.load_peak > 0.99 * (plain.load_peak - 2 * plain.trainable_params)
    assert sharded.needed >= sharded.load_peak


def test_preference_pairs_are_evaluated_by_tiles_of_logits() -> None:
    pairs = spec("meta-llama/Llama-3.2-1B", "dpo")
    job = replace(JOB_1B, sequences_per_sample=2)
    few, many = (estimate_memory(pairs, replace(job, eval_batch=n), A100).eval_peak for n in (8, 16))
    tokens = 2 * 8 * JOB_1B.sequence_length
    # Beyond a tile only the layers' own step grows, by far less than two bytes a word of the vocabulary.
    assert many - few < tokens * pairs.vocab_size


def test_what_an_evaluation_batch_leaves_behind() -> None:
    job = replace(JOB_1B, eval_batch=4, data_parallel=2)
    # Token ids and labels of 64 bits each, gathered from both ranks.
    assert estimate_memory(LLAMA_1B, job, A100).eval_kept == 2 * 8 * 2 * 4 * 2048
    labelled = spec("meta-llama/Llama-3.2-1B", "sequence-classification")
    assert estimate_memory(labelled, job, A100).eval_kept == 2 * 4 * (4 * labelled.head.out_features + 8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optim": "galore_adamw"}, "upper bound"),
        ({"optim": "paged_adamw_8bit"}, "host memory"),
        ({"optim": "adafactor", "engine": DEEPSPEED, "zero_stage": 1}, "factored"),
        ({"engine": FSDP, "accumulation": 2, "data_parallel": 2}, "unsharded"),
    ],
)
def test_notes_say_what_is_assumed(changes: dict[str, object], words: str) -> None:
    assert estimate_memory(LLAMA_7B, FULL, A100).notes == ()
    notes = estimate_memory(LLAMA_7B, replace(FULL, **changes), A100).notes  # type: ignore[arg-type]
    assert any(words in note for note in notes)


JOBS = st.builds(
    lambda engine, stage, precision, checkpointing, attention, adapter: replace(
        JOB_1B,
        engine=engine,
        zero_stage=stage,
        data_parallel=4,
        precision=precision,
        dtype="float32",
        checkpointing=checkpointing,
        attention=attention,
        adapter=adapter,
        trainable_params=LORA_1B if adapter else LLAMA_1B.params,
    ),
    st.sampled_from(ENGINES),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from(["fp32", "bf16", "fp16"]),
    st.booleans(),
    st.sampled_from(["eager", "sdpa", "flash_attention_2"]),
    st.booleans(),
)


@given(job=JOBS, batch=st.integers(1, 64), length=st.integers(8, 8192), more=st.integers(1, 64))
def test_estimate_grows_with_batch_and_length(job: MemoryJob, batch: int, length: int, more: int) -> None:
    def total(micro: int, tokens: int) -> int:
        grown = replace(job, micro_batch=micro, sequence_length=tokens)
        return estimate_memory(LLAMA_1B, grown, A100).total

    here = total(batch, length)
    assert total(batch + more, length) >= here
    assert total(batch, length + more) >= here


def test_largest_micro_batch_fits_and_the_next_does_not() -> None:
    best = max_micro_batch(LLAMA_1B, JOB_1B, A100)
    assert best is not None
    assert best > 1
    assert estimate_memory(LLAMA_1B, replace(JOB_1B, micro_batch=best), A100).fits
    assert not estimate_memory(LLAMA_1B, replace(JOB_1B, micro_batch=best + 1), A100).fits


def test_no_micro_batch_fits_a_small_device() -> None:
    assert max_micro_batch(LLAMA_7B, FULL, parse_hardware("1x24GB")) == 0


def test_two_hundred_estimates_are_quick() -> None:
    start = time.process_time()
    for size in range(1, 201):
        estimate_memory(LLAMA_7B, replace(FULL, micro_batch=size), A100)
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize("on", ["8xA100-80GB", "8xA100-40GB", "1x24GB"])
def test_the_closed_form_part_of_a_plan_takes_50_ms(tmp_path: Path, on: str) -> None:
    asked = BASE.replace("adapter: {type: lora, r: 8}\n", "") if on != "1x24GB" else BASE
    loaded, known = recipe(tmp_path, asked + "global_batch_size: 128\n"), facts(on)
    times = []
    for _ in range(3):
        start = time.process_time()
        make_plan(loaded, known)
        times.append(time.process_time() - start)
    assert min(times) < 0.05


def test_strategies_cover_engines_precisions_adapters_and_optimizers() -> None:
    jobs = dict(model_jobs(LLAMA_7B))
    assert len(jobs) == len(model_jobs(LLAMA_7B))
    assert {job.engine for job in jobs.values()} == set(ENGINES)
    assert {job.zero_stage for job in jobs.values()} == {0, 1, 2, 3}
    assert {job.offload_param for job in jobs.values()} == {"none", "cpu", "nvme"}
    assert {job.quantization for job in jobs.values()} == {"none", "int8", "nf4"}
    assert {"bf16", "bf16-true"} == {job.precision for job in jobs.values()}
    assert len({job.optim for job in jobs.values()}) == 5
    attention, everything = jobs["LoRA r16 attention only, DDP"], jobs["LoRA r16, DDP"]
    assert attention.trainable_params == 32 * 4 * 16 * 2 * 4096 < everything.trainable_params


@pytest.mark.parametrize(
    "name", ["google-bert/bert-large-uncased", "google/vit-large-patch16-224", "bigscience/mt0-large"]
)
def test_strategies_of_encoders(name: str) -> None:
    model = spec(name)
    for _, job in model_jobs(model):
        assert estimate_memory(model, on_hardware(job, NODE, 1), NODE).needed > 0


def test_strategies_on_old_devices_use_float16() -> None:
    job = dict(model_jobs(LLAMA_7B))["full pure 16-bit, DDP"]
    old = on_hardware(job, parse_hardware("4xV100-32GB"), 1)
    assert (old.precision, old.dtype, old.data_parallel) == ("fp16-true", "float16", 4)
    shared = on_hardware(job, NODE, 2)
    assert (shared.precision, shared.data_parallel, shared.tensor_parallel) == ("bf16-true", 4, 2)


def test_nothing_is_sharded_over_one_copy() -> None:
    rows = [name for name, job in model_jobs(LLAMA_7B) if worth_a_row(on_hardware(job, A100, 1))]
    assert {"full, DDP", "full, ZeRO-3, all on CPU"} <= set(rows)
    assert not {"full, ZeRO-3", "full, FSDP2"} & set(rows)


def test_a_recipes_job_over_what_it_leaves_open() -> None:
    open_names = [name for name, _ in open_jobs(ZERO, ())]
    assert len(open_names) == len(set(open_names)) == 2 * (1 + 2 + 2 + 3)
    assert "ZeRO-3, all on CPU, checkpointing" in open_names
    fixed = ("sharding.zero_stage", "sharding.offload_param", "trainer.activation_checkpointing")
    assert [name for name, _ in open_jobs(replace(ZERO, zero_stage=2), fixed)] == ["ZeRO-2"]
    assert [name for name, _ in open_jobs(FULL, ())] == ["DDP", "DDP, checkpointing"]
    assert strategy_name(replace(ZERO, engine=FSDP, offload_param="cpu")) == "FSDP2, all on CPU"
